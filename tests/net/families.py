"""Families of random nodes: each function adds one node, or a few, to a sketch."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from onnx import helper

from tests.net.graphs import FLOATS, INTEGERS, SIGNED, Sketch, Tensor, dtype_of

Family = Callable[[Sketch], Any]

PLAIN = ("Relu", "LeakyRelu", "Sigmoid", "Tanh", "Exp", "Abs", "Neg", "Floor", "Ceil", "Round", "Sign", "Erf",
         "Softplus", "Softsign", "Elu", "Selu", "Celu", "HardSigmoid", "HardSwish", "Mish", "Gelu", "Sin", "Cos",
         "Atan", "Sinh", "Cosh", "Asinh", "ThresholdedRelu", "Shrink", "Identity", "IsNaN", "IsInf")
UNARY: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(PLAIN, {}),
    "Gelu ": {"approximate": "tanh"}, "LeakyRelu ": {"alpha": 1.5}, "Elu ": {"alpha": 0.5},
    "HardSigmoid ": {"alpha": 0.5, "beta": 0.25}, "Celu ": {"alpha": 2.0}, "Shrink ": {"bias": 0.5, "lambd": 1.0},
    "IsInf ": {"detect_negative": 0}}
POSITIVE = ("Log", "Sqrt", "Reciprocal")
ACTIVATIONS = ("Relu", "Sigmoid", "Tanh", "HardSwish", "Neg", "Abs")
BINARY = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Pow", "PRelu", "Mod")
COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")


def beside(s: Sketch, x: Tensor, kind: str = "grid", dtype: str = "") -> Tensor:
    """Return a tensor that broadcasts with x: a constant, an input or an existing one."""
    dtype = dtype or x.dtype
    if s.draw(st.booleans()):
        actual = [t for t in s.tensors.values() if t.dtype == dtype and kind == "grid" and t.name not in s.constants
                  and t.shape[1:] == x.shape[1:] and t.batch == x.batch]
        return s.draw(st.sampled_from(actual)) if actual else s.input(dtype, x.shape, kind, batched=x.batch == 0)
    drop = s.draw(st.integers(0, x.rank))
    shape = [1 if axis == x.batch or s.draw(st.booleans()) else x.shape[axis] for axis in range(drop, x.rank)]
    if s.draw(st.booleans()):
        return s.weight(*shape, kind=kind, dtype=dtype)
    return s.input(dtype, shape, kind, batched=False)


# ---- pointwise
def unary(s: Sketch) -> None:
    op = s.draw(st.sampled_from([*UNARY, *POSITIVE, "Clip"]))
    if op == "Clip":
        low, high = (s.draw(st.sampled_from([None, number])) for number in (-1.0, 1.5))
        x = s.float()
        s.add(op, x, *(None if bound is None else s.constant(bound, x.dtype) for bound in (low, high)))
    elif op in POSITIVE:
        s.add(op, s.float(kind="positive"))
    else:
        s.add(op.strip(), s.float(), **UNARY[op])


def binary(s: Sketch) -> None:
    op = s.draw(st.sampled_from(BINARY))
    x = s.float(kind="positive" if op == "Pow" else "grid")
    y = beside(s, x, "positive" if op in ("Div", "Mod") else "grid")
    if op == "PRelu":
        if any(a not in (1, b) for a, b in zip(reversed(y.shape), reversed(x.shape), strict=False)) or y.batch == 0:
            reject()
        s.add(op, x, y)
    elif op == "Mod":
        s.add(op, x, y, fmod=1)
    elif op in ("Min", "Max"):
        s.add(op, x, y, *[beside(s, x) for _ in range(s.draw(st.integers(0, 1)))])
    else:
        s.add(op, *((y, x) if s.draw(st.booleans()) and op != "Div" and op != "Pow" else (x, y)))


def choice(s: Sketch) -> None:
    """Add a comparison and a node that depends on it."""
    x = s.float()
    truth = s.add(s.draw(st.sampled_from(COMPARISONS)), x, beside(s, x))
    if s.draw(st.booleans()):
        truth = s.add("Not", truth)
    if s.draw(st.booleans()):
        s.add("Where", truth, x, beside(s, x))
    elif s.draw(st.booleans()):
        s.add("Cast", truth, to=helper.np_dtype_to_tensor_dtype(dtype_of(s.floats)))


def integers(s: Sketch) -> None:
    op = s.draw(st.sampled_from(("Add", "Sub", "Mul", "Div", "Min", "Max", "Mod", "Neg", "Abs", "Sign", "BitwiseAnd",
                                 "BitwiseOr", "BitwiseXor", "BitwiseNot", "Where", "Relu", "Clip", "BitShift", "Pow",
                                 *COMPARISONS)))
    kind = s.draw(st.sampled_from(["grid", "any"]))
    x = s.any(lambda t: t.dtype == s.integers, lambda: s.input(s.integers, s.shape(), kind))
    if op in ("Neg", "Relu") and x.dtype not in SIGNED or op == "Relu" and x.dtype == "int64":
        reject()
    if op in ("Neg", "Abs", "Sign", "BitwiseNot", "Relu"):
        s.add(op, x)
    elif op == "Where":
        s.add(op, s.input("bool", x.shape, batched=x.batch == 0), x, beside(s, x))
    elif op == "Clip":
        s.add(op, x, s.constant(1, x.dtype), s.constant(3, x.dtype))
    elif op == "BitShift":
        if x.dtype not in INTEGERS or x.dtype in SIGNED:
            reject()
        s.add(op, x, s.constant(2, x.dtype), direction=s.draw(st.sampled_from(["LEFT", "RIGHT"])))
    elif op == "Pow":
        s.add(op, x, s.constant(s.draw(st.integers(0, 3)), x.dtype))
    elif op in ("Div", "Mod"):
        s.add(op, x, beside(s, x, "positive"))
    else:
        s.add(op, x, beside(s, x, kind))


def truth(s: Sketch) -> None:
    def some() -> Tensor:
        return s.any(lambda t: t.dtype == "bool", lambda: s.input("bool", s.shape()))

    x = some()
    op = s.draw(st.sampled_from(("And", "Or", "Xor", "Not")))
    s.add(op, x, *(() if op == "Not" else (beside(s, x),)))


def casts(s: Sketch) -> None:
    """Add a Cast between any two dtypes, of numbers within the range of both."""
    source, target = (s.draw(st.sampled_from([*FLOATS, *INTEGERS, "bool"])) for _ in range(2))
    unsigned = target.startswith("u") or source.startswith("u")
    x = s.any(lambda t: t.dtype == source and not unsigned,
              lambda: s.input(source, s.shape(), "positive" if unsigned else "grid"))
    s.add("Cast", x, to=helper.np_dtype_to_tensor_dtype(dtype_of(target)))


# ---- reductions
def reductions(s: Sketch) -> None:
    op = s.draw(st.sampled_from(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1",
                                 "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")))
    x = s.float(1, 5, "positive" if op in ("ReduceLogSum", "ReduceProd") else "grid")
    axes = s.draw(st.lists(st.sampled_from(range(x.rank)), unique=True, max_size=x.rank))
    if x.batch in axes and s.draw(st.integers(0, 3)):
        axes.remove(x.batch)
    signed = [axis - x.rank if s.draw(st.booleans()) else axis for axis in axes]
    keep = s.draw(st.integers(0, 1))
    if axes:
        s.add(op, x, s.integers64(*signed), keepdims=keep)
    else:
        s.add(op, x, keepdims=keep, noop_with_empty_axes=s.draw(st.integers(0, 1)))


def integer_reductions(s: Sketch) -> None:
    dtype = s.draw(st.sampled_from(("int32", "int64")))
    x = s.any(lambda t: t.dtype == dtype and t.rank > 0, lambda: s.input(dtype, s.shape(1, 4)))
    op = s.draw(st.sampled_from(("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare")))
    s.add(op, x, s.integers64(s.draw(st.sampled_from(x.axes() or [0]))), keepdims=s.draw(st.integers(0, 1)))


def extremes(s: Sketch) -> None:
    x = s.float(1, 4)
    axis = s.draw(st.sampled_from(x.axes() or [0]))
    op = s.draw(st.sampled_from(("ArgMax", "ArgMin", "TopK", "CumSum")))
    if op == "TopK":
        k = s.draw(st.integers(1, x.shape[axis]))
        s.add_all(op, x, s.integers64(k), outputs=2, axis=axis, largest=s.draw(st.integers(0, 1)))
    elif op == "CumSum":
        s.add(op, x, s.constant(np.array(axis, np.int64)), exclusive=s.draw(st.integers(0, 1)),
              reverse=s.draw(st.integers(0, 1)))
    else:
        s.add(op, x, axis=axis, keepdims=s.draw(st.integers(0, 1)), select_last_index=s.draw(st.integers(0, 1)))


# ---- products
def products(s: Sketch) -> None:
    x = s.float(1, 4)
    depth, columns = x.shape[-1], s.draw(st.integers(1, 20))
    if x.batch == x.rank - 1:
        reject()
    rank = s.draw(st.integers(1, 4))
    if rank == 1:
        shape: tuple[int, ...] = (depth,)
    else:
        lead = [1 if axis == x.batch or s.draw(st.booleans()) else x.shape[axis] for axis in range(max(x.rank - 2, 0))]
        shape = (*lead[max(len(lead) - rank + 2, 0):], depth, columns)
    way = s.draw(st.sampled_from(("constant", "input", "items")))
    if way == "items" and x.batch == 0 and x.rank > 2:
        y = s.input(s.floats, (x.shape[0], *x.shape[1:-2], depth, columns))
    else:
        y = s.weight(*shape) if way == "constant" else s.input(s.floats, shape, batched=False)
    product = s.add("MatMul", x, y)
    if s.draw(st.booleans()):
        s.add(s.draw(st.sampled_from(("Add", "Mul"))), product, beside(s, product))


def gemms(s: Sketch) -> None:
    x = s.float(2, 2)
    flip, turned = s.draw(st.booleans()), s.draw(st.booleans())
    if flip and x.batch == 0:
        reject()
    rows, depth = x.shape[::-1] if flip else x.shape
    columns = s.draw(st.integers(1, 20))
    shape = (columns, depth) if turned else (depth, columns)
    w = s.weight(*shape) if s.draw(st.integers(0, 3)) else s.input(s.floats, shape, batched=False)
    bias = s.draw(st.sampled_from([None, (), (1,), (columns,), (1, columns), (rows, 1), (rows, columns)]))
    if bias and bias[0] == rows and len(bias) == 2 and x.batch is not None:
        bias = (1, bias[1])
    given = [] if bias is None else [s.weight(*bias)]
    s.add("Gemm", x, w, *given, transA=int(flip), transB=int(turned), alpha=s.draw(st.sampled_from([1.0, 0.5])),
          beta=s.draw(st.sampled_from([1.0, 2.0])))


# ---- windows
def image(s: Sketch, low: int = 3, high: int = 5) -> Tensor:
    """Return a tensor [N, C, ...] with one to three spatial axes."""
    def new() -> Tensor:
        rank = s.draw(st.integers(low, high).filter(lambda r: r != 5 or s.draw(st.booleans())))
        spatial = [s.draw(st.integers(1, 9 if rank < 5 else 4)) for _ in range(rank - 2)]
        return s.input(s.floats, (s.draw(st.integers(1, 2)), s.draw(st.sampled_from([1, 2, 3, 4, 8, 17])), *spatial))

    return s.any(lambda t: t.dtype == s.floats and low <= t.rank <= high and t.batch in (None, 0), new)


def window(s: Sketch, sizes: tuple[int, ...], dilated: bool = True) -> dict[str, Any]:
    kernel = [s.draw(st.integers(1, 3)) for _ in sizes]
    dilations = [s.draw(st.sampled_from([1, 1, 2])) if dilated else 1 for _ in sizes]
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": [s.draw(st.integers(1, 3)) for _ in sizes]}
    if dilated:
        attrs["dilations"] = dilations
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    if s.draw(st.integers(0, 3)) == 0:
        attrs["auto_pad"] = s.draw(st.sampled_from(["SAME_UPPER", "SAME_LOWER", "VALID"]))
        if any(most >= size for most, size in zip(reach, sizes, strict=True)):
            reject()
        return attrs
    pads = [s.draw(st.integers(0, most)) for most in (*reach, *reach)]
    for i, (most, size) in enumerate(zip(reach, sizes, strict=True)):
        if size + pads[i] + pads[i + len(sizes)] <= most:
            reject()
    return {**attrs, "pads": pads}


def convolutions(s: Sketch) -> None:
    x = image(s)
    channels, sizes = x.shape[1], x.shape[2:]
    group = s.draw(st.sampled_from([g for g in (1, 2, 4, channels) if channels % g == 0]))
    attrs = window(s, sizes)
    out = group * s.draw(st.integers(1, 9 if group < 4 else 2))
    bias = [s.weight(out)] if s.draw(st.booleans()) else []
    y = s.add("Conv", x, s.weight(out, channels // group, *attrs["kernel_shape"]), *bias, group=group, **attrs)
    if s.draw(st.booleans()):
        s.add(s.draw(st.sampled_from(ACTIVATIONS)), y)


def transposed(s: Sketch) -> None:
    x = image(s, 3, 4)
    channels, sizes = x.shape[1], x.shape[2:]
    group = s.draw(st.sampled_from([g for g in (1, 1, 2) if channels % g == 0]))
    attrs = window(s, tuple(9 for _ in sizes))
    attrs.pop("auto_pad", None)
    if s.draw(st.booleans()):
        attrs["output_padding"] = [s.draw(st.integers(0, stride - 1)) for stride in attrs["strides"]]
    out = s.draw(st.integers(1, 9))
    bias = [s.weight(out * group)] if group == 1 and s.draw(st.booleans()) else []      # of groups onnx.reference errs
    s.add("ConvTranspose", x, s.weight(channels, out, *attrs["kernel_shape"]), *bias, group=group, **attrs)


def pools(s: Sketch) -> None:
    x = image(s)
    op = s.draw(st.sampled_from(("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "LpPool")))
    if op.startswith("Global"):
        s.add(op, x) if x.rank == 4 or op == "GlobalAveragePool" else reject()     # onnx.reference errs in other ranks
        return
    attrs = window(s, x.shape[2:], dilated=op != "LpPool")
    if attrs.get("auto_pad"):
        attrs["auto_pad"] = "VALID"
    else:
        attrs["pads"] = [min(pad, k - 1) for pad, k in zip(attrs["pads"], attrs["kernel_shape"] * 2, strict=True)]
        if op != "LpPool" and not any(attrs["pads"]):       # of both together onnx.reference makes other extents
            attrs["ceil_mode"] = s.draw(st.integers(0, 1))
    if op == "AveragePool":
        attrs["count_include_pad"] = s.draw(st.integers(0, 1))
    if np.isnan(s.add(op, x, **attrs).value).any():         # onnx.reference in three dimensions, padded on one side
        reject()


def resizes(s: Sketch) -> None:
    x = image(s, 4, 4)
    mode = s.draw(st.sampled_from(["nearest", "linear", "cubic"]))
    # Only to whole extents; to one pixel pytorch_half_pixel is another in onnx.reference than in its specification.
    factors = [s.draw(st.sampled_from([1, 2, 3, *([0.5] if e % 2 == 0 and e > 2 else [])])) for e in x.shape[2:]]
    scales = s.constant([1, 1, *factors], "float32")
    way = s.draw(st.sampled_from(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]))
    if way == "pytorch_half_pixel" and 1 in x.shape[2:]:
        reject()
    s.add("Resize", x, None, scales, mode=mode, coordinate_transformation_mode=way)


# ---- movement
def moved(s: Sketch) -> Tensor:
    """Return any tensor that may be moved."""
    dtype = s.draw(st.sampled_from([s.floats, s.floats, s.integers, "bool"]))
    return s.any(lambda t: t.dtype == dtype and t.rank > 0, lambda: s.input(dtype, s.shape(1, 5)))


def views(s: Sketch) -> None:
    x = moved(s)
    op = s.draw(st.sampled_from(("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Expand")))
    if op == "Transpose":
        s.add(op, x, perm=s.draw(st.permutations(range(x.rank))))
    elif op == "Flatten":
        s.add(op, x, axis=s.draw(st.integers(0, x.rank)))
    elif op == "Squeeze":
        ones = [axis for axis in x.axes() if x.shape[axis] == 1]
        s.add(op, x, s.integers64(*ones)) if ones else reject()
    elif op == "Unsqueeze":
        s.add(op, x, s.integers64(s.draw(st.integers(-1 - x.rank, x.rank))))
    elif op == "Expand":
        shape = [s.draw(st.integers(1, 4)) if e == 1 else e for e in x.shape]
        if x.batch is not None:
            shape[x.batch] = 1
        s.add(op, x, s.integers64(*([s.draw(st.integers(1, 2))] * (x.batch is None)), *shape))
    else:
        s.add(op, x, s.integers64(*_reshaped(s, x)))


def _reshaped(s: Sketch, x: Tensor) -> list[int]:
    """Return another shape of the same items, or of all elements."""
    items = x.batch == 0 and s.draw(st.integers(0, 4)) > 0
    if x.batch is not None and not items:
        return [-1, *([x.shape[-1]] if x.batch != x.rank - 1 else [])]
    size, shape = math.prod(x.shape[1:] if items else x.shape), []
    for _ in range(s.draw(st.integers(0, 3))):
        factor = s.draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
        shape.append(factor)
        size //= factor
    return [*([0] if items else []), *shape, size]


def joins(s: Sketch) -> None:
    x = moved(s)
    axis = s.draw(st.sampled_from(x.axes() or [0]))
    if s.draw(st.booleans()):
        shape = list(x.shape)
        shape[axis] = s.draw(st.integers(1, 4))
        others = [x if s.draw(st.booleans()) else s.input(x.dtype, shape, batched=x.batch == 0)
                  for _ in range(s.draw(st.integers(1, 2)))]
        s.add("Concat", x, *others, axis=axis)
    elif (extent := x.shape[axis]) > 1:
        cut = s.draw(st.integers(1, extent - 1))
        s.add_all("Split", x, s.integers64(cut, extent - cut), outputs=2, axis=axis)


def slices(s: Sketch) -> None:
    x = moved(s)
    axes = s.draw(st.lists(st.sampled_from(x.axes() or [0]), unique=True, min_size=1))
    starts, ends, steps = [], [], []
    for axis in axes:
        extent, step = x.shape[axis], s.draw(st.sampled_from([1, 1, 2, -1, -2]))
        first = s.draw(st.integers(0, extent - 1))
        if step > 0:
            starts.append(s.draw(st.sampled_from([first, first - extent])))
            ends.append(s.draw(st.sampled_from([first + 1, extent, 2 ** 31 - 1])))
        else:
            starts.append(s.draw(st.sampled_from([first, -1])))
            ends.append(-extent - 1)
        steps.append(step)
    s.add("Slice", x, *(s.integers64(*numbers) for numbers in (starts, ends, axes, steps)))


def gathers(s: Sketch) -> None:
    x = moved(s)
    axis = s.draw(st.sampled_from(x.axes() or [0]))
    extent = 1 if axis == x.batch else x.shape[axis]        # an item is there in every batch
    numbers = st.integers(-extent, extent - 1)
    op = s.draw(st.sampled_from(("Gather", "GatherElements", "Lookup")))
    if op == "Gather":
        index: Any = s.draw(st.one_of(numbers, st.lists(numbers, min_size=1, max_size=4)))
        s.add(op, x, s.constant(np.array(index, s.draw(st.sampled_from([np.int64, np.int32])))), axis=axis)
    elif op == "GatherElements":
        if x.batch is not None:
            reject()
        index = np.random.default_rng(s.seed).integers(-extent, extent, x.shape)
        s.add(op, x, s.constant(index.astype(np.int64)), axis=axis)
    else:
        table = s.weight(7, *s.shape(0, 2))
        s.add("Gather", table, s.input("int64", s.shape(0, 3), "grid"), axis=0)


def pads(s: Sketch) -> None:
    x = moved(s)
    mode = s.draw(st.sampled_from(["constant", "constant", "edge", "reflect"]))
    most = [0 if axis == x.batch else min(extent - 1, 2) if mode == "reflect" else 2
            for axis, extent in enumerate(x.shape)]
    least = [0 if mode != "constant" or axis == x.batch or x.shape[axis] < 3 else -1 for axis in range(x.rank)]
    amounts = [s.draw(st.integers(low, high)) for _ in range(2) for low, high in zip(least, most, strict=True)]
    value = [s.constant(s.draw(st.integers(0, 2)), x.dtype)] if mode == "constant" and s.draw(st.booleans()) else []
    s.add("Pad", x, s.integers64(*amounts), *value, mode=mode)


def blocks(s: Sketch) -> None:
    op = s.draw(st.sampled_from(("DepthToSpace", "SpaceToDepth", "Tile", "Trilu")))
    if op == "Tile":
        x = moved(s)
        s.add(op, x, s.integers64(*(1 if axis == x.batch else s.draw(st.integers(1, 3)) for axis in range(x.rank))))
    elif op == "Trilu":
        x = s.float(2, 4)
        if x.batch is not None and x.batch > x.rank - 3:
            reject()
        s.add(op, x, upper=s.draw(st.integers(0, 1)))
    else:
        deep = op == "DepthToSpace"
        x = s.input(s.floats, (1, 8 if deep else 3, *(s.draw(st.integers(1, 3)) * (1 if deep else 2) for _ in "hw")))
        s.add(op, x, blocksize=2, **({"mode": s.draw(st.sampled_from(["DCR", "CRD"]))} if deep else {}))


# ---- norms
def softmaxes(s: Sketch) -> None:
    x = s.float(1, 4)
    op, axis = s.draw(st.sampled_from(("Softmax", "LogSoftmax", "Hardmax"))), s.draw(st.sampled_from(x.axes() or [0]))
    s.add(op, x, axis=axis)


def norms(s: Sketch) -> None:
    """Add a norm other than LRN, for which onnx.reference uses the number of items as that of channels."""
    op = s.draw(st.sampled_from(("LayerNormalization", "InstanceNormalization", "BatchNormalization",
                                 "LpNormalization", "GroupNormalization", "MeanVarianceNormalization")))
    if op == "LayerNormalization":
        x = s.float(2, 4)
        axis = s.draw(st.integers(1, x.rank - 1))
        shape = x.shape[axis:]
        if x.batch is not None and x.batch >= axis:
            reject()
        s.add(op, x, s.weight(*shape), *([s.weight(*shape)] if s.draw(st.booleans()) else []), axis=axis - x.rank)
    elif op == "LpNormalization":
        x = s.float(1, 4, "positive")
        s.add(op, x, axis=s.draw(st.sampled_from(x.axes() or [0])), p=s.draw(st.integers(1, 2)))
    else:
        x = image(s)
        c = x.shape[1]
        if op == "MeanVarianceNormalization":
            s.add(op, x, axes=list(range(2, x.rank)))
        elif op == "BatchNormalization":
            s.add(op, x, s.weight(c), s.weight(c), s.weight(c), s.weight(c, kind="positive"))
        elif op == "InstanceNormalization":
            s.add(op, x, s.weight(c), s.weight(c))
        else:
            groups = s.draw(st.sampled_from([g for g in (1, 2, c) if c % g == 0]))
            s.add(op, x, s.weight(c), s.weight(c), num_groups=groups)


# ---- recurrence
def recurrent(s: Sketch) -> None:
    op, gates = s.draw(st.sampled_from([("LSTM", 4), ("GRU", 3), ("RNN", 1)]))
    direction = s.draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    ways, hidden, steps, width = 1 + (direction == "bidirectional"), s.draw(st.integers(1, 9)), s.draw(
        st.integers(1, 4)), s.draw(st.integers(1, 9))
    x = s.add("Transpose", s.input(s.floats, (1, steps, width)), perm=[1, 0, 2])
    attrs: dict[str, Any] = {"linear_before_reset": s.draw(st.integers(0, 1))} if op == "GRU" else {}
    bias = [s.weight(ways, 2 * gates * hidden)] if s.draw(st.booleans()) else []
    s.add_all(op, x, s.weight(ways, gates * hidden, width), s.weight(ways, gates * hidden, hidden), *bias,
              outputs=3 if op == "LSTM" else 2, hidden_size=hidden, direction=direction, **attrs)


# ---- quantisation
def quantised(s: Sketch) -> None:
    """Add a quantisation and dequantisation, per tensor or along an axis."""
    x = s.float(1, 4)
    dtype = s.draw(st.sampled_from(["uint8", "int8"]))
    axis = s.draw(st.sampled_from([None, *x.axes()]))
    shape = () if axis is None else (x.shape[axis],)
    attrs = {} if axis is None else {"axis": axis}
    scale = s.constant(np.full(shape, 0.125), x.dtype)
    zero = [s.constant(s.numbers(dtype, shape, "positive"))]
    if dtype == "uint8" and s.draw(st.booleans()):
        zero = []
    q = s.add("QuantizeLinear", x, scale, *zero, **attrs)
    s.add("DequantizeLinear", q, scale, *zero, **attrs)


FAMILIES: Mapping[str, tuple[Family, ...]] = {
    "pointwise": (unary, binary, choice),
    "integers": (integers, truth),
    "casts": (casts,),
    "reductions": (reductions, integer_reductions, extremes),
    "products": (products, gemms),
    "convolutions": (convolutions, transposed),
    "pools": (pools, resizes),
    "views": (views, joins, slices),
    "movement": (gathers, pads, blocks),
    "norms": (softmaxes, norms),
    "recurrent": (recurrent,),
    "quantised": (quantised,),
}
EVERY: tuple[Family, ...] = tuple(part for family in FAMILIES.values() for part in family)
