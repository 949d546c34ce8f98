"""Texts are tokenised as by ONNX Runtime."""
import numpy as np
import pytest
from onnx import helper

from infer_server.engines import build_engine
from infer_server.engines.errors import PlanError
from infer_server.engines.runtime.host.text import tokenizer
from infer_server.engines.runtime.load.create import engine_of
from tests.engines.frontend.one_node import feeds_of, model_of, onnx_runtime

TEXTS = np.array([["hello wor ld", "a b,c  dé"], ["", ",abab."], [" ab a.b ", "xbxx yBy aab abab"]], object)
KINDS = [
    {"separators": [" "]}, {"separators": [" ", ","]}, {"separators": [""]}, {"separators": ["\\s"]},
    {"separators": ["a", "ab"]}, {"separators": ["ab", "a"]}, {"separators": ["[.]", "ab"], "tokenexp": "x"},
    {"tokenexp": "[a-zA-Z0-9_]+"}, {"tokenexp": "a|ab"}, {"tokenexp": "x*"}, {"tokenexp": r"\w+|[^\w\s]"},
    {"tokenexp": "(?i)b+"}, {"tokenexp": "a*(ab)?"}, {"tokenexp": "a*?b"}, {"tokenexp": "é."}]


def tokens(x, **attrs):
    """Return our tokens and ONNX Runtime's."""
    attrs = {"mark": 0, "mincharnum": 1, "pad_value": "#", **attrs}
    model = model_of("Tokenizer", [x], **attrs)
    return tokenizer(attrs)(x)[0], onnx_runtime(model, feeds_of(model, [x]))["o0"]


@pytest.mark.parametrize("attrs", KINDS, ids=str)
def test_tokens_are_those_between_separators_or_of_an_expression(attrs):
    for x in (TEXTS, TEXTS[:, 0], TEXTS[1:2, 0]):
        made, expected = tokens(x, **attrs)
        assert (made.dtype, made.tolist(), made.shape) == (expected.dtype, expected.tolist(), expected.shape)


@pytest.mark.parametrize("more", [
    {"mark": 1}, {"mincharnum": 3}, {"mark": 1, "mincharnum": 9}, {"mark": 1, "pad_value": ""}], ids=str)
def test_tokens_may_be_marked_and_short_ones_left_out(more):
    made, expected = tokens(TEXTS, tokenexp="[a-z]+", **more)
    assert (made.tolist(), made.shape) == (expected.tolist(), expected.shape)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_texts_have_no_tokens(shape):
    made, expected = tokens(np.zeros(shape, object), separators=[" "])
    assert made.shape == expected.shape


@pytest.mark.parametrize("attrs, message", [
    ({}, "neither separators nor a tokenexp"), ({"tokenexp": "[a"}, "cannot be read")])
def test_what_describes_no_token_is_refused(attrs, message):
    with pytest.raises(PlanError, match=message):
        tokenizer({"mincharnum": 1, "mark": 0, "pad_value": "", **attrs})


def test_a_pipeline_of_texts_is_a_program_whose_numbers_are_compiled():
    x = TEXTS.reshape(-1)
    model = model_of("Tokenizer", [x], mark=0, mincharnum=1, pad_value="#", tokenexp="[a-zA-Z0-9_]+")
    shape, weights = (helper.make_node("Constant", [], [name], **value) for name, value in (
        ("shape", {"value_ints": [0, -1]}), ("weights", {"value_floats": [1.0, 2.0, 3.0]})))
    model.graph.node[0].output[0] = "tokens"
    model.graph.node.extend([
        shape, weights, helper.make_node("Reshape", ["tokens", "shape"], ["rows"]),
        helper.make_node("TfIdfVectorizer", ["rows"], ["counts"], min_gram_length=1, max_gram_length=1,
                         max_skip_count=0, mode="TF", ngram_counts=[0], ngram_indexes=[0, 1, 2],
                         pool_strings=["a", "ab", "hello"]),
        helper.make_node("Mul", ["counts", "weights"], ["weighed"]),
        helper.make_node("Normalizer", ["weighed"], ["o0"], domain="ai.onnx.ml", norm="L2")])
    result = engine_of(build_engine(model, cache=False, timing=False).plan).run({"i0": x})
    np.testing.assert_allclose(result["o0"], onnx_runtime(model, {"i0": x})["o0"], 1e-6)
