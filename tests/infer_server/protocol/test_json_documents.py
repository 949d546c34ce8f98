"""Large JSON is read in steps as json reads it, and refused where json refuses it."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from infer_server.errors import InvalidRequestError, TooLargeError
from infer_server.protocol import json_values
from infer_server.protocol.codec import DATATYPES, OBJECT_BYTES, InputTensor, object_bytes
from infer_server.protocol.json_documents import MOST_FRAME_BYTES, read_inference, read_members
from infer_server.protocol.json_tensors import from_json, json_pieces, read_values
from infer_server.protocol.json_values import PIECE_BYTES, JsonArray, JsonString
from infer_server.workers import at_once

RANDOM = np.random.default_rng(0)
WORDS = ['a"\\][{', "é,", "\U0001f600", "", "\n" * 9]


def uncounted(_: int) -> None: ...


def document_of(data: str, datatype: str = "FP32", shape: tuple[int, ...] = (1,)) -> bytes:
    return (f'{{"id": "i", "inputs": [{{"name": "x", "datatype": "{datatype}", "shape": {list(shape)}, "data": {data}'
            f'}}], "outputs": [{{"name": "y"}}]}}').encode()


def read(body: bytes) -> dict[str, Any]:
    return at_once(read_inference(body, len(body)))


def flat_values(data: JsonArray) -> Iterator[Any]:
    for piece in data.values():
        yield from at_once(piece)


@pytest.mark.parametrize("orjson", [True, False])
@pytest.mark.parametrize(("values", "datatype", "shape"), [
    (RANDOM.standard_normal(20_000).tolist(), "FP32", (20_000,)),
    (RANDOM.standard_normal((40, 50, 10)).tolist(), "FP64", (40, 50, 10)),
    (RANDOM.integers(0, 255, (60, 60, 3)).tolist(), "UINT8", (60, 60, 3)),
    ([[bool(i % 3)] for i in range(20_000)], "BOOL", (20_000, 1)),
    ([WORDS] * 3000, "BYTES", (3000, 5)), ([["x" * 100_000], "y", 'z"\\' * 40_000], "BYTES", (3,)),
    ([[[]] * 9000, []], "FP32", (0, 3)),
], ids=["flat", "nested", "image", "truths", "words", "long words", "empty"])
@pytest.mark.parametrize("written", [{}, {"indent": 1}, {"ensure_ascii": False}], ids=["plain", "indented", "utf-8"])
def test_long_values_are_those_that_json_reads(values: Any, datatype: str, shape: tuple[int, ...],
                                               written: dict[str, Any], orjson: bool,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    if not orjson:
        monkeypatch.setattr(json_values, "_orjson_loads", None)
    body = document_of(json.dumps(values, **written), datatype, shape)
    tensor, document = InputTensor("x", DATATYPES[datatype], shape), read(body)
    data = document["inputs"][0]["data"]
    assert isinstance(data, JsonArray) and document["id"] == "i" and document["outputs"] == [{"name": "y"}]
    array, expected = at_once(read_values(tensor, data, uncounted)), from_json(tensor, values)
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("wrong", ["[1,[,2]]", "[1,[2,],3]", "[1,2,]", "[,1]", "[1 2]", "[1,,2]", "[[1]", '["a]',
                                   "[1}]", "[1]]", "[01]", "[tru]", '["\\x"]', '["\n"]', '["\\ud800"]', "[1"])
@pytest.mark.parametrize("before", [
    "3," * 3000, "[3]," * 9000, '"a",' * 9000, *("3," * (PIECE_BYTES // 2 - shift) for shift in range(8)),
    *("[]," + "3," * (PIECE_BYTES // 2 - shift) for shift in range(8))], ids=range(19))
def test_what_is_no_json_is_refused_wherever_pieces_are_cut(before: str, wrong: str) -> None:
    for data in (f"[{before}{wrong}]", f"[{before}{wrong[1:]}"):
        body = document_of(data)
        try:
            json.loads(body)
            is_json = "ud800" not in data           # which json reads, and no UTF-8 is
        except ValueError:
            is_json = False
        try:
            data_read = read(body)["inputs"][0]["data"]
            for _ in flat_values(data_read) if isinstance(data_read, JsonArray) else data_read:
                pass
            was_read = True
        except InvalidRequestError:
            was_read = False
        assert was_read == is_json, data[-30:]


@pytest.mark.parametrize(("body", "says"), [
    (b"[" * 100_000, "no JSON object"), (b'{"a":' * 20_000, "failed to parse"), (b'{"id": ' + b"1" * 100_000, "parse"),
    (document_of("[" * 100_000), "Unterminated|depth"), (document_of("[" + "{}," * 9000 + "1]"), "JSON object in it"),
    (document_of("[" + "[" * 101 + "]" * 101 + ",1" * 9000 + "]"), "nesting depth"),
    (document_of(f"[{' ' * 99_000}1]"), "more than 32768 bytes"), (document_of(f"[{'1' * 99_000}]"), "more than 32768"),
    (b'{"inputs": [], "inputs": []' + b" " * 9, "'inputs' is there twice"),
    (document_of("[1]") + b"x", "Extra data"), (b'{"inputs": [{"data": "' + b"a" * 9000, "Unterminated string"),
], ids=range(11))
def test_documents_without_an_end_or_a_meaning_are_refused(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        list(flat_values(read(body)["inputs"][0]["data"]))


@pytest.mark.parametrize("body", [
    b'{"inputs": [' + b"{}," * 9000 + b"{}]}", b"{" + b",".join(b'"%d": 0' % i for i in range(9000)) + b"}",
    b'{"inputs": [], "outputs": [' + b'{"name": "y"},' * (MOST_FRAME_BYTES // 14) + b"{}]}",
    b'{"id": "' + b"a" * MOST_FRAME_BYTES + b'"}', b" " * (MOST_FRAME_BYTES + 1) + b"{}",
    b'{"parameters": {"a": ' + b"[" * MOST_FRAME_BYTES], ids=["inputs", "keys", "outputs", "text", "spaces", "depth"])
def test_what_is_beside_the_values_is_bounded(body: bytes) -> None:
    with pytest.raises(TooLargeError):
        read(body)


def test_no_more_is_read_than_the_tensor_has_and_it_is_counted_before() -> None:
    data = read(document_of("[" + "1," * 40_000 + "1]"))["inputs"][0]["data"]
    counted: list[int] = []
    with pytest.raises(InvalidRequestError, match="expected 16 values .*, got at least"):
        at_once(read_values(InputTensor("x", DATATYPES["FP32"], (1, 16)), data, counted.append))
    assert counted == [17 * 4]
    with pytest.raises(InvalidRequestError, match="expected 10000000000 values .*, got 40001"):
        at_once(read_values(InputTensor("x", DATATYPES["FP32"], (10**10,)), data, counted.append))
    assert counted[1] <= 4 * (40_002 + 1), "no more than the text can have"


def test_members_of_a_generation_may_be_long() -> None:
    text = 'é"\n' * 9000
    body = json.dumps({"text": text, "n": list(range(9000)), "parameters": {"p": text, "short": [1]}, "k": 1}).encode()
    document = at_once(read_members(body, len(body)))
    assert document["k"] == 1 and document["parameters"]["short"] == [1]
    for value in (document["text"], document["parameters"]["p"]):
        assert isinstance(value, JsonString) and at_once(value.content()).decode() == text
    assert list(flat_values(document["n"])) == list(range(9000))


@pytest.mark.parametrize(("text", "says"), [(b"a" * 9000 + b"\x01", "control"), (b"a" * 9000 + b"\xff", "no UTF-8"),
                                            (b"\\n" * (4 << 20) + b"a", "has escapes and more than")])
def test_long_texts_that_are_none_are_refused(text: bytes, says: str) -> None:
    body = b'{"x": "' + text + b'"}'
    value = at_once(read_members(body, len(body)))["x"]
    with pytest.raises(InvalidRequestError, match=says):
        at_once(value.content())


def test_long_outputs_are_written_as_short_ones_are() -> None:
    words = np.array([b"a", "é".encode()] * 4500, object)
    for array, datatype in ((RANDOM.standard_normal((100, 90)), "FP64"), (words, "BYTES")):
        text = b"".join(json_pieces(array, datatype))
        expected = [each.decode() for each in array] if datatype == "BYTES" else array.reshape(-1).tolist()
        assert json.loads(text) == expected


def test_the_objects_of_byte_strings_are_counted() -> None:
    words = InputTensor("x", DATATYPES["BYTES"], (10**6,))
    assert object_bytes(words, 4 * 10**6) == OBJECT_BYTES * 10**6
    assert object_bytes(words, 100) == OBJECT_BYTES * 50, "no more than the contents can have"
    assert object_bytes(InputTensor("x", DATATYPES["FP32"], (10**6,)), 4 * 10**6) == 0
