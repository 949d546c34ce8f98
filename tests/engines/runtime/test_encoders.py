"""String encoders give ONNX Runtime's results."""
import math

import numpy as np
import pytest
from onnx import helper

from infer_server.engines import build_engine
from infer_server.engines.errors import PlanError
from infer_server.engines.runtime.host import encoders
from infer_server.engines.runtime.load.create import engine_of
from tests.engines.frontend.one_node import feeds_of, model_of, onnx_runtime

WORDS = np.array([["cat", "dog"], ["", "cow"], ["dog", "étude"]], object)
NUMBERS = np.array([[3, 1], [7, 3]], np.int64)
NAMES, MORE = ["cat", "dog", "cat"], ["x", "yes", "z"]


def made(model):
    return engine_of(build_engine(model, cache=False, timing=False).plan)


@pytest.mark.parametrize("op, x, attrs", [
    ("LabelEncoder", WORDS, {"keys_strings": NAMES, "values_int64s": [4, 7, 9], "default_int64": 5}),
    ("LabelEncoder", WORDS, {"keys_strings": NAMES, "values_int64s": [4, 7, 9]}),
    ("LabelEncoder", WORDS, {"keys_strings": NAMES, "values_floats": [0.5, 7.0, 9.0]}),
    ("LabelEncoder", WORDS, {"keys_strings": NAMES, "values_strings": MORE, "default_string": "?"}),
    ("LabelEncoder", WORDS, {"keys_strings": NAMES, "values_strings": MORE}),
    ("LabelEncoder", NUMBERS, {"keys_int64s": [3, 1, 3], "values_strings": MORE}),
    ("CategoryMapper", WORDS, {"cats_strings": NAMES[:2], "cats_int64s": [4, 7], "default_int64": 5}),
    ("CategoryMapper", NUMBERS, {"cats_strings": NAMES[:2], "cats_int64s": [3, 7], "default_string": "none"}),
    ("CategoryMapper", WORDS, {"cats_strings": NAMES, "cats_int64s": [4, 7, 9]}),
    ("CategoryMapper", NUMBERS, {"cats_strings": MORE, "cats_int64s": [3, 1, 3]}),
    ("OneHotEncoder", WORDS, {"cats_strings": ["dog", "cat", "dog"]}),
    ("OneHotEncoder", WORDS, {"cats_strings": ["dog", "cat", "emu"], "zeros": 1})])
def test_words_and_numbers_are_told_by_each_other(op, x, attrs):
    model = model_of(op, [x], domain="ai.onnx.ml", **attrs)
    result, expected = made(model).run({"i0": x}), onnx_runtime(model, {"i0": x})
    assert result["o0"].dtype == expected["o0"].dtype and result["o0"].shape == expected["o0"].shape
    np.testing.assert_array_equal(result["o0"], expected["o0"])


@pytest.mark.parametrize("x", [WORDS, NUMBERS])
def test_the_first_label_encoder_knows_classes_by_their_places(x):
    model = model_of("LabelEncoder", [x], domain="ai.onnx.ml", classes_strings=["cat", "dog", "cow", "emu"],
                     default_string="none", default_int64=-5)
    model.opset_import[2].version = 1
    np.testing.assert_array_equal(made(model).run({"i0": x})["o0"], onnx_runtime(model, {"i0": x})["o0"])


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.float32, np.float64])
@pytest.mark.parametrize("has_default", [True, False])
def test_a_table_may_be_tensors(dtype, has_default):
    x, values, default = WORDS, np.array([4, 7, 9], dtype), np.array([5], dtype) if has_default else None
    tensors = {"keys_tensor": np.array(NAMES, object), "values_tensor": values,
               **({} if default is None else {"default_tensor": default})}
    attrs = {name: helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(tensor.dtype), tensor.shape,
                                      [one.encode() if isinstance(one, str) else one for one in tensor.tolist()])
             for name, tensor in tensors.items()}
    model = model_of("LabelEncoder", [x], domain="ai.onnx.ml", version=21, **attrs)
    result = made(model).run({"i0": x})["o0"]
    np.testing.assert_array_equal(result, onnx_runtime(model, {"i0": x})["o0"], strict=True)


@pytest.mark.parametrize("version", [20, 21])
def test_a_number_that_is_none_is_told_by_a_key_that_is_none_from_opset_4_on(version):
    x = np.float32([1, np.nan, 2, np.nan, 5])
    model = model_of("LabelEncoder", [x], domain="ai.onnx.ml", version=version,
                     keys_floats=[2.0, math.nan, 1.0, math.nan], values_strings=["two", "nothing", "one", "another"])
    np.testing.assert_array_equal(made(model).run({"i0": x})["o0"], onnx_runtime(model, {"i0": x})["o0"])


def test_a_table_without_keys_is_refused():
    with pytest.raises(PlanError, match="has no keys"):
        encoders.ENCODERS["LabelEncoder"]({"values_strings": ("a",)})


def test_columns_of_words_are_taken():
    x, places = WORDS, np.array([[1, 0, 1]], np.int64)
    for one in (x, x[0]):
        model = model_of("ArrayFeatureExtractor", [one, places], (1,), domain="ai.onnx.ml")
        feeds = feeds_of(model, [one, places])
        result = made(model).run(feeds)["o0"]
        np.testing.assert_array_equal(result, onnx_runtime(model, feeds)["o0"])


def test_a_word_of_no_category_is_an_error_where_the_model_says_so():
    model = model_of("OneHotEncoder", [WORDS], domain="ai.onnx.ml", batch=True, cats_strings=["dog", "cat"], zeros=0)
    engine = made(model)
    with pytest.raises(PlanError, match="'' is none of its categories, and `zeros` is 0"):
        engine.run({"i0": WORDS})
    assert engine.run({"i0": WORDS[:1]})["o0"].shape == (1, 2, 2)
