"""Lower ONNX Runtime's rotary embedding and grouped-query attention.

GroupQueryAttention caches the keys and values of all tokens so far, [N, heads, tokens, depth]. The S new tokens of an
item of length n are at n - S .. n - 1; in the first run of a prompt, where no item is longer than S, at 0 .. S - 1 with
padding from n on. The past holds just the earlier tokens, or has capacity for more.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.contrib.attention import heads_first, scaled, side_by_side
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, contrib
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.deferred import array_of
from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.shapes import fixed
from infer_server.engines.ops.tokens import causal_mask, column, last_places, row, token_places

_INT64 = 7          # TensorProto.INT64
QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LENGTHS, TOTAL, COS, SIN, POSITIONS, BIAS, SINK = range(12)


@contrib("RotaryEmbedding", "input:T position_ids:L cos_cache:T sin_cache:T",
         "interleaved=0 is_packed_batching=0 num_heads=0 rotary_embedding_dim=0 scale=1.0")
def _rotary(call: OperatorCall) -> list[Node]:
    """Lower to ONNX's RotaryEmbedding: a single position is that of the first token, and tables may give the heads."""
    w, (x, positions, *tables) = StandardNodeBuilder(call), call.node.inputs
    width, attrs = 2 * fixed(call.type(2).shape[1:2])[0], call.keep("interleaved", "num_heads", "rotary_embedding_dim")
    if call.rank == 3 and not attrs.get("num_heads"):
        attrs["num_heads"] = fixed(call.type().shape[2:])[0] // width
    if len(call.type(1).shape) == 1:
        (tokens,) = fixed(call.type().shape[1 if call.rank == 3 else 2:][:1])
        positions = w("Add", positions, w.constant(np.arange(tokens)[None]))
    return w.finish("RotaryEmbedding", x, *tables, positions, **attrs)


@dataclass(frozen=True)
class _Cache:
    """Sizes of the cache: `new` of `tokens` tokens, and the capacities of the past (`capacity`) and the `present`."""
    new: int
    tokens: int
    capacity: int

    @property
    def prompt(self) -> bool:
        return self.new == self.tokens

    @property
    def present(self) -> int:
        return max(self.capacity, self.tokens)

    @staticmethod
    def of(call: OperatorCall) -> _Cache:
        (new,) = fixed(call.type().shape[1:2])
        capacity = fixed(call.type(PAST_KEY).shape[2:3])[0] if call.has(PAST_KEY) else 0
        (tokens,) = (call.ints(TOTAL) or (new,)) if capacity else (new,)
        if tokens not in (new, new + capacity) and not new < tokens <= capacity:
            raise GraphError(f"total_sequence_length is {tokens}, which does not fit {new} new tokens and a past of "
                             f"{capacity}")
        return _Cache(new, tokens, capacity)


@contrib("GroupQueryAttention", "query:T key:T? value:T? past_key:T? past_value:T? seqlens_k:I "
         "total_sequence_length:I cos_cache:T? sin_cache:T? position_ids:L? attention_bias:T? head_sink:T?",
         "causal=1 do_rotary=0 k_quant_type=NONE kv_cache_bit_width=0 kv_num_heads:int! local_window_size=-1 "
         "num_heads:int! qk_norm_epsilon=1e-6 qk_output=0 rotary_interleaved=0 scale=0.0 sliding_window_cache=0 "
         "smooth_softmax=-1 softcap=0.0 v_quant_type=NONE", 3)
def _group_query(call: OperatorCall) -> list[Node]:
    call.ignore("qk_norm_epsilon")      # belongs to inputs that are not supported
    w, cache = StandardNodeBuilder(call), _Cache.of(call)
    q, k, v = _heads(w, call)
    positions = _positions(w, call, cache)
    if call.attr("do_rotary", 0):
        turns = _turns(w, call, cache, positions)
        q, k = (_turned(w, call, part, turns) for part in (q, k))
    k, v = (_present(w, call, cache, part, past) for part, past in ((k, PAST_KEY), (v, PAST_VALUE)))
    w.output(1, "Identity", k)
    w.output(2, "Identity", v)
    if cache.present > cache.tokens:
        k, v = (w.cut(part, 2, 0, cache.tokens) for part in (k, v))
    mask = _mask(w, call, cache, positions)
    if call.has(SINK) or call.attr("smooth_softmax", -1) == 1:
        k, v, mask = _with_sink(w, call, cache, (k, v, mask))
    attrs = {**scaled(call), **({"softcap": cap} if (cap := call.attr("softcap", 0.0)) else {})}
    return side_by_side(w, w("Attention", q, k, v, *filter(None, [mask]), **attrs))


def _heads(w: StandardNodeBuilder, call: OperatorCall) -> list[str]:
    """Return q, k and v [N, heads, tokens, depth], from separate inputs or side by side in one."""
    queries, keys = call.attr("num_heads"), call.attr("kv_num_heads")
    counts = (queries, keys, keys)
    if call.has(KEY):
        parts = call.node.inputs[:3]
    else:
        depth = fixed(call.type().shape[2:3])[0] // sum(counts)
        parts = w.several("Split", call.node.inputs[QUERY], w.ints(*(count * depth for count in counts)), outputs=3,
                          axis=-1)
    return [heads_first(w, part, count) for part, count in zip(parts, counts, strict=True)]


