"""Guesses of dynamic extents: likely ones, and those that the model requires."""
import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from onnxruntime import InferenceSession

from infer_server.engines import build_engine
from infer_server.engines.compiler.guesses import guesses
from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.extents import open_types
from infer_server.engines.frontend.onnx_file import read_model


def model(graph: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')


def told(graph: str) -> list[dict[str, int]]:
    """Return the likely guess and its refinements."""
    source = read_model(model(graph))
    return list(guesses(source, open_types(source.name, source.declared(), {}), all_of_them=False))


CONV = f"<float[8, 5, 3, 3] w = {{{', '.join(['0.5'] * 360)}}}>"


def test_channels_become_those_of_a_convolutions_weights() -> None:
    likely, fitting = told(f"g (float[n, c, h, v] x, float[m, d, h, v] z) => (float[n, e, a, b] y) {CONV} "
                           "{ p = Conv(x, w) q = Conv(z, w) y = Add(p, q) }")
    assert likely["c"] == likely["d"] == 128
    assert fitting == {**likely, "c": 5, "d": 5}


def test_an_axis_becomes_as_long_as_indices_reach_and_as_weights_ask() -> None:
    """Indices reach column 200, but the weights need 262 with the 12 that are added."""
    graph = (f"g (float[n, f] x) => (float[n, 1] y) <float[262, 1] w = {{{', '.join(['1.0'] * 262)}}}, "
             "int64[2] at = {199, 0}> "
             "{ a = Gather<axis = 1>(x, at) b = Concat<axis = 1>(a, a, a, a, a, a, x) y = MatMul(b, w) }")
    assert told(graph) == [{"f": 128}, {"f": 250}]


def test_a_sum_of_extents_is_made_of_the_others() -> None:
    graph = ("g (float[b, p, 4] before, float[b, s, 4] now, float[b, t, 4] bias) => (float[b, t, 4] y) "
             "{ a = Concat<axis = 1>(before, now) y = Add(a, bias) }")
    assert told(graph) == [{"p": 128, "s": 128, "t": 128}, {"p": 128, "s": 128, "t": 256}]


def test_where_one_of_two_extents_is_bound_the_other_gives_way() -> None:
    """The sum p + s is 300 and p is 5, so s is 295."""
    w, v = (f"float[{count}, 1] {name} = {{{', '.join(['1.0'] * count)}}}" for name, count in (("w", 300), ("v", 5)))
    graph = (f"g (float[n, p] x, float[n, s] z) => (float[n, 1] y) <{w}, {v}> "
             "{ a = Concat<axis = 1>(x, z) b = MatMul(a, w) c = MatMul(x, v) y = Add(b, c) }")
    assert told(graph) == [{"p": 128, "s": 128}, {"p": 5, "s": 295}]


def test_what_no_extents_fit_is_refused_as_before() -> None:
    graph = ("g (float[n, f] x) => (float[n, 1] y) <float[4, 1] v = {1.0, 2.0, 3.0, 4.0}, float[5, 1] w = "
             "{1.0, 2.0, 3.0, 4.0, 5.0}> { a = MatMul(x, v) b = MatMul(x, w) y = Add(a, b) }")
    assert told(graph) == [{"f": 128}]
    with pytest.raises(ModelError, match="for f=128; give shapes for which it works, by --opt-shapes x:"):
        build_engine(model(graph))


def test_a_model_that_leaves_all_its_extents_open_is_built_without_being_told_any() -> None:
    proto = model(f"g (float[n, c, h, v] x) => (float[n, d, a, b] y) {CONV} {{ y = Conv(x, w) }}")
    engine = build_engine(proto, timing_cache=None).engine(threads=1)
    session = InferenceSession(proto.SerializeToString())
    for shape in ((1, 5, 16, 9), (2, 5, 7, 8)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(engine.run({"x": x})["y"], session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-4)


def test_bands_become_those_that_a_convolution_leaves_for_a_product() -> None:
    """Time is the leading axis and no batch: it must cover a window, and two windows must leave 27 bands."""
    weights = (f"float[4, 1, 3, 3] w = {{{', '.join(['0.1'] * 36)}}}, "
               f"float[2, 4, 1, 27] v = {{{', '.join(['0.1'] * 216)}}}, "
               "int64[2] front = {0, 1}, int64[2] one = {0, 3}")
    proto = model(f"g (float[frames, bands] x) => (float[m, k] y) <{weights}> "
                  "{ u = Unsqueeze(x, front) c = Conv(u, w) "
                  "p = MaxPool<kernel_shape = [1, 3], strides = [1, 3]>(c) q = Conv(p, v) s = Squeeze(q, one) "
                  "y = Transpose<perm = [1, 0]>(s) }")
    engine = build_engine(proto, timing=False, cache=False).engine(threads=1)
    x = np.random.default_rng(0).standard_normal((9, 83)).astype(np.float32)
    expected = InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(engine.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-4)


def test_a_product_with_a_constant_decides_an_extent() -> None:
    graph = ("g (float[frames, bands] x) => (float[frames, bands] y) "
             f"<float[1, 81] w = {{{', '.join(['1.0'] * 81)}}}, int64[1] front = {{0}}> "
             "{ u = Unsqueeze(x, front) m = Mul(u, w) y = Squeeze(m, front) }")
    assert told(graph)[-1]["bands"] == 81


def test_a_decoder_gets_one_token_beside_some_past_ones_and_none() -> None:
    source = read_model(model(
        "g (int64[batch, s] input_ids, float[batch, 4, p, 8] past_key_0, int64[batch, t] attention_mask, "
        "float[batch, 4, p, 8] past_value_0) => (float[batch, 4, q, 8] y) { y = Add(past_key_0, past_value_0) }"))
    every = list(guesses(source, open_types(source.name, source.declared(), {})))
    assert every[0] == {"s": 1, "p": 16, "t": 17}
    assert {"s": 1, "p": 0, "t": 1} in every
    assert not any(224 in guess.values() for guess in every)


def test_a_decoder_builds_without_shapes_and_serves_a_prompt_and_a_token() -> None:
    """One layer of attention over past keys and values, 2 heads of 4, as exporters write it."""
    random = np.random.default_rng(0)
    weights = {"embedding": (11, 8), "wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "wo": (8, 11)}
    decoder = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (int64[batch, s] input_ids, int64[batch, t] attention_mask, '
        "float[batch, 2, p, 4] past_key_values_0_key, float[batch, 2, p, 4] past_key_values_0_value) "
        "=> (float[batch, s, 11] logits, float[batch, 2, t, 4] present_0_key, float[batch, 2, t, 4] present_0_value) "
        "<int64[4] heads = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, int64[2] over = {1, 2}, float scale = {0.5}, "
        "float one = {1.0}, float far = {-10000.0}> {"
        " x = Gather(embedding, input_ids)"
        " q0 = MatMul(x, wq) q1 = Reshape(q0, heads) q = Transpose<perm = [0, 2, 1, 3]>(q1)"
        " k0 = MatMul(x, wk) k1 = Reshape(k0, heads) k = Transpose<perm = [0, 2, 1, 3]>(k1)"
        " v0 = MatMul(x, wv) v1 = Reshape(v0, heads) v = Transpose<perm = [0, 2, 1, 3]>(v1)"
        " present_0_key = Concat<axis = 2>(past_key_values_0_key, k)"
        " present_0_value = Concat<axis = 2>(past_key_values_0_value, v)"
        " kt = Transpose<perm = [0, 1, 3, 2]>(present_0_key) s0 = MatMul(q, kt) s1 = Mul(s0, scale)"
        " m0 = Cast<to = 1>(attention_mask) m1 = Sub(one, m0) m2 = Mul(m1, far) m3 = Unsqueeze(m2, over)"
        " s2 = Add(s1, m3) a = Softmax<axis = -1>(s2) o0 = MatMul(a, present_0_value)"
        " o1 = Transpose<perm = [0, 2, 1, 3]>(o0) o2 = Reshape(o1, joined) logits = MatMul(o2, wo) }")
    decoder.graph.initializer.extend(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)
                                     for name, shape in weights.items())
    engine = build_engine(decoder, timing=False, cache=False).engine(threads=1)
    session = InferenceSession(decoder.SerializeToString())
    for past, tokens in ((0, 5), (5, 1), (6, 1)):
        feeds = {"input_ids": random.integers(0, 11, (1, tokens)),
                 "attention_mask": np.ones((1, past + tokens), np.int64),
                 **{f"past_key_values_0_{kind}": random.standard_normal((1, 2, past, 4)).astype(np.float32)
                    for kind in ("key", "value")}}
        made, right = engine.run(feeds), session.run(None, feeds)
        for output, expected in zip(session.get_outputs(), right, strict=True):
            np.testing.assert_allclose(made[output.name], expected, rtol=0, atol=1e-4)
