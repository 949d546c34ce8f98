"""Lower ONNX's Attention (opset 23 and later) to products around a softmax.

    scores = softcap(scale * q k') + mask;  y = softmax(scores) v       softcap(x) = c tanh(x / c)

passes.fusion.attention fuses them again if its kernel can run them. q is [N, heads, S, D] or [N, S, heads * D]; if
several query heads share keys and values, the heads become two axes, [N, key heads, queries per key head, S, D]; if
S is 1, the query heads that share keys are the rows of one product, so that keys and values are read once. A mask is
added to the scores, or is a bool per key. With a causal mask query i sees keys up to i + the length of the past; a
window limits the distance on each side of that key.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.normalise import OperatorCall, dtype_of, is_float, rule
from infer_server.engines.frontend.operators.parts import NodeBuilder
from infer_server.engines.ir.graph import Dim, Node
from infer_server.engines.ir.shapes import fixed

QUERY, KEY, VALUE, MASK, PAST_KEY, PAST_VALUE, LENGTHS = range(7)
Y, PRESENT_KEY, PRESENT_VALUE, SCORES = range(4)
RAW, CAPPED, MASKED, WEIGHTS = range(4)         # qk_matmul_output_mode: the stage that output SCORES holds


@dataclass(frozen=True)
class _Heads:
    """Numbers of query heads and of key heads. as_rows: query heads that share keys are rows of one product."""
    queries: int
    keys: int
    as_rows: bool = False

    @property
    def each(self) -> int:
        return self.queries // self.keys

    @property
    def apart(self) -> bool:
        """True if query heads that share keys have an axis of their own, so that scores have five axes."""
        return self.each > 1 and not self.as_rows


@rule("Attention")
def _attention(call: OperatorCall) -> list[Node]:
    node, w = call.node, NodeBuilder(call)
    flat = call.rank == 3
    queries = _extent(call.type().shape[1 if flat else 2])
    heads = _heads(call, flat)
    heads = replace(heads, as_rows=heads.each > 1 and queries == 1)
    mode = call.attr("qk_matmul_output_mode", RAW)
    if mode not in (RAW, CAPPED, MASKED, WEIGHTS):
        raise GraphError(f"qk_matmul_output_mode is {mode}, but must be 0 to 3")
    q = _split(w, call, QUERY, heads.queries) if flat else node.inputs[QUERY]
    keys, values = (_with_past(w, call, which, past, heads, output) for which, past, output in (
        (KEY, PAST_KEY, PRESENT_KEY), (VALUE, PAST_VALUE, PRESENT_VALUE)))
    past = _extent(call.type(PAST_KEY).shape[2]) if call.has(PAST_KEY) else 0
    seen = past + _extent(call.type(KEY).shape[1 if flat else 2])
    depth = fixed(call.type().shape[-1:])[0] // (heads.queries if flat else 1)
    items = call.type().shape[0]
    if heads.as_rows:
        q = w("Reshape", q, shape=(items, heads.keys, heads.each, depth))
    if heads.apart:
        value_depth = fixed(call.type(VALUE).shape[-1:])[0] // (heads.keys if flat else 1)
        q = w("Reshape", q, shape=(items, heads.keys, heads.each, queries, depth))
        keys = w("Reshape", keys, shape=(items, heads.keys, 1, seen, depth))
        values = w("Reshape", values, shape=(items, heads.keys, 1, seen, value_depth))
    turn = (0, 1, 2, 4, 3) if heads.apart else (0, 1, 3, 2)
    scale = call.attr("scale", 1 / math.sqrt(depth))
    dtype = call.type().dtype
    scores = w("MatMul", w("Mul", q, w.constant(np.array(scale, dtype))), w("Transpose", keys, perm=turn))
    stages = {RAW: scores}
    if softcap := call.attr("softcap", 0.0):
        cap = w.constant(np.array(softcap, dtype))
        scores = w("Mul", w("Tanh", w("Div", scores, cap)), cap)
    stages[CAPPED] = scores
    for mask in _masks(w, call, heads, queries, seen, past):
        scores = w("Add", scores, mask)
    stages[MASKED] = scores
    weights = stages[WEIGHTS] = _softmax(w, call, scores, axis=4 if heads.apart else 3)
    y = w("MatMul", weights, values)
    every = (items, heads.queries, queries)
    if len(node.outputs) > SCORES:
        w.output(SCORES, "Reshape", stages[mode], shape=(*every, seen))
    width = fixed(call.type(VALUE).shape[-1:])[0] // (heads.keys if flat else 1)
    if not flat:
        return w.finish("Reshape", y, shape=(*every, width))
    y = w("Reshape", y, shape=(*every, width))
    return w.finish("Reshape", w("Transpose", y, perm=(0, 2, 1, 3)), shape=(items, queries, heads.queries * width))


def _heads(call: OperatorCall, flat: bool) -> _Heads:
    given = tuple(call.attr(name) for name in ("q_num_heads", "kv_num_heads"))
    if flat:
        queries, keys = given
        if not queries or not keys:
            raise GraphError("3-D q, k and v need the attributes q_num_heads and kv_num_heads")
    else:
        (queries,), (keys,) = (fixed(call.type(which).shape[1:2]) for which in (QUERY, KEY))
    if queries % keys:
        raise GraphError(f"{queries} query heads are not a multiple of {keys} key heads")
    return _Heads(int(queries), int(keys))


def _softmax(w: NodeBuilder, call: OperatorCall, scores: str, axis: int) -> str:
    """Add a Softmax in the node's softmax_precision."""
    own, wanted = call.type().dtype, call.attr("softmax_precision")
    precise = dtype_of(wanted) if wanted else own
    if wanted and not is_float(precise):
        raise GraphError(f"softmax_precision is {precise}, but must be a float type")
    if precise == own:
        return w("Softmax", scores, axis=axis)
    return w("Cast", w("Softmax", w("Cast", scores, to=precise.name), axis=axis), to=own.name)