def _positions(w: StandardNodeBuilder, call: OperatorCall, cache: _Cache) -> str:
    """Return the positions of the new tokens in their items, int64 [N or 1, S]."""
    if cache.prompt:
        return w.constant(array_of(row, [cache.new], (1, cache.new), np.int64))
    lengths = w("Cast", w.reshape(call.node.inputs[LENGTHS], -1, 1), to=_INT64)     # lengths less one
    return w("Add", lengths, w.constant(array_of(last_places, [cache.new], (cache.new,), np.int64)))


def _turns(w: StandardNodeBuilder, call: OperatorCall, cache: _Cache, positions: str) -> str:
    """Return the positions for the rotary embedding: an input if given, of which a prompt uses the first only."""
    if not call.has(POSITIONS):
        return positions
    given = call.node.inputs[POSITIONS]
    return w("Add", w.cut(w.reshape(given, -1), 0, 0, 1), positions) if cache.prompt else given


def _turned(w: StandardNodeBuilder, call: OperatorCall, x: str, positions: str) -> str:
    cos, sin = call.node.inputs[COS:SIN + 1]
    turned = 2 * fixed(call.type(COS).shape[1:2])[0]
    return w("RotaryEmbedding", x, cos, sin, positions, interleaved=call.attr("rotary_interleaved", 0),
             rotary_embedding_dim=turned)


def _present(w: StandardNodeBuilder, call: OperatorCall, cache: _Cache, new: str, past: int) -> str:
    """Return the keys or values of all tokens, in a tensor of the past's capacity if that suffices.

    Elements behind an item's tokens are unspecified: they are what the past has there, or another token.
    """
    before = call.node.inputs[past] if cache.capacity else ""
    if not before:
        return new
    if cache.prompt:
        has_rest = cache.capacity > cache.new
        return w("Concat", new, w.cut(before, 2, cache.new, cache.capacity), axis=2) if has_rest else new
    if cache.new == 1 and cache.capacity >= cache.tokens:   # each item's token follows its last one
        return _scattered(w, call, before, new)
    if cache.new == 1:
        here = w("Equal", w.constant(array_of(column, [cache.capacity], (cache.capacity, 1), np.int32)),
                 w.reshape(call.node.inputs[LENGTHS], -1, 1, 1, 1))
        return w("Concat", w("Where", here, new, before), new, axis=2)
    if cache.capacity < cache.tokens:
        return w("Concat", before, new, axis=2)
    old, behind = (w.cut(before, 2, *ends) for ends in ((0, cache.tokens - cache.new), (cache.tokens, cache.capacity)))
    return w("Concat", old, new, *[behind] * (cache.tokens < cache.capacity), axis=2)


def _scattered(w: StandardNodeBuilder, call: OperatorCall, past: str, new: str) -> str:
    """Return the past with each item's new token behind its last one."""
    heads, _, depth = fixed(call.type(PAST_KEY).shape[1:])
    places = w.reshape(call.node.inputs[LENGTHS], -1, 1, 1, 1)
    return w("ScatterElements", past, w("Expand", places, w.ints(1, heads, 1, depth)), new, axis=2)


# ---- masks
def _mask(w: StandardNodeBuilder, call: OperatorCall, cache: _Cache, positions: str) -> str:
    """Return the mask [N or 1, 1, S, tokens], -inf for hidden keys, plus the bias."""
    causal, window, dtype = call.attr("causal", 1), call.attr("local_window_size", -1), call.type().dtype
    tokens = cache.tokens
    bias = call.node.inputs[BIAS] if call.has(BIAS) else ""
    if causal and cache.prompt:
        mask = w.constant(array_of(causal_mask, [tokens, window, dtype], (1, 1, tokens, tokens), dtype))
    else:
        mask = w("Where", _seen(w, call, tokens, positions, window if causal else None),
                 *(w.number(number, dtype) for number in (0, -np.inf)))
    return w("Add", mask, bias) if bias else mask


def _seen(w: StandardNodeBuilder, call: OperatorCall, tokens: int, positions: str, window: int | None) -> str:
    """Return the visible keys as bools. A window of None means attention that is not causal: all keys of the item."""
    if window is None:
        return w("LessOrEqual", w.constant(array_of(token_places, [tokens, np.int32], (tokens,), np.int32)),
                 w.reshape(call.node.inputs[LENGTHS], -1, 1, 1, 1))
    keys = w.constant(array_of(token_places, [tokens, np.int64], (tokens,), np.int64))
    behind = w("Sub", w("Unsqueeze", positions, w.ints(1, 3)), keys)
    seen = w("GreaterOrEqual", behind, w.ints(0))
    return w("And", seen, w("Less", behind, w.ints(window))) if window >= 0 else seen


def _with_sink(w: StandardNodeBuilder, call: OperatorCall, cache: _Cache, parts: tuple[str, str, str]) -> list[str]:
    """Append a key whose score is the head's sink (or 0) and whose value is 0 to (keys, values, mask)."""
    *both, mask = parts
    zero = w.number(0, call.type().dtype)
    both = [w("Concat", part, w("Mul", w.cut(part, 2, 0, 1), zero), axis=2) for part in both]
    mask = w("Pad", mask, w.ints(0, 0, 0, 0, 0, 0, 0, 1))
    if call.has(SINK):
        sinks = w("Pad", w.reshape(call.node.inputs[SINK], 1, -1, 1, 1), w.ints(0, 0, 0, cache.tokens, 0, 0, 0, 0))
        mask = w("Add", mask, sinks)
    return [*both, mask]
