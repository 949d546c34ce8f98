"""Tests of ONNX Runtime's attention operators, in the forms of exporters and its optimiser."""
import numpy as np
import pytest

from infer_server.engines.errors import ModelError
from tests.engines.frontend.contrib.test_quantised import f32, seven_bits, stored
from tests.engines.frontend.one_node import check, imported, normal

N, S, HEADS, DEPTH = 2, 5, 2, 4
HIDDEN = HEADS * DEPTH


def ints(*values):
    return np.array(values, np.int32)


def causal(tokens):
    return np.tril(np.ones((N, tokens, tokens), np.int32))


RIGHT = [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
MASKS = {"none": None, "keys": ints(*RIGHT), "left": ints(*np.flip(RIGHT, 1)), "queries": causal(S),
         "lengths": ints(4, 2), "ends and begins": ints(4, 5, 1, 2)}


def attention(mask="none", past=0):
    given = MASKS[mask]
    if past and given is not None:
        given = np.concatenate([np.ones((N, past), np.int32), given], 1)
    return [normal(N, S, 6), normal(6, 3 * HIDDEN), normal(3 * HIDDEN), given,
            normal(2, N, HEADS, past, DEPTH) if past else None]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("attrs", [{}, {"unidirectional": 1}, {"scale": 0.2}, {"mask_filter_value": -3.0}])
def test_an_attention_with_its_projections(mask, attrs):
    check("Attention", attention(mask), (1, 2), num_heads=HEADS, **attrs)


@pytest.mark.parametrize("mask", ["none", "keys"])
@pytest.mark.parametrize("attrs", [{}, {"unidirectional": 1}])
def test_an_attention_to_what_is_past(mask, attrs):
    check("Attention", attention(mask, 3), (1, 2), 2, num_heads=HEADS, **attrs)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_an_attention_with_a_bias_of_its_scores(heads):
    check("Attention", [*attention("keys"), normal(1, heads, S, S)], (1, 2), num_heads=HEADS)


def test_a_mask_may_be_a_part_of_a_larger_one():
    """Megatron has one mask for all lengths; ONNX Runtime's CPU kernel does not support it."""
    inputs = attention(past=3)
    mask = (np.arange(N * 100).reshape(N, 10, 10) % 3 > 0).astype(np.int32)
    inputs[3] = mask[:, None]
    result = imported("Attention", inputs, (1, 2), num_heads=HEADS)["o0"]
    inputs[3] = mask[:, 3:3 + S, :3 + S]
    np.testing.assert_array_equal(result, imported("Attention", inputs, (1, 2), num_heads=HEADS)["o0"])


def test_an_attention_may_begin_without_a_past():
    check("Attention", attention(), (1, 2), 2, num_heads=HEADS)


def test_values_may_be_of_another_depth():
    inputs = [normal(N, S, 6), normal(6, 2 * HIDDEN + 6), normal(2 * HIDDEN + 6)]
    check("Attention", inputs, (1, 2), num_heads=HEADS, qkv_hidden_sizes=[HIDDEN, HIDDEN, 6])


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("mask", ["none", "keys", "lengths"])
@pytest.mark.parametrize("past", [0, 3])
def test_an_attention_with_projections_in_integers(columns, mask, past):
    _, _, bias, mask_index, before = attention(mask if not past or mask == "keys" else "none", past)
    scale = np.abs(normal(3 * HIDDEN)) / 50 if columns else f32(0.02)
    inputs = [stored((N, S, 6)), seven_bits((6, 3 * HIDDEN)), bias, f32(0.02), scale, mask_index,
              np.array(120, np.uint8), np.zeros(3 * HIDDEN, np.int8) if columns else np.array(0, np.int8), before]
    check("QAttention", inputs, (1, 2, 3, 4, 6, 7), 2 if past else 1, num_heads=HEADS)


T = 7


def heads(tokens):
    return normal(N, HEADS, tokens, DEPTH)


MULTI_HEAD = {
    "apart": lambda: [normal(N, S, HIDDEN), normal(N, T, HIDDEN), normal(N, T, HIDDEN)],
    "wider values": lambda: [normal(N, S, HIDDEN), normal(N, T, HIDDEN), normal(N, T, 6)],
    "bias": lambda: [normal(N, S, HIDDEN), normal(N, T, HIDDEN), normal(N, T, HIDDEN), normal(3 * HIDDEN)],
    "ready": lambda: [normal(N, S, HIDDEN), heads(T), heads(T)],
    "ready, bias": lambda: [normal(N, S, HIDDEN), heads(T), heads(T), normal(3 * HIDDEN)],
}


def multi_head(form, **more):
    """Return the inputs of MultiHeadAttention, with others replaced by name."""
    names = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key", "past_value")
    given = dict(zip(names, MULTI_HEAD[form](), strict=False)) | more
    return [given.get(name) for name in names]


@pytest.mark.parametrize("form", MULTI_HEAD)
@pytest.mark.parametrize("attrs", [{}, {"scale": 0.2}])
def test_an_attention_of_many_heads(form, attrs):
    check("MultiHeadAttention", multi_head(form), (3,), num_heads=HEADS, **attrs)


@pytest.mark.parametrize("form", ["apart", "bias"])
@pytest.mark.parametrize("mask", [ints([1] * 7, [1] * 4 + [0] * 3), ints(7, 4),
                                  (np.arange(N * S * T).reshape(N, S, T) % 3 > 0).astype(np.int32)])
@pytest.mark.parametrize("bias", [None, (1, HEADS, S, T), (N, 1, S, T)])
def test_an_attention_of_many_heads_with_masks(form, mask, bias):
    more = {"key_padding_mask": mask} | ({"attention_bias": normal(*bias)} if bias else {})
    check("MultiHeadAttention", multi_head(form, **more), (3,), num_heads=HEADS)


@pytest.mark.parametrize("attrs", [{}, {"unidirectional": 1}])
@pytest.mark.parametrize("mask", [None, ints([1] * 10, [1] * 8 + [0] * 2)])
def test_an_attention_of_many_heads_to_what_is_past(attrs, mask):
    inputs = multi_head("apart", past_key=heads(3), past_value=heads(3), key_padding_mask=mask)
    inputs[:3] = normal(N, T, HIDDEN), normal(N, T, HIDDEN), normal(N, T, HIDDEN)
    check("MultiHeadAttention", inputs, (), 3, num_heads=HEADS, **attrs)


def test_q_k_and_v_may_be_side_by_side_for_each_head():
    """ONNX Runtime's CPU kernel has no such inputs."""
    q, k, v = (normal(N, T, HEADS, DEPTH) for _ in range(3))
    flat = [x.reshape(N, T, HIDDEN) for x in (q, k, v)]
    expected = imported("MultiHeadAttention", flat, num_heads=HEADS)["o0"]
    for inputs in ([np.stack([q, k, v], 3)], [flat[0], np.stack([k, v], 3)]):
        np.testing.assert_array_equal(imported("MultiHeadAttention", inputs, num_heads=HEADS)["o0"], expected)


@pytest.mark.parametrize("op, inputs, constants", [
    ("Attention", attention("keys"), (1, 2)), ("Attention", attention("queries"), (1, 2)),
    ("Attention", attention("lengths"), (1, 2)), ("MultiHeadAttention", multi_head("apart"), ()),
    ("MultiHeadAttention", multi_head("ready, bias", key_padding_mask=ints([1] * 7, [1] * 4 + [0] * 3)), (3,)),
    ("MultiHeadAttention", multi_head("bias", past_key=heads(3), past_value=heads(3)), (3,))])
def test_the_batch_may_be_open(op, inputs, constants):
    check(op, inputs, constants, 3 if op == "MultiHeadAttention" else 1, num_heads=HEADS, batch=True)


@pytest.mark.parametrize("op, inputs, message", [
    ("Attention", [*attention(past=3), None, ints(3)], "input 'i6', a shared buffer of past states, is not supported"),
    ("Attention", [*attention()[:3], ints(1, 2, 3)], r"a mask of shape \[3\] is not supported"),
    ("MultiHeadAttention", [normal(N, S, HIDDEN)], "key or value is missing")])
def test_other_forms_are_refused(op, inputs, message):
    with pytest.raises(ModelError, match=message):
        imported(op, inputs, num_heads=HEADS)


def test_an_attribute_that_is_not_supported_is_refused():
    with pytest.raises(ModelError, match="it is not supported with do_rotary = 1"):
        imported("Attention", attention(), num_heads=HEADS, do_rotary=1)
