"""Requests are split without trusting their lengths; invalid bytes cause an error and nothing else."""
from __future__ import annotations

import random

import numpy as np
import pytest

from infer_server.errors import InvalidRequestError
from infer_server.protocol import wire
from infer_server.protocol.codec import DATATYPES, declared_inputs, decode_inputs, encode_raw
from infer_server.protocol.wire import InferRequest, RequestForm, join_response, split_request
from infer_server.protos import inference


def message(raw: tuple[bytes, ...] = (b"\1\2\3\4",), id: str = "") -> inference.ModelInferRequest:
    request = inference.ModelInferRequest(model_name="m", raw_input_contents=raw, id=id)
    for i in range(len(raw)):
        request.inputs.add(name=f"x{i}", datatype="UINT8", shape=[len(raw[i])])
    return request


def decoded(request: InferRequest) -> dict[str, np.ndarray]:
    return decode_inputs(request, declared_inputs(request.header.inputs))


def test_tensors_stay_in_the_received_bytes_and_the_rest_is_parsed() -> None:
    request = message((b"abc", b"", bytes(300)), id="7")
    data = request.SerializeToString()
    split = split_request(data)
    assert [bytes(raw) for raw in split.raw_inputs] == list(request.raw_input_contents)
    assert all(raw.obj is data for raw in split.raw_inputs)
    request.ClearField("raw_input_contents")
    request.ClearField("id")
    assert (split.header, split.id) == (request, "7")


def test_requests_that_differ_in_their_tensors_and_their_ids_alone_have_one_form() -> None:
    forms = {split_request(message(raw, id).SerializeToString()).form
             for raw in ((b"ab",), (b"cd",)) for id in ("", "7")}
    assert len(forms) == 1 and forms.pop().is_cached
    assert split_request(message((b"abc",)).SerializeToString()).form.header.inputs[0].shape == [3]


def test_a_message_as_long_as_the_one_before_is_split_as_if_it_were_the_first() -> None:
    def told(split: InferRequest) -> tuple[object, ...]:
        return split.form, split.id, [bytes(raw) for raw in split.raw_inputs], dict(split.packed)

    named, typed = message((b"abc", b"def")), message((b"abc", b"def"))
    named.model_name = "n"
    typed.inputs[0].name = "y0"
    referred = message((b"abc", b"def"))
    referred.ClearField("raw_input_contents")
    every = [each.SerializeToString() for each in (
        message((b"abc", b"def")), message((b"uvw", b"xyz")), message((b"ab", b"cdef")), named, typed, referred,
        message((b"abc", b""), id="i"), message((b"abc", b""), id="j"))]
    every.append(every[0][:-5] + b"\x3a\x00" + b"\x3a\x01d")      # three tensors in as many bytes
    first = []
    for data in every:
        wire._last_of.cache_clear()
        first.append(told(split_request(data)))
    assert len(set(map(len, every))) < len(every) - 3
    order = random.Random(0)
    for at in order.choices(range(len(every)), k=500):
        assert told(split_request(every[at])) == first[at]
    again = bytes(bytearray(every[1]))
    assert all(raw.obj is again for raw in split_request(again).raw_inputs)


def test_a_form_of_many_bytes_is_not_cached() -> None:
    data = message().SerializeToString() + b"\x0a\xd0\x0f" + b"n" * 2000        # another, longer name
    split = split_request(data)
    assert (split.header.model_name, split.form.is_cached) == ("n" * 2000, True)
    assert not split_request(data + message((b"", b"")).SerializeToString() * 2).form.is_cached


def test_tensors_are_found_wherever_they_stand_among_the_fields() -> None:
    one, two = message((b"a",)), inference.ModelInferRequest(id="later", raw_input_contents=[b"b"])
    split = split_request(one.SerializeToString() + two.SerializeToString())
    assert [bytes(raw) for raw in split.raw_inputs] == [b"a", b"b"]
    assert (split.header.model_name, split.id) == ("m", "later")


def test_unknown_fields_of_every_wire_type_are_skipped() -> None:
    unknown = b"\xa0\x06\x96\x01" + b"\xa1\x06" + bytes(8) + b"\xa5\x06" + bytes(4) + b"\xa2\x06\x02hi"
    split = split_request(unknown + message().SerializeToString())
    assert bytes(split.raw_inputs[0]) == b"\1\2\3\4"


