"""Lower norms, and sums followed by norms."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, contrib, extension
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.shapes import fixed

_EPSILON = 1e-12


@extension("", "SimplifiedLayerNormalization", "X:T scale:T", "axis=-1 epsilon=1e-5 stash_type=1", 2)
def _simplified(call: OperatorCall) -> list[Node]:
    """Lower to RMSNormalization, which exporters for ONNX Runtime wrote so before ONNX had it."""
    if len(call.node.outputs) > 1:
        raise GraphError("the second output, a training statistic, is not supported")
    return StandardNodeBuilder(call).finish("RMSNormalization", *call.node.inputs,
                                            **call.keep("axis", "epsilon", "stash_type"))


@extension("", "LayerNormalization", "X:T scale:T bias:T?", "axis=-1 epsilon=1e-5 stash_type=1", 3)
def _before_opset_17(call: OperatorCall) -> list[Node]:
    """Lower LayerNormalization before opset 17, where ONNX Runtime had it and ONNX did not."""
    w = StandardNodeBuilder(call)
    made = w.several("LayerNormalization", *call.node.inputs, outputs=len(call.node.outputs),
                     **call.keep("axis", "epsilon", "stash_type"))
    for index, name in enumerate(made):
        w.output(index, "Identity", name)
    return w.nodes


_SUMS = 3       # index of the output that is the sum before the norm


@contrib("SkipLayerNormalization", "input:T skip:T gamma:T beta:T? bias:T?", "epsilon=1e-12", 4)
def _skip_layer_norm(call: OperatorCall) -> list[Node]:
    w, node = StandardNodeBuilder(call), call.node
    total = _with_skip(w, call, 4)
    y, *statistics = w.several("LayerNormalization", total, *node.inputs[2:4 if call.has(3) else 3], axis=-1,
                               epsilon=call.attr("epsilon", _EPSILON), outputs=min(len(node.outputs), 3))
    for index, name in enumerate((y, *statistics)):
        w.output(index, "Identity", name)
    w.output(_SUMS, "Identity", total)
    return w.nodes


@contrib("SkipSimplifiedLayerNormalization", "input:T skip:T gamma:T bias:T?", "epsilon=1e-12", 4)
def _skip_simplified(call: OperatorCall) -> list[Node]:
    w = StandardNodeBuilder(call)
    total = _with_skip(w, call, 3)
    w.output(0, "RMSNormalization", total, call.node.inputs[2], axis=-1, epsilon=call.attr("epsilon", _EPSILON))
    w.output(_SUMS, "Identity", total)
    return w.nodes


def _with_skip(w: StandardNodeBuilder, call: OperatorCall, bias: int) -> str:
    return w.plus(w("Add", *call.node.inputs[:2]), call, bias)


@contrib("EmbedLayerNormalization", "input_ids:I segment_ids:I? word_embedding:T position_embedding:T "
         "segment_embedding:T? gamma:T beta:T mask:I? position_ids:I?", "epsilon=1e-12 mask_index_type=0", 3)
def _embed_layer_norm(call: OperatorCall) -> list[Node]:
    """Lower EmbedLayerNormalization: the norm of the sum of word, position and segment embeddings.

    The other outputs are the number of nonzero mask elements of each item, and that sum.
    """
    call.ignore("mask_index_type")      # the second output has one form only
    w, node = StandardNodeBuilder(call), call.node
    total = _embeddings(w, call, lambda table, ids: w("Gather", node.inputs[table], ids, axis=0),
                        node.inputs[8] if call.has(8) else "")
    w.output(0, "LayerNormalization", total, *node.inputs[5:7], axis=-1, epsilon=call.attr("epsilon", _EPSILON))
    _seen(w, call)
    w.output(2, "Identity", total)
    return w.nodes


@contrib("QEmbedLayerNormalization", "input_ids:I segment_ids:I? word:Q position:Q segment:Q? gamma:Q beta:Q mask:I? "
         "word_scale:F position_scale:F segment_scale:F? gamma_scale:F beta_scale:F word_zero:Q position_zero:Q "
         "segment_zero:Q? gamma_zero:Q beta_zero:Q", "epsilon=1e-12", 2)
def _embed_quantised(call: OperatorCall) -> list[Node]:
    """Lower QEmbedLayerNormalization, which dequantises the rows that it looks up."""
    w, node = StandardNodeBuilder(call), call.node

    def real(stored: str, table: int) -> str:
        return w("DequantizeLinear", stored, node.inputs[table + 6], node.inputs[table + 11])

    total = _embeddings(w, call, lambda table, ids: real(w("Gather", node.inputs[table], ids, axis=0), table), "")
    gamma, beta = (real(node.inputs[table], table) for table in (5, 6))
    w.output(0, "LayerNormalization", total, gamma, beta, axis=-1, epsilon=call.attr("epsilon", _EPSILON))
    _seen(w, call)
    return w.nodes


def _embeddings(w: StandardNodeBuilder, call: OperatorCall, rows: Callable[[int, str], str], positions: str) -> str:
    """Return the sum of word, position and segment rows; positions default to 0, 1, ..."""
    ids, segments = call.node.inputs[:2]
    length = fixed([call.type().shape[1]])[0]
    total = w("Add", rows(2, ids), rows(3, positions or w.constant(np.arange(length))))
    return w("Add", total, rows(4, segments)) if segments else total


def _seen(w: StandardNodeBuilder, call: OperatorCall) -> None:
    """Add the second output, the number of nonzero mask elements per item; 0 without a mask."""
    if call.has(7):
        seen = w("Cast", w("Cast", call.node.inputs[7], to=_BOOL), to=_INT32)
        w.output(1, "ReduceSum", seen, w.ints(1), keepdims=0)
    else:
        zeros = w("Mul", call.node.inputs[0], w.number(0, np.dtype(np.int32)))
        w.output(1, "ReduceSum", zeros, w.ints(1), keepdims=0)


_INT32, _BOOL = 6, 9        # TensorProto.INT32, BOOL


_GROUPS = "activation:int! channels_last=1 epsilon=1e-5 groups:int!"


@contrib("GroupNorm", "X:T gamma:T1 beta:T1", _GROUPS)
def _group_norm(call: OperatorCall) -> list[Node]:
    return _of_groups(StandardNodeBuilder(call), call, call.node.inputs[0])


@contrib("SkipGroupNorm", "X:T gamma:T1 beta:T1 skip:T bias:T?", _GROUPS, 2)
def _skip_group_norm(call: OperatorCall) -> list[Node]:
    """Lower SkipGroupNorm: the norm of X + skip + bias; the sum is the second output. A skip may be per channel."""
    w, skip = StandardNodeBuilder(call), call.node.inputs[3]
    if not call.attr("channels_last", 1):
        raise GraphError("only channels_last = 1 is supported")
    if len(call.type(3).shape) == 2:
        skip = w("Unsqueeze", skip, w.ints(1, 2))
    total = w.plus(w("Add", call.node.inputs[0], skip), call, 4)
    w.output(1, "Identity", total)
    return _of_groups(w, call, total)


def _of_groups(w: StandardNodeBuilder, call: OperatorCall, x: str) -> list[Node]:
    dtype, last, activation = call.type().dtype, call.attr("channels_last", 1), call.attr("activation")
    if activation not in (0, 1):
        raise GraphError(f"activation is {activation}, but must be 0 (none) or 1 (Swish)")
    if last:
        x = w("Transpose", x, perm=(0, 3, 1, 2))
    constants = [name if call.type(i).dtype == dtype else w("CastLike", name, call.node.inputs[0])
                 for i, name in enumerate(call.node.inputs[1:3], 1)]
    y = w("GroupNormalization", x, *constants, num_groups=call.attr("groups"), epsilon=call.attr("epsilon", 1e-5))
    if activation:
        y = w("Swish", y)
    return w.finish("Transpose", y, perm=(0, 2, 3, 1)) if last else w.finish("Identity", y)
