"""Tests of rotary embeddings and grouped-query attention."""
import numpy as np
import pytest

from infer_server.engines.errors import ModelError, UnknownValueError
from tests.engines.frontend.one_node import check, feeds_of, imported, model_of, normal, onnx_runtime

DEPTH, HEADS, SHARED = 16, 4, 2
MOST = 20


def tables(width=DEPTH):
    angles = np.arange(MOST)[:, None] * 0.3 ** np.arange(width // 2)
    return [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]


@pytest.mark.parametrize("shape", [(2, 5, HEADS * DEPTH), (2, HEADS, 5, DEPTH)])
@pytest.mark.parametrize("places", [np.array([3]), np.arange(10).reshape(2, 5)])
@pytest.mark.parametrize("attrs", [{}, {"interleaved": 1}, {"num_heads": HEADS, "rotary_embedding_dim": 4}])
def test_a_rotary_embedding_is_what_onnx_runtime_computes(shape, places, attrs):
    check("RotaryEmbedding", [normal(*shape), places, *tables(4 if "num_heads" in attrs else DEPTH)], (2, 3), **attrs)


def group_query(new, lengths, room=0, packed=False, total=None, **more):
    """Return the inputs of GroupQueryAttention. lengths: tokens of each item, including the new ones."""
    items = len(lengths)
    widths = (HEADS * DEPTH, SHARED * DEPTH, SHARED * DEPTH)
    given = [normal(items, new, width) for width in widths]
    past = [normal(items, SHARED, room, DEPTH) for _ in range(2)] if room else [None, None]
    inputs = [*([np.concatenate(given, 2), None, None] if packed else given), *past,
              np.array(lengths, np.int32) - 1, np.array([total or max(lengths)], np.int32)]
    names = ("cos", "sin", "places", "bias", "sink")
    return inputs + [more.get(name) for name in names]


COUNTS = {"num_heads": HEADS, "kv_num_heads": SHARED}
# (new tokens, lengths of the items, room of the past)
RUNS = {"prompt": (5, [5, 5], 0), "padded prompt": (5, [5, 3], 0), "prompt in a buffer": (5, [5, 5], 9),
        "one more": (1, [6, 6], 5), "one more in a buffer": (1, [6, 6], 9), "some more": (3, [8], 5),
        "some more in a buffer": (3, [8], 9), "lengths differ": (1, [6, 3], 5),
        "lengths differ in a buffer": (1, [6, 3], 9)}


def of_tokens(inputs, outputs):
    """Yield the parts of the outputs for existing tokens; the rest is unspecified."""
    for item, length in enumerate(inputs[5] + 1):
        yield outputs["o0"][item, :length]
        yield from (outputs[name][item, :, :length] for name in ("o1", "o2"))


def same(inputs, outputs=3, **attrs):
    model = model_of("GroupQueryAttention", inputs, (6, 7, 8), outputs, **COUNTS, **attrs)
    wanted = onnx_runtime(model, feeds_of(model, inputs))
    result = imported("GroupQueryAttention", inputs, (6, 7, 8), outputs, **COUNTS, **attrs)
    assert {name: array.shape for name, array in result.items()} == {name: a.shape for name, a in wanted.items()}
    for ours, theirs in zip(of_tokens(inputs, result), of_tokens(inputs, wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-4, 1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attrs", [{}, {"scale": 0.2}, {"local_window_size": 3}, {"softcap": 2.0},
                                   {"smooth_softmax": 1}])
def test_an_attention_of_shared_keys_is_what_onnx_runtime_computes(run, packed, attrs):
    new, lengths, room = RUNS[run]
    same(group_query(new, lengths, room, packed), **attrs)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("attrs", [{}, {"rotary_interleaved": 1}])
@pytest.mark.parametrize("given", [False, True])
def test_queries_and_keys_may_be_turned_by_their_places(run, attrs, given):
    new, lengths, room = RUNS[run]
    cos, sin = tables()
    places = np.arange(new * len(lengths))[::-1].reshape(len(lengths), new).copy() if given else None
    same(group_query(new, lengths, room, cos=cos, sin=sin, places=places), do_rotary=1, **attrs)


@pytest.mark.parametrize("run", ["prompt", "one more", "lengths differ"])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_scores_may_have_a_bias(run, heads):
    new, lengths, room = RUNS[run]
    same(group_query(new, lengths, room, bias=normal(1, heads, new, max(lengths))))


@pytest.mark.parametrize("run", ["prompt", "one more"])
def test_heads_may_have_a_sink(run):
    new, lengths, room = RUNS[run]
    same(group_query(new, lengths, room, sink=normal(HEADS)))


@pytest.mark.parametrize("run", ["prompt", "one more", "lengths differ in a buffer"])
def test_the_batch_may_be_open(run):
    new, lengths, room = RUNS[run]
    cos, sin = tables()
    same(group_query(new, lengths, room, cos=cos, sin=sin), do_rotary=1, batch=True)


def test_a_prompt_may_be_seen_as_a_whole():
    same(group_query(5, [5, 5]), causal=0)


def test_the_total_of_a_prompt_need_not_be_known_and_that_of_a_past_is_asked_for():
    inputs = group_query(5, [5, 5])
    known, open_ = (imported("GroupQueryAttention", inputs, constants, 3, **COUNTS) for constants in ((6,), ()))
    for name, array in known.items():
        np.testing.assert_array_equal(array, open_[name])
    with pytest.raises(UnknownValueError, match="'i6' must be known when the engine is built"):
        imported("GroupQueryAttention", group_query(1, [6, 6], 5), (), 3, **COUNTS)


@pytest.mark.parametrize("total", [3, 9])
def test_a_total_that_cannot_be_is_refused(total):
    with pytest.raises(ModelError,
                       match=f"total_sequence_length is {total}, which does not fit 5 new tokens and a past of 2"):
        imported("GroupQueryAttention", group_query(5, [7, 7], 2, total=total), (6,), 3, **COUNTS)