def _extent(dim: Dim) -> int:
    return fixed([dim])[0]


def _split(w: NodeBuilder, call: OperatorCall, which: int, heads: int) -> str:
    """Reshape an input [N, S, heads * D] to [N, heads, S, D]."""
    items, tokens, hidden = call.type(which).shape
    apart = w("Reshape", call.node.inputs[which], shape=(items, tokens, heads, fixed([hidden])[0] // heads))
    return w("Transpose", apart, perm=(0, 2, 1, 3))


def _with_past(w: NodeBuilder, call: OperatorCall, which: int, past: int, heads: _Heads, output: int) -> str:
    """Return keys or values [N, heads, S, D] after those of the past, which are also an output."""
    name = call.node.inputs[which]
    if len(call.type(which).shape) == 3:
        name = _split(w, call, which, heads.keys)
    if call.has(past):
        name = w("Concat", call.node.inputs[past], name, axis=2)
    w.output(output, "Identity", name)
    return name


# ---- masks
def _masks(w: NodeBuilder, call: OperatorCall, heads: _Heads, queries: int, seen: int, past: int) -> list[str]:
    """Return the tensors to add to the scores, which broadcast to them."""
    masks = []
    if call.has(MASK):
        masks.append(_mask_input(w, call, heads, seen))
    left, right = (int(call.attr(f"{side}_window_size", -1)) for side in ("left", "right"))
    if call.attr("is_causal", 0):
        right = 0
    if call.has(LENGTHS):
        masks += _of_lengths(w, call, heads, queries, seen, left, right)
    elif left >= 0 or right >= 0:
        behind = np.arange(seen) - np.arange(queries)[:, None] - past        # distance of a key after the query's own
        inside = (left < 0) | (behind >= -left)
        inside &= (right < 0) | (behind <= right)
        masks.append(w.constant(np.where(inside, 0.0, -np.inf).astype(call.type().dtype)))
    return masks


def _mask_input(w: NodeBuilder, call: OperatorCall, heads: _Heads, seen: int) -> str:
    """Return the mask input as a tensor to add; keys beyond its extent are hidden."""
    name, kind = call.node.inputs[MASK], call.type(MASK)
    shape, dtype = kind.shape, call.type().dtype
    if kind.dtype == np.bool_:
        name = _where(w, name, dtype)
    if missing := seen - _extent(shape[-1]):
        name = w("Pad", name, pads=(*(0,) * (2 * len(shape) - 1), missing), mode="constant", value=-math.inf)
        shape = (*shape[:-1], seen)
    if heads.each == 1 or len(shape) < 3:
        return name
    *items, count, rows, columns = shape
    if heads.as_rows:
        return name if count == 1 else w("Reshape", name, shape=(*items, heads.keys, heads.each, columns))
    apart = (1, 1) if count == 1 else (heads.keys, heads.each)
    return w("Reshape", name, shape=(*items, *apart, rows, columns))


def _where(w: NodeBuilder, seen: str, dtype: np.dtype[np.generic]) -> str:
    return w("Where", seen, *(w.constant(np.array(number, dtype)) for number in (0.0, -np.inf)))


def _of_lengths(w: NodeBuilder, call: OperatorCall, heads: _Heads, queries: int, seen: int, left: int,
                right: int) -> list[str]:
    """Return masks for items of different lengths: of length n, keys before n are visible, and queries are the last."""
    items, rank = call.type(LENGTHS).shape[0], 5 if heads.apart else 4
    length = w("Reshape", call.node.inputs[LENGTHS], shape=(items, *(1,) * (rank - 1)))
    column = w.constant(np.arange(seen))
    conditions = [w("Less", column, length)]
    behind = w("Sub", w.constant(np.arange(seen) - np.arange(queries)[:, None] + queries), length)
    if right >= 0:
        conditions.append(w("LessOrEqual", behind, w.constant(np.array(right))))
    if left >= 0:
        conditions.append(w("GreaterOrEqual", behind, w.constant(np.array(-left))))
    return [_where(w, condition, call.type().dtype) for condition in conditions]
