"""Lower ONNX Runtime's attentions to ONNX's Attention on heads [N, heads, tokens, depth] with an additive mask.

A mask lowers the score of a hidden key by 10000 (mask_filter_value) instead of excluding it. Keys after the query are
excluded if the node is unidirectional.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.contrib.quantised import product
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, contrib
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Dim, Node
from infer_server.engines.ir.shapes import extent, fixed, text

_ATTRIBUTES = "mask_filter_value=-10000.0 num_heads:int! scale=0.0 unidirectional=0"
_WITH_WEIGHTS = f"do_rotary=0 past_present_share_buffer=0 {_ATTRIBUTES}"


@dataclass(frozen=True)
class _ScoreExtents:
    """Extents of the scores of one head; the queries are the last tokens of the keys."""
    items: Dim
    queries: int
    keys: int


# ---- with the weights of the projections
@contrib("Attention", "input:T weights:T bias:T? mask_index:I? past:T? attention_bias:T? past_sequence_length:I?",
         f"qkv_hidden_sizes:ints rotary_embedding_dim=0 {_WITH_WEIGHTS}", 2)
def _attention(call: OperatorCall) -> list[Node]:
    _refuse(call, 6)
    w = StandardNodeBuilder(call)
    x = w.plus(w("MatMul", *call.node.inputs[:2]), call, 2)
    return _of_projections(w, call, x, call.attr("qkv_hidden_sizes"), mask=3, past=4, bias=5)


@contrib("QAttention", "input:Q weight:Q1 bias:F input_scale:F weight_scale:F mask_index:I? input_zero_point:Q? "
         "weight_zero_point:Q1? past:F?", _WITH_WEIGHTS, 2)
def _quantised_attention(call: OperatorCall) -> list[Node]:
    w, inputs = StandardNodeBuilder(call), (*call.node.inputs, *[""] * 3)
    operands = (inputs[0], inputs[1], inputs[6], inputs[7])
    x = w("Add", product(w, operands, w("Mul", inputs[3], inputs[4])), inputs[2])
    return _of_projections(w, call, x, None, mask=5, past=8, bias=9)


def _of_projections(w: StandardNodeBuilder, call: OperatorCall, x: str, sizes: Sequence[int] | None, mask: int,
                    past: int, bias: int) -> list[Node]:
    """Lower an attention on projections x, which has q, k and v of `sizes` side by side.

    The past holds keys and values [2, N, heads, tokens, depth]; mask, past and bias are indices of inputs.
    """
    items, tokens, _ = call.type().shape
    third = fixed(call.type(1).shape[1:2])[0] // 3
    parts = w.several("Split", x, w.ints(*(sizes or (third,) * 3)), outputs=3, axis=-1)
    q, k, v = (heads_first(w, part, call.attr("num_heads")) for part in parts)
    queries = keys = fixed([tokens])[0]
    if call.has(past):
        before = (w("Gather", call.node.inputs[past], w.number(i, np.dtype(np.int64)), axis=0) for i in (0, 1))
        k, v = (w("Concat", *pair, axis=2) for pair in zip(before, (k, v), strict=True))
        keys += fixed(call.type(past).shape[3:4])[0]
    if len(call.node.outputs) > 1:
        w.output(1, "Concat", *(w("Unsqueeze", part, w.ints(0)) for part in (k, v)), axis=0)
    added = _added(w, call, _ScoreExtents(items, queries, keys), mask, bias)
    return _finish(w, call, (q, k, v), added)


# ---- of what was projected
@contrib("MultiHeadAttention", "query:T key:T? value:T? bias:T? key_padding_mask:I? attention_bias:T? past_key:T? "
         "past_value:T? past_sequence_length:I? cache_indirection:I?", _ATTRIBUTES, 3)
def _multi_head(call: OperatorCall) -> list[Node]:
    """Lower MultiHeadAttention.

    q, k and v are separate, or interleaved per head: [N, tokens, heads, 3, depth], or 2 for k and v alone. Keys and
    values of shape [N, heads, tokens, depth] are those of cross-attention, to which no bias is added.
    """
    _refuse(call, 8, 9)
    w, heads = StandardNodeBuilder(call), call.attr("num_heads")
    q, k, v = _three(w, call, heads)
    items, queries, *_ = call.type().shape
    keys = queries if not call.has(1) else call.type(1).shape[2 if _ready(call, 1) else 1]
    count = fixed([keys])[0]
    if call.has(6):
        k, v = (w("Concat", call.node.inputs[i], part, axis=2) for i, part in ((6, k), (7, v)))
        count += fixed(call.type(6).shape[2:3])[0]
    w.output(1, "Identity", k)
    w.output(2, "Identity", v)
    added = _added(w, call, _ScoreExtents(items, fixed([queries])[0], count), mask=4, bias=5)
    return _finish(w, call, (q, k, v), added)


def _ready(call: OperatorCall, index: int) -> bool:
    return call.has(index) and len(call.type(index).shape) == 4


def _three(w: StandardNodeBuilder, call: OperatorCall, heads: int) -> Sequence[str]:
    """Return q, k and v, each [N, heads, tokens, depth]."""
    given = call.node.inputs
    if call.rank == 5:
        return _apart(w, given[0], 3)
    hidden = [fixed(call.type(0).shape[-1:])[0]] * 2
    biases: Sequence[str] = ()
    if call.has(3):
        rest = fixed(call.type(3).shape[0:1])[0] - sum(hidden)
        biases = w.several("Split", given[3], w.ints(*hidden, rest), outputs=3, axis=0)
    q = _projected(w, given[0], biases[:1], heads)
    if call.has(1) and len(call.type(1).shape) == 5:
        return (q, *_apart(w, given[1], 2))
    if not call.has(1) or not call.has(2):
        raise GraphError("key or value is missing")
    return (q, *(given[i] if _ready(call, i) else _projected(w, given[i], biases[i:i + 1], heads) for i in (1, 2)))


def _projected(w: StandardNodeBuilder, x: str, bias: Sequence[str], heads: int) -> str:
    return heads_first(w, w("Add", x, *bias) if bias else x, heads)


def _apart(w: StandardNodeBuilder, x: str, count: int) -> Sequence[str]:
    """Split [N, tokens, heads, count, depth] into `count` tensors [N, heads, tokens, depth]."""
    one = np.dtype(np.int64)
    return [w("Transpose", w("Gather", x, w.number(i, one), axis=3), perm=(0, 2, 1, 3)) for i in range(count)]


# ---- common parts
def heads_first(w: StandardNodeBuilder, x: str, heads: int) -> str:
    """Reshape [N, tokens, heads * depth] to [N, heads, tokens, depth]."""
    return w("Transpose", w.reshape(x, 0, 0, heads, -1), perm=(0, 2, 1, 3))


def side_by_side(w: StandardNodeBuilder, y: str) -> list[Node]:
    """Finish with y [N, heads, tokens, depth] as [N, tokens, heads * depth]."""
    return w.finish("Reshape", w("Transpose", y, perm=(0, 2, 1, 3)), w.ints(0, 0, -1))


def _finish(w: StandardNodeBuilder, call: OperatorCall, parts: Sequence[str], added: Sequence[str]) -> list[Node]:
    mask = ""
    for term in added:
        mask = w("Add", mask, term) if mask else term
    return side_by_side(w, w("Attention", *parts, *filter(None, [mask]), **scaled(call)))


def scaled(call: OperatorCall) -> dict[str, float]:
    """Return the scale attribute, or {} for the default of 1 / sqrt(depth)."""
    return {"scale": scale} if (scale := call.attr("scale", 0.0)) else {}


def _added(w: StandardNodeBuilder, call: OperatorCall, scores: _ScoreExtents, mask: int, bias: int) -> list[str]:
    """Return the tensors to add to the scores, which broadcast to them."""
    dtype = next(t.dtype for t in call.types if t is not None and t.dtype.kind not in "iu")
    terms: list[str] = []
    hidden = call.attr("mask_filter_value", -10000.0)
    if call.has(bias):
        terms.append(call.node.inputs[bias])
    if call.has(mask):
        zero, less = (w.number(number, dtype) for number in (0, hidden))
        terms.append(w("Where", _seen(w, call, scores, mask), zero, less))
    if call.attr("unidirectional", 0):
        rows = np.arange(scores.queries)[:, None] + scores.keys - scores.queries
        terms.append(w.constant(np.where(np.arange(scores.keys) <= rows, 0, -np.inf).astype(dtype)))
    return terms


def _seen(w: StandardNodeBuilder, call: OperatorCall, scores: _ScoreExtents, index: int) -> str:
    """Return a bool tensor that is true for visible keys, from a mask in one of its forms.

    Forms: 1 for visible keys, per key or per query and key; the number of keys of each item; the ends of the keys and
    then their begins.
    """
    name, shape, items = call.node.inputs[index], call.type(index).shape, scores.items
    zero = w.number(0, np.dtype(np.int32))
    if len(shape) == 1:
        count = 2 if extent(shape[0]) == 2 * extent(items) else 1
        if count == 1 and shape != (items,):
            raise GraphError(f"a mask of shape {text(shape)} is not supported; it has a number for each item, or a "
                             "flag for each key")
        apart = w.reshape(name, count, -1, 1, 1, 1)
        ends, *begins = (w("Gather", apart, w.number(i, np.dtype(np.int64)), axis=0) for i in range(count))
        places = w.constant(np.arange(scores.keys, dtype=np.int32))
        inside = w("Less", places, ends)
        return w("And", inside, w("GreaterOrEqual", places, *begins)) if begins else inside
    if len(shape) == 4:         # [N, 1, most, most]: cut the rows of the queries, the columns of the keys
        name = w.cut(w.cut(name, 2, scores.keys - scores.queries, scores.keys), 3, 0, scores.keys)
    else:
        name = w("Unsqueeze", name, w.ints(*((1, 2) if len(shape) == 2 else (1,))))
    return w("Greater", name, zero)


def _refuse(call: OperatorCall, *indices: int) -> None:
    """Raise GraphError for inputs of decoders with a shared buffer of states."""
    for index in filter(call.has, indices):
        raise GraphError(f"input '{call.node.inputs[index]}', a shared buffer of past states, is not supported")
