"""Lower products and convolutions fused with scales, Transposes, sums and activations, or with packed weights."""
from __future__ import annotations

import math

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.contrib.activations import activated
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, contrib
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node

_CONV = "auto_pad=NOTSET dilations:ints group=1 kernel_shape:ints pads:ints strides:ints"
_OF_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


@contrib("FusedMatMul", "A:T B:T", "alpha=1.0 transA=0 transB=0 transBatchA=0 transBatchB=0")
@contrib("TransposeMatMul", "A:T B:T", "alpha=1.0 transA=0 transB=0")
def _fused_matmul(call: OperatorCall) -> list[Node]:
    """Lower FusedMatMul: alpha * A B, after transBatch moves axis 0 before the last and trans swaps the last two."""
    w = StandardNodeBuilder(call)
    a, b = (_turned(w, call, index) for index in (0, 1))
    alpha = call.attr("alpha", 1.0)
    if alpha == 1:
        return w.finish("MatMul", a, b)
    return w.finish("Mul", w("MatMul", a, b), w.number(alpha, call.type().dtype))


def _turned(w: StandardNodeBuilder, call: OperatorCall, index: int) -> str:
    letter, name = "AB"[index], call.node.inputs[index]
    batch, last = (bool(call.attr(f"trans{what}{letter}", 0)) for what in ("Batch", ""))
    perm = list(range(len(call.type(index).shape)))
    if len(perm) < 2:
        return name
    if batch:
        perm.insert(-1, perm.pop(0))
    if last:
        perm[-2:] = perm[:-3:-1]
    return w("Transpose", name, perm=tuple(perm)) if perm != sorted(perm) else name


@contrib("FusedGemm", "A:T B:T C:T?", "activation:string activation_alpha:float activation_beta:float "
                                      "activation_gamma:float alpha=1.0 beta=1.0 transA=0 transB=0")
