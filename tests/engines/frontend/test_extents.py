"""Tests of the dynamic dimensions of a model's inputs, their names, and the batch axis."""
import numpy as np
import pytest

from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.extents import likely_extents, open_extents, open_types, shapes_for, without_batch
from infer_server.engines.frontend.inputs import Declared

FLOAT = np.dtype(np.float32)


def types(shapes, given=None, keep_batch=False):
    declared = {name: Declared(name, FLOAT, None if shape is None else tuple(shape)) for name, shape in shapes.items()}
    return open_types("m", declared, given or {}, keep_batch)


def shapes_of(*arguments, **options):
    return {name: kind.shape for name, kind in types(*arguments, **options).items()}


@pytest.mark.parametrize("shapes, expected", [
    ({"x": ["N", 3, "H", "W"]}, {"x": ("batch", 3, "H", "W")}),
    ({"x": [None, 3, None]}, {"x": ("batch", 3, "x.2")}),
    ({"ids": ["N", "T"], "mask": ["N", "T"]}, {"ids": ("batch", "T"), "mask": ("batch", "T")}),
    ({"x": ["batch", 4], "h": [2, "batch", 8]}, {"x": ("items", 4), "h": (2, "items", 8)}),      # not the first axis
    ({"a": ["n", 4], "b": ["m", 4]}, {"a": ("n", 4), "b": ("m", 4)}),                            # two, and none is it
    ({"a": ["n", "T"], "b": ["T"]}, {"a": ("batch", "T"), "b": ("T",)}),
    ({"d": ["n", "n"]}, {"d": ("n", "n")})])
def test_the_batch_leads_everywhere_and_is_nowhere_else(shapes, expected):
    assert shapes_of(shapes) == expected


def test_given_shapes_make_numbers_of_symbols_wherever_they_are():
    two = {"x": ["N", "T", 4], "mask": ["N", "T"]}
    assert shapes_of(two, {"x": (None, 7, 4)}) == {"x": ("batch", 7, 4), "mask": ("batch", 7)}
    assert shapes_of(two, {"x": (2, -1, 4)}) == {"x": (2, "T", 4), "mask": (2, "T")}
    assert shapes_of(two, {"x": (2, -1, 4)}, keep_batch=True) == {"x": ("batch", "T", 4), "mask": ("batch", "T")}
    with pytest.raises(ModelError, match="does not match the declared"):
        shapes_of(two, {"x": (None, 7, 5)})


def test_a_user_may_say_that_different_symbols_are_one_batch():
    assert shapes_of({"a": ["n", 4], "b": ["m", 4]}, {"a": (None, 4), "b": (None, 4)}) == {
        "a": ("batch", 4), "b": ("batch", 4)}


def test_an_input_of_any_number_of_axes_needs_a_shape():
    with pytest.raises(ModelError, match="has no declared rank.*--shape x:"):
        types({"x": None})
    assert shapes_of({"x": None}, {"x": (None, 3, 5)}) == {"x": ("batch", 3, 5)}


def test_likely_extents_are_those_of_pictures_and_sentences():
    open_ = types({"image": ["N", 3, "H", "W"], "ids": ["M", "T"]})
    assert open_extents(open_) == ("N", "H", "W", "M", "T")
    assert likely_extents(open_) == {"N": 1, "H": 224, "W": 224, "M": 1, "T": 128}
    assert shapes_for(types({"ids": ["N", "T"]}), {"T": 5}) == {"ids": (None, 5)}
    assert without_batch(types({"ids": ["N", "T"]}))["ids"].shape == ("items", "T")