@pytest.mark.parametrize(("data", "text"), [
    (b"\x3a\xff\xff\xff\xff\x0f", "after the message"),             # 4 GiB announced, nothing there
    (b"\x3a\x05abc", "ends 2 bytes after the message"),
    (b"\x3a", "ends within the number"),
    (b"\x3a" + b"\xff" * 11, "more than 10 bytes"),
    (b"\x0b", "wire type 3"),
    (b"\x3a\0" * 5000, "more than 4096 fields"),
    (b"\x0a\x02\xff\xfe", "not a ModelInferRequest"),               # a name that is no UTF-8
    (b"\x2a\x03\x0a\x05a", "not a ModelInferRequest"),              # a length inside of an input
])
def test_a_malformed_message_is_refused_with_the_place(data: bytes, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        split_request(data)


def test_no_corruption_of_a_request_raises_anything_but_a_refusal() -> None:
    rng = random.Random(0)
    data = message((bytes(16), b"xyz"), id="7").SerializeToString()
    outcomes = set()
    for _ in range(3000):
        corrupt = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            corrupt[rng.randrange(len(corrupt))] = rng.randrange(256)
        try:
            decoded(split_request(bytes(corrupt[:rng.randint(1, len(corrupt))])))
            outcomes.add("read")
        except InvalidRequestError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_a_response_is_what_protobuf_would_have_written() -> None:
    response = inference.ModelInferResponse(model_name="m", model_version="1")
    response.outputs.add(name="y", datatype="FP32", shape=[300])
    values = np.arange(300, dtype=np.float32)
    joined = join_response(response.SerializeToString(), "sieben", [encode_raw(values, DATATYPES["FP32"])])
    response.id = "sieben"
    response.raw_output_contents.append(values.tobytes())
    assert inference.ModelInferResponse.FromString(joined) == response


@pytest.mark.parametrize("name", [name for name in DATATYPES if name not in ("BYTES", "BF16")])
def test_every_datatype_goes_round(name: str) -> None:
    datatype = DATATYPES[name]
    array = np.array([[0, 1, 1], [1, 0, 1]], datatype.array)
    raw = bytes(encode_raw(array.T, datatype))                      # not contiguous
    assert raw == array.T.tobytes()
    header = inference.ModelInferRequest()
    header.inputs.add(name="x", datatype=name, shape=[3, 2])
    back = decoded(InferRequest(RequestForm(header), (memoryview(raw),)))["x"]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array.T)


def test_bytes_elements_carry_their_lengths() -> None:
    array = np.array([b"", b"abc", "ä"], np.object_)
    raw = encode_raw(array, DATATYPES["BYTES"])
    assert bytes(raw) == b"\0\0\0\0" b"\3\0\0\0abc" b"\2\0\0\0\xc3\xa4"
    header = inference.ModelInferRequest()
    header.inputs.add(name="x", datatype="BYTES", shape=[3])
    assert list(decoded(InferRequest(RequestForm(header), (raw,)))["x"]) == [b"", b"abc", "ä".encode()]
    for broken in (raw[:-1], raw[:-6], bytes(raw) + b"\0"):
        with pytest.raises(InvalidRequestError):
            decoded(InferRequest(RequestForm(header), (memoryview(broken),)))


def test_any_byte_but_zero_is_true() -> None:
    header = inference.ModelInferRequest()
    header.inputs.add(name="x", datatype="BOOL", shape=[3])
    assert decoded(InferRequest(RequestForm(header), (memoryview(b"\0\1\7"),)))["x"].tobytes() == b"\0\1\1"


def test_typed_values_outside_of_their_datatype_are_refused() -> None:
    header = inference.ModelInferRequest()
    header.inputs.add(name="x", datatype="INT8", shape=[2]).contents.int_contents.extend([1, 128])
    with pytest.raises(InvalidRequestError, match="outside of INT8's -128..127"):
        decoded(InferRequest(RequestForm(header), ()))
    header.inputs[0].contents.int_contents[1] = -128
    assert decoded(InferRequest(RequestForm(header), ()))["x"].tolist() == [1, -128]


def test_halves_must_be_sent_raw() -> None:
    header = inference.ModelInferRequest()
    header.inputs.add(name="x", datatype="FP16", shape=[1]).contents.fp32_contents.append(1)
    with pytest.raises(InvalidRequestError, match="no typed contents"):
        decoded(InferRequest(RequestForm(header), ()))


@pytest.mark.parametrize(("shape", "raw"), [
    ([0, 1 << 62, 1 << 62], b""), ([1] * 100, bytes(4)), ([1 << 62, 4], bytes(16))])
def test_absurd_shapes_are_refused(shape: list[int], raw: bytes) -> None:
    header = inference.ModelInferRequest()
    header.inputs.add(name="x", datatype="FP32", shape=shape)
    with pytest.raises(InvalidRequestError, match="input 'x'"):
        decoded(InferRequest(RequestForm(header), (memoryview(raw),)))


