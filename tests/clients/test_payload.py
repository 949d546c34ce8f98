from __future__ import annotations

import numpy as np
import pytest

from infer_server.clients.load.payload import MAX_REQUESTS, PayloadError, prepare
from infer_server.protos import inference as pb


def metadata(*inputs: tuple[str, str, list[int]]) -> pb.ModelMetadataResponse:
    response = pb.ModelMetadataResponse(name="m")
    for name, datatype, shape in inputs:
        response.inputs.add(name=name, datatype=datatype, shape=shape)
    return response


def test_random_inputs_have_the_models_shapes_and_types_and_the_seeds_values() -> None:
    model = metadata(("x", "FP32", [-1, 3, 5]), ("ids", "INT64", [-1, 2]), ("s", "BYTES", [-1, 1]),
                     ("b", "BOOL", [-1, 1]))
    first, = prepare(model, 4, seed=1)
    assert {name: (str(v.dtype), v.shape) for name, v in first.items()} == {
        "x": ("float32", (4, 3, 5)), "ids": ("int64", (4, 2)), "s": ("object", (4, 1)), "b": ("bool", (4, 1))}
    again, other = prepare(model, 4, seed=1)[0], prepare(model, 4, seed=2)[0]
    assert all((again[name] == value).all() for name, value in first.items()) and (other["x"] != first["x"]).any()


def test_an_extent_that_varies_must_be_given() -> None:
    model = metadata(("x", "FP32", [-1, 3, -1, -1]))
    with pytest.raises(PayloadError, match="--shape x:3x8x8"):
        prepare(model, 1)
    assert prepare(model, 2, shapes={"x": (3, 6, 7)})[0]["x"].shape == (2, 3, 6, 7)
    with pytest.raises(PayloadError, match=r"is \[3, -1, -1\], not \[4, 6, 7\]"):
        prepare(model, 1, shapes={"x": (4, 6, 7)})


def test_a_model_without_a_batch_extent_takes_one_request_as_it_is() -> None:
    model = metadata(("x", "FP32", [1, 3]))
    assert prepare(model, 1)[0]["x"].shape == (1, 3)
    with pytest.raises(PayloadError, match="does not batch"):
        prepare(model, 2)
    data = {"x": np.arange(6, dtype=np.float32).reshape(2, 1, 3)}
    np.testing.assert_array_equal([feed["x"] for feed in prepare(model, 1, data=data)], data["x"])


def test_data_is_sent_in_consecutive_batches_that_wrap_around() -> None:
    model, rows = metadata(("x", "FP32", [-1, 1])), np.arange(5.0).reshape(5, 1)
    batches = [feed["x"].ravel().tolist() for feed in prepare(model, 2, data={"x": rows})]
    assert batches == [[0, 1], [2, 3]]
    assert [feed["x"].ravel().tolist() for feed in prepare(model, 8, data={"x": rows})] == [
        [0, 1, 2, 3, 4, 0, 1, 2]]
    assert len(prepare(model, 1, data={"x": np.zeros((1000, 1))})) == MAX_REQUESTS


@pytest.mark.parametrize(("data", "message"), [
    ({"y": np.zeros((2, 3))}, "no input 'y'"),
    ({"x": np.zeros((2, 4)), "z": np.zeros((2, 1))}, r"'x' is \[2, 4\], not \[items, 3\]"),
    ({"x": np.zeros((2, 3))}, "no data for input 'z'"),
    ({"x": np.zeros((2, 3)), "z": np.zeros((3, 1))}, "differ in their number of items"),
    ({"x": np.zeros((0, 3)), "z": np.zeros((0, 1))}, "'x'"),
])
def test_data_that_does_not_fit_is_refused_by_name(data: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        prepare(metadata(("x", "FP32", [-1, 3]), ("z", "FP32", [-1, 1])), 1, data=data)