def _fused_gemm(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    y = w("Gemm", *call.node.inputs, **call.keep("alpha", "beta", "transA", "transB"))
    parameters = [call.attr(f"activation_{which}") for which in ("alpha", "beta", "gamma")]
    return activated(w, call, y, call.attr("activation"), parameters)


@contrib("FusedConv", "X:T W:T B:T? Z:T?", f"activation:string activation_params:floats {_CONV}")
def _fused_conv(call: OperatorCall) -> list[Node]:
    """Lower FusedConv: activation(Conv(X, W, B) + Z)."""
    w, inputs = StandardNodeBuilder(call), (*call.node.inputs, "")
    y = w.plus(w("Conv", *inputs[:3], **call.keep(*_OF_CONV)), call, 3)
    return activated(w, call, y, call.attr("activation"), list(call.attr("activation_params") or ()))


@contrib("NhwcConv", "X:T W:T B:T?", _CONV)
@contrib("NhwcFusedConv", "X:T W:T B:T? Z:T?", f"activation:string activation_params:floats {_CONV}")
def _nhwc_conv(call: OperatorCall) -> list[Node]:
    """Lower convolutions with channels-last images and weights."""
    w, rank = StandardNodeBuilder(call), call.rank
    first, last = (0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)
    x, weights = (w("Transpose", name, perm=first) for name in call.node.inputs[:2])
    y = w("Conv", x, weights, call.node.inputs[2] if call.has(2) else "", **call.keep(*_OF_CONV))
    y = w.plus(w("Transpose", y, perm=last), call, 3)
    return activated(w, call, y, call.attr("activation"), list(call.attr("activation_params") or ()))


@contrib("CDist", "A:T B:T", "metric=sqeuclidean")
def _distances(call: OperatorCall) -> list[Node]:
    """Lower CDist: the distance of each row of A from each row of B."""
    w, metric = StandardNodeBuilder(call), call.attr("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise GraphError(f"metric is '{metric}', but must be sqeuclidean or euclidean")
    a, b = (w("Unsqueeze", name, w.ints(axis)) for axis, name in zip((1, 0), call.node.inputs, strict=True))
    op = "ReduceSumSquare" if metric == "sqeuclidean" else "ReduceL2"
    return w.finish(op, w("Sub", a, b), w.ints(2), keepdims=0)


EIGHT_BITS = 4          # the accuracy_level of int8 rows


@contrib("MatMulNBits", "A:T B:X scales:T zero_points:X1? g_idx:I? bias:T?",
         "K:int! N:int! accuracy_level=0 bits=4 block_size:int! weight_prepacked=0")
def _matmul_n_bits(call: OperatorCall) -> list[Node]:
    """Lower MatMulNBits: A times the transpose of B [N, K], which has a scale for each block of a row.

    At accuracy_level EIGHT_BITS the rows of A are rounded in blocks like B's, as in ONNX Runtime.
    """
    w, (n, k) = StandardNodeBuilder(call), (call.attr("N"), call.attr("K"))
    if call.has(4):
        raise GraphError("weights with group indices (g_idx) are not supported")
    weights = blocks_of_bits(w, call, 1, 2, 3, n, k)
    a = call.node.inputs[0]
    if call.attr("accuracy_level", 0) == EIGHT_BITS and call.attr("bits", 4) == 4:
        a = w("FakeQuantizeBlocks", a, block=int(call.attr("block_size")))
    y = w("MatMul", a, w("Transpose", weights, perm=(1, 0)))
    return w.finish("Identity", w.plus(y, call, 5))


# Values of four bits relative to the largest of a block: by quant_type, fp4 (the upper bit is the sign) and nf4.
_HALF = (0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)
_BNB4 = ((*_HALF, *(-value for value in _HALF)),
         (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
          -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
          0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0))


@contrib("MatMulBnb4", "A:T B:X absmax:T1", "K:int! N:int! block_size:int! quant_type:int! training_mode=0 transB=1")
def _matmul_bnb4(call: OperatorCall) -> list[Node]:
    """Lower MatMulBnb4: A times the transpose of B [N, K], packed by bitsandbytes.

    The upper four bits of a byte come first; blocks of elements in row-major order have a scale each. quant_type is 0
    for 4-bit floats (fp4) and 1 for quantiles of the normal distribution (nf4).
    """
    w, (n, k), size = StandardNodeBuilder(call), (call.attr("N"), call.attr("K")), int(call.attr("block_size"))
    call.ignore("training_mode")        # concerns only outputs for gradients
    if not call.attr("transB", 1):
        raise GraphError("only transposed weights (transB = 1) are supported")
    packed, scales = _known(call, 1).reshape(-1), _known(call, 2).reshape(-1)
    numbers = np.stack([packed >> 4, packed & 15], 1).reshape(-1)[:n * k]
    real = np.array(_BNB4[call.attr("quant_type")], np.float32)[numbers]
    weights = (real * np.repeat(scales.astype(np.float32), size)[:n * k]).reshape(n, k).T
    return w.finish("MatMul", call.node.inputs[0], w.constant(np.ascontiguousarray(weights, call.type().dtype)))


def blocks_of_bits(w: StandardNodeBuilder, call: OperatorCall, packed: int, scales: int, zeros: int, rows: int,
                   columns: int) -> str:
    """Dequantise weights [rows, columns] of 2, 4 or 8 bits; return their name.

    Parameters
    ----------
    packed, scales, zeros : int
        Indices of the inputs: uint8 elements, scales per block, and optional zero points (packed, or floats). Elements
        and packed zero points must be constants.
    rows, columns : int
        The shape of the weights.

    Notes
    -----
    Elements fill bytes from the lowest bits on; a row is padded to whole blocks, its zero points to whole bytes. The
    default zero point is the middle of the range.
    """
    bits, size = int(call.attr("bits", 4)), int(call.attr("block_size"))
    if bits not in (2, 4, 8):
        raise GraphError(f"weights of {bits} bits are not supported; bits must be 2, 4 or 8")
    blocks = math.ceil(columns / size)
    elements = unpacked(_known(call, packed).reshape(rows, -1), bits)[:, :columns]
    scale = w.reshape(call.node.inputs[scales], rows, blocks)
    if call.has(zeros) and call.type(zeros).dtype != np.uint8:
        return _by_float_zeros(w, call, elements, scale, w.reshape(call.node.inputs[zeros], rows, blocks), size)
    zero = np.full((rows, blocks), 1 << bits - 1, np.uint8)
    if call.has(zeros):
        zero = unpacked(_known(call, zeros).reshape(rows, -1), bits)[:, :blocks]
    return w("DequantizeLinear", w.constant(elements), scale, w.constant(zero), axis=1, block_size=size)


def _by_float_zeros(w: StandardNodeBuilder, call: OperatorCall, elements: np.ndarray, scale: str, zero: str,
                    size: int) -> str:
    """Return (element - zero) * scale by blocks, with float zero points."""
    rows, columns = elements.shape
    padded = np.pad(elements, ((0, 0), (0, -columns % size))).reshape(rows, -1, size)
    real = w.constant(padded.astype(call.type().dtype))
    scale, zero = (w("Unsqueeze", name, w.ints(2)) for name in (scale, zero))
    blocks = w("Mul", w("Sub", real, zero), scale)
    return w.cut(w.reshape(blocks, rows, -1), 1, 0, columns)


def _known(call: OperatorCall, index: int) -> np.ndarray:
    value = call.values[index]
    if value is None:
        raise GraphError(f"input '{call.node.inputs[index]}' must be a constant")
    return value


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack elements of `bits` bits from bytes along the last axis, uint8."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    elements = packed.astype(np.uint8)[..., None] >> shifts & (1 << bits) - 1
    return elements.reshape(*packed.shape[:-1], -1).astype(np.uint8)