def test_there_is_one_raw_tensor_for_each_input() -> None:
    header = inference.ModelInferRequest()
    header.inputs.add(name="x", datatype="UINT8", shape=[1])
    with pytest.raises(InvalidRequestError, match="2 tensors for 1 inputs"):
        decoded(InferRequest(RequestForm(header), (memoryview(b"a"), memoryview(b"b"))))


@pytest.mark.parametrize("name", [name for name, datatype in DATATYPES.items()
                                  if datatype.contents and name != "BYTES"])
def test_typed_contents_in_packed_form_are_what_protobuf_reads(name: str) -> None:
    datatype = DATATYPES[name]
    rng = np.random.default_rng(0)
    raw: np.ndarray = rng.integers(0, 256, 5000 * datatype.array.itemsize, np.uint8)
    array = raw % 2 == 1 if name == "BOOL" else raw.view(datatype.array)
    request = inference.ModelInferRequest(model_name="m", id="7")
    request.inputs.add(name="before", datatype="UINT8", shape=[1]).contents.uint_contents.append(5)
    tensor = request.inputs.add(name="x", datatype=name, shape=[50, 100])
    getattr(tensor.contents, datatype.contents).extend(array.tolist())
    request.inputs.add(name="after", datatype="INT64", shape=[2]).contents.int64_contents.extend([-1, 1 << 40])
    split = split_request(request.SerializeToString())
    assert list(split.packed) == [1] and not split.header.inputs[1].HasField("contents")
    back = decoded(split)
    np.testing.assert_array_equal(back["x"], array.reshape(50, 100))
    assert back["x"].dtype == datatype.array
    assert (back["before"].tolist(), back["after"].tolist()) == ([5], [-1, 1 << 40])


def packed(datatype: str, shape: list[int], contents: bytes) -> InferRequest:
    """Return a request with one input, whose InferTensorContents are these bytes."""
    tensor = inference.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=shape).SerializeToString()
    tensor += b"\x2a" + varint(len(contents)) + contents
    return split_request(b"\x2a" + varint(len(tensor)) + tensor)


def varint(value: int) -> bytes:
    return bytes((value & 0x7F | 0x80,)) + varint(value >> 7) if value > 0x7F else bytes((value,))


def run(field: int, values: bytes) -> bytes:
    return bytes((field << 3 | 2,)) + varint(len(values)) + values


def test_typed_contents_in_any_other_form_are_read_as_well() -> None:
    half = np.arange(1000, dtype=np.float32)
    for contents in (run(6, half.tobytes()) * 2, b"".join(b"\x35" + value.tobytes() for value in (*half, *half))):
        request = packed("FP32", [2000], contents)
        assert not request.packed
        np.testing.assert_array_equal(decoded(request)["x"], [*half, *half])


@pytest.mark.parametrize(("datatype", "contents", "text"), [
    ("FP32", run(6, bytes(8001)), "ends within a value"),
    ("FP32", run(6, bytes(8004)), "expected 2000 values in fp32_contents, got 2001"),
    ("FP32", run(7, bytes(16000)), "expected the values of FP32 in fp32_contents, got fp64_contents"),
    ("FP16", run(6, bytes(8000)), "FP16 has no typed contents"),
    ("INT8", run(2, b"\x80\x01" * 2000), "outside of INT8's"),
    ("INT32", run(2, bytes(4500)), "expected 2000 values in int_contents, got 4500"),
    ("INT32", run(2, bytes(2000) + b"\x80" * 2500), "without an end"),
    ("INT64", run(3, bytes(1999) + b"\x80" * 2500 + b"\0"), "more than 10 bytes"),
])
def test_packed_contents_that_are_not_what_was_declared_are_refused(datatype: str, contents: bytes, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        decoded(packed(datatype, [2000], contents))


def test_packed_contents_are_not_copied() -> None:
    request = packed("FP32", [2000], run(6, bytes(8000)))
    array = decoded(request)["x"]
    assert np.shares_memory(array, np.frombuffer(request.packed[0].values, np.uint8))


def test_packed_and_raw_contents_are_not_mixed() -> None:
    request = packed("FP32", [2000], run(6, bytes(8000)))
    with pytest.raises(InvalidRequestError, match="must not be mixed"):
        decoded(InferRequest(request.form, (memoryview(bytes(8000)),), request.packed))


def test_an_element_of_bytes_that_is_neither_bytes_nor_text_is_its_text() -> None:
    values = np.array([b"a\xff", "b\u00e9", 3, True, bytearray(b"c")], np.object_)
    assert bytes(encode_raw(values, DATATYPES["BYTES"])) == b"".join(
        len(text).to_bytes(4, "little") + text for text in (b"a\xff", "b\u00e9".encode(), b"3", b"True", b"c"))
