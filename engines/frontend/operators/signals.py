"""Lower Fourier transforms of known length to products with a table of sines and cosines.

    y[k] = sum over t of x[t] e^(-2 pi i k t / n)       inverse: e^(+...), and 1 / n of it

The last axis holds the parts of a number: two if complex, one if real. A table [n, parts, m, 2] has the factor of each
part of x[t] in each part of y[k]. A short-time transform is a convolution with the table.
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.normalise import Beyond, OperatorCall, rule
from infer_server.engines.frontend.operators.parts import NodeBuilder
from infer_server.engines.ir.graph import Array, Dim, Node
from infer_server.engines.ir.shapes import fixed, normal_axis

MOST = 1 << 22          # most elements of a table; longer transforms need a fast algorithm


def _table(length: int, parts: int, outputs: int, inverse: bool = False) -> Array:
    """Return the table of a transform, float64 [length, parts, outputs, 2], divided by the length if inverse.

    Multiples of a quarter turn are exact, so that the imaginary part at k = 0 and k = n / 2 of real input is 0 and not
    a rounding error, of whose sign a model may take an angle.
    """
    steps = np.outer(np.arange(length), np.arange(outputs)) % length
    angle = (2 if inverse else -2) * np.pi * (steps / length)
    quarter = 4 * steps % length == 0
    cos, sin = (np.where(quarter, np.rint(wave) + 0.0, wave) for wave in (np.cos(angle), np.sin(angle)))
    real = np.stack([cos, sin], -1)
    imaginary = np.stack([-sin, cos], -1)
    table = np.stack([real, imaginary][:parts], 1)
    return np.asarray(table / length if inverse else table)


def _parts(call: OperatorCall) -> int:
    parts = call.type().shape[-1]
    if parts not in (1, 2):
        raise GraphError(f"the last axis has extent {parts}, but must have 1 (real) or 2 (complex)")
    return int(parts)


def _outputs(length: int, parts: int, onesided: int) -> int:
    """Return the number of outputs: half of them and one if one-sided, which requires real input."""
    if onesided and parts == 2:
        raise GraphError("onesided = 1 needs real input, but the input is complex")
    return length // 2 + 1 if onesided else length


@rule("DFT")
def _dft(call: OperatorCall) -> list[Node]:
    shape, parts, w, x = call.type().shape, _parts(call), NodeBuilder(call), call.node.inputs[0]
    (axis,) = (call.ints(2) or (-2,)) if call.opset >= 20 else (call.attr("axis", 1),)
    axis, inverse, onesided = normal_axis(axis, len(shape)), call.attr("inverse", 0), call.attr("onesided", 0)
    if axis == len(shape) - 1:
        raise GraphError("axis must not be the last one, which holds real and imaginary parts")
    if inverse and onesided:
        raise Beyond("an inverse of one side")
    if isinstance(shape[axis], str):
        raise Beyond("a transform along the batch")
    (size,) = fixed(shape[axis:axis + 1])
    (length,) = call.ints(1) or (size,)
    outputs = _outputs(length, parts, onesided)
    if length * parts * outputs * 2 > MOST:
        raise Beyond(f"a transform of {length} numbers")
    if length < size:
        x = w("Slice", x, axes=(axis,), starts=(0,), ends=(length,), steps=(1,))
    elif length > size:
        pads = [0] * 2 * len(shape)
        pads[len(shape) + axis] = length - size
        x = w("Pad", x, pads=tuple(pads), mode="constant")
    others = [i for i in range(len(shape) - 1) if i != axis]
    order = (*others, axis, len(shape) - 1)
    outer = tuple(shape[i] for i in others)
    x = w("Reshape", w("Transpose", x, perm=order), shape=(*outer, length * parts))
    table = _table(length, parts, outputs, bool(inverse)).reshape(length * parts, outputs * 2)
    y = w("MatMul", x, w.constant(table.astype(call.type().dtype)))
    y = w("Reshape", y, shape=(*outer, outputs, 2))
    return w.finish("Transpose", y, perm=tuple(np.argsort(order).tolist()))


@rule("STFT")
def _stft(call: OperatorCall) -> list[Node]:
    """Lower STFT to a Conv: the signal [N, L, parts] has `parts` channels, and each output two filters."""
    kind, w, x = call.type(), NodeBuilder(call), call.node.inputs[0]
    items, size = kind.shape[0], fixed(kind.shape[1:2])[0]
    parts = _parts(call) if len(kind.shape) == 3 else 1
    (step,) = call.ints(1) or (1,)
    wide = fixed(call.type(2).shape)[0] if call.has(2) else None
    (length,) = call.ints(3) or (wide or size,)
    if wide not in (None, length) or step < 1 or not 1 <= length <= size:
        raise GraphError(f"frame_length {length}, frame_step {step} and a window of {wide or length} do not fit a "
                         f"signal of {size}")
    outputs = _outputs(length, parts, call.attr("onesided", 1))
    if length * parts * outputs * 2 > MOST:
        raise Beyond(f"frames of {length} numbers")
    table = _table(length, parts, outputs)
    filters = w.constant(table.transpose(2, 3, 1, 0).reshape(outputs * 2, parts, length).astype(kind.dtype))
    if wide:
        filters = w("Mul", filters, call.node.inputs[2])
    x = w("Transpose", w("Reshape", x, shape=(items, size, parts)), perm=(0, 2, 1))
    frames: Dim = (size - length) // step + 1
    y = w("Conv", x, filters, kernel_shape=(length,), strides=(step,), dilations=(1,), pads=(0, 0), group=1)
    y = w("Transpose", y, perm=(0, 2, 1))
    return w.finish("Reshape", y, shape=(items, frames, outputs, 2))


@rule("CausalConvWithState")
def _causal(call: OperatorCall) -> list[Node]:
    """Lower CausalConvWithState: a depthwise convolution over the state and x, the end of which is the new state."""
    w, x, (_, channels, size) = NodeBuilder(call), call.node.inputs[0], call.type().shape
    taps = fixed(call.type(1).shape)[2]
    wide = fixed([size])[0] + taps - 1
    if call.has(3):
        x = w("Concat", call.node.inputs[3], x, axis=2)
    elif taps > 1:
        x = w("Pad", x, pads=(0, 0, taps - 1, 0, 0, 0), mode="constant")

    def cut(start: int, end: int) -> str:
        return w("Slice", x, axes=(2,), starts=(start,), ends=(end,), steps=(1,))

    w.output(1, "Identity", cut(wide - taps + 1, wide))
    weights = call.node.inputs[1]
    if call.values[1] is not None:
        y = w("Conv", x, weights, kernel_shape=(taps,), strides=(1,), dilations=(1,), pads=(0, 0),
              group=fixed([channels])[0])
    else:
        rows = w.several("Split", weights, outputs=taps, axis=2, split=(1,) * taps)
        products = [w("Mul", cut(tap, wide - taps + 1 + tap), w("Reshape", row, shape=(channels, 1)))
                    for tap, row in enumerate(rows)]
        y = products[0]
        for product in products[1:]:
            y = w("Add", y, product)
    if call.has(2):
        y = w("Add", y, w("Reshape", call.node.inputs[2], shape=(channels, 1)))
    if (activation := call.attr("activation", "none")) not in ("none", "silu", "swish"):
        raise GraphError(f"activation is '{activation}', but must be none, silu or swish")
    return w.finish("Identity" if activation == "none" else "Swish", y)
