from __future__ import annotations

import numpy as np
import pytest

from infer_server.clients.codec import (
    DATATYPES,
    datatype_of,
    decode,
    encode,
    infer_outputs,
    infer_request,
    serialised_request,
)
from infer_server.clients.errors import InvalidRequestError, ResponseError
from infer_server.protos import inference as pb


@pytest.mark.parametrize("datatype", DATATYPES)
def test_an_array_of_every_datatype_survives_the_wire(datatype: str) -> None:
    array = np.arange(-6, 6).reshape(3, 4).astype(DATATYPES[datatype])
    assert datatype_of(array) == datatype
    back = decode(encode(array), datatype, (3, 4))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_views_and_big_endian_arrays_travel_as_rows_of_little_endian() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert encode(array.T) == np.ascontiguousarray(array.T).tobytes()
    assert encode(array.astype(">i4")) == array.astype("<i4").tobytes()
    assert datatype_of(array.astype(">i4")) == "INT32"


def test_strings_and_bytes_have_their_length_in_front() -> None:
    array = np.array([["a", b"\x00\xff"], ["", "zwölf"]], object)
    raw = encode(array)
    assert raw.startswith(b"\x01\x00\x00\x00a\x02\x00\x00\x00\x00\xff\x00\x00\x00\x00\x06\x00\x00\x00zw")
    assert decode(raw, "BYTES", (2, 2)).tolist() == [[b"a", b"\x00\xff"], [b"", "zwölf".encode()]]
    assert decode(encode(np.array(["ab", "c"])), "BYTES", (2,)).tolist() == [b"ab", b"c"]


def test_bfloat16_is_widened() -> None:
    values = np.array([1.0, -2.5, 0.0], np.float32)
    upper_halves = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    np.testing.assert_array_equal(decode(upper_halves, "BF16", (3,)), values)


@pytest.mark.parametrize(("raw", "datatype", "shape"), [
    (b"\x00" * 7, "FP32", (2,)), (b"\x00" * 8, "FP33", (2,)),
    (b"\x05\x00\x00\x00ab", "BYTES", (1,)), (b"\x01\x00\x00\x00a", "BYTES", (2,)), (b"\x01\x00", "BYTES", (1,)),
])
def test_contents_that_do_not_fit_are_refused(raw: bytes, datatype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ResponseError):
        decode(raw, datatype, shape)


@pytest.mark.parametrize("array", [np.zeros(2, np.complex64), np.array([object()]), np.array(["2026-01-01"], "M8[D]")])
def test_what_the_protocol_has_no_name_for_is_refused(array: np.ndarray) -> None:
    with pytest.raises(InvalidRequestError):
        infer_request("m", {"x": array})


def test_a_request_names_its_tensors_in_order_and_carries_priority_only_when_asked() -> None:
    request = infer_request("m", {"b": np.zeros((2, 1), np.int8), "a": np.ones(3, np.float32)}, version="2",
                            request_id="r1", priority=1)
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "r1")
    assert [(i.name, i.datatype, list(i.shape)) for i in request.inputs] == [("b", "INT8", [2, 1]), ("a", "FP32", [3])]
    assert [len(raw) for raw in request.raw_input_contents] == [2, 12]
    assert request.parameters["priority"].uint64_param == 1
    assert not infer_request("m", {}).parameters


def test_a_response_with_missing_contents_is_refused() -> None:
    response = pb.ModelInferResponse()
    response.outputs.add(name="y", datatype="FP32", shape=[1])
    with pytest.raises(ResponseError):
        infer_outputs(response)


@pytest.mark.parametrize("width", [0, 1, 31, 32, 5000, 1 << 20])
def test_the_parts_of_a_request_are_the_request(width: int) -> None:
    inputs = {"x": np.arange(width, dtype=np.float32), "words": np.array(["a", "b" * width], object)}
    parts = serialised_request("m", inputs, version="2", request_id="r", priority=1)
    assert pb.ModelInferRequest.FromString(b"".join(parts)) == infer_request(
        "m", inputs, version="2", request_id="r", priority=1)
