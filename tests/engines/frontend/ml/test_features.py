"""Scalers, encoders and other feature operators give ONNX Runtime's results."""
import math

import numpy as np
import pytest

from infer_server.engines.errors import ModelError
from tests.engines.frontend.one_node import check, imported, normal

ML = {"domain": "ai.onnx.ml"}
ROWS = np.float32([[1, -5, 3], [0, 0, 0], [-1, -2, 0], [math.inf, 1, 2]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_columns_are_shifted_and_scaled(dtype):
    x = (normal(4, 3) * 5).astype(dtype)
    check("Scaler", [x], offset=[1.0, 0.5, -2.0], scale=[2.0, 3.0, 0.25], **ML)


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_rows_are_divided_by_their_norm(norm):
    check("Normalizer", [ROWS], norm=norm, **ML)


def test_numbers_are_told_from_those_above_a_threshold():
    check("Binarizer", [ROWS], threshold=0.5, **ML)


@pytest.mark.parametrize("attrs", [
    {"imputed_value_floats": [7.0, 8.0], "replaced_value_float": math.nan}, {"imputed_value_floats": [7.0]},
    {"imputed_value_floats": [7.0], "replaced_value_float": math.nan}])
def test_missing_numbers_are_filled_in(attrs):
    check("Imputer", [np.float32([[1, math.nan], [math.nan, 0]])], **attrs, **ML)


def test_missing_integers_are_filled_in():
    check("Imputer", [np.array([[1, -1], [-1, 2]])], imputed_value_int64s=[7, 8], replaced_value_int64=-1, **ML)


@pytest.mark.parametrize("shape", [(4, 3), (3,), (4, 2, 3)])
@pytest.mark.parametrize("places", [[2, 0], [[1, 1, 0]]])
def test_columns_are_taken_out(shape, places):
    check("ArrayFeatureExtractor", [normal(*shape), np.array(places)], (1,), **ML)


@pytest.mark.parametrize("widths", [[3, 2], [2, 1], [4, 3]], ids=["all", "fewer", "with zeros behind"])
@pytest.mark.parametrize("shapes", [[(4, 3), (4, 2)], [(4, 1, 3), (4, 2, 1)], [(3,), (2,)]],
                         ids=["rows", "rows of several axes", "one row"])
def test_columns_of_several_tensors_stand_side_by_side(shapes, widths):
    check("FeatureVectorizer", [normal(*shape) for shape in shapes], inputdimensions=widths, **ML)


@pytest.mark.parametrize("x", [np.array([[1, 3], [5, 1]]), np.float32([[5], [2]]), np.array([5, 1])])
def test_a_category_has_a_column_of_its_own(x):
    check("OneHotEncoder", [x], cats_int64s=[1, 5, 3], **ML)


@pytest.mark.parametrize("x, attrs", [
    (np.array([[1, 5], [2, 1]]), {"keys_int64s": [1, 2], "values_floats": [0.5, 0.6], "default_float": -3.0}),
    (np.array([1, 5, 2]), {"keys_int64s": [1, 2], "values_int64s": [8, 9]}),
    (np.float32([1, math.nan, 2]), {"keys_floats": [2.0, 1.0], "values_int64s": [8, 9], "default_int64": 4}),
    (np.float32([1, math.nan, 2]), {"keys_floats": [2.0, math.nan, math.nan], "values_int64s": [8, 9, 7]}),
    (np.float32([1, math.nan, 2]), {"keys_floats": [2.0, math.nan, math.nan], "values_int64s": [8, 9, 7],
                                     "version": 21})])
def test_a_key_becomes_its_value(x, attrs):
    check("LabelEncoder", [x], **attrs, **ML)


@pytest.mark.parametrize("op, inputs, attrs, message", [
    ("Scaler", [ROWS], {"scale": [1.0, 2.0], "offset": [1.0]},
     "scale has 2 values, but must have one, or one for each of 3 columns"),
    ("Normalizer", [ROWS], {"norm": "L3"}, "norm is 'L3', but must be MAX, L1 or L2"),
    ("Imputer", [ROWS], {"imputed_value_floats": [1.0, 2.0]},
     "the imputed values are .*, but must be one value, or one for each"),
    ("FeatureVectorizer", [ROWS], {"inputdimensions": [1, 2]},
     "inputdimensions has 2 values, but the node has 1 inputs"),
    ("OneHotEncoder", [ROWS], {"cats_strings": ["a"]}, "string categories"),
    ("LabelEncoder", [ROWS], {"keys_floats": [1.0], "values_strings": ["a"]}, "string values"),
    ("LabelEncoder", [ROWS], {"keys_floats": [1.0], "values_floats": [1.0, 2.0]}, "there are 1 keys, but 2 values"),
    ("LabelEncoder", [ROWS], {"keys_int64s": [1], "values_floats": [1.0]},
     "the keys are int64, but the input is float32")])
def test_what_does_not_fit_is_refused(op, inputs, attrs, message):
    with pytest.raises(ModelError, match=message):
        imported(op, inputs, **attrs, **ML)
