"""Large JSON requests parsed in steps equal those parsed at once, within limits."""
from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infer_server.errors import InvalidRequestError, MemoryLimitError, TooLargeError
from infer_server.protocol import json_documents
from infer_server.protocol.codec import DATATYPES, OBJECT_BYTES, InputTensor, object_bytes
from infer_server.protocol.json_documents import read_inference, read_members
from infer_server.protocol.json_tensors import from_json, json_pieces, read_array, read_values
from infer_server.protocol.json_values import JsonArray, Steps, flat
from infer_server.workers import run_steps

Read = Callable[[bytes, int, Callable[[int], None]], Steps[dict[str, Any]]]


def ignore(count: int) -> None:
    """Ignore the counted bytes."""


def read(text: bytes, reader: Read = read_inference) -> dict[str, Any]:
    return run_steps(reader(text, len(text), ignore))


def plain(value: Any) -> Any:
    """Return a document with its JsonArrays as flat lists."""
    if isinstance(value, JsonArray):
        return [each for chunk in value.take_chunks() for each in np.asarray(chunk, object).tolist()]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def request(data: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": data}], **more}).encode()


@pytest.mark.parametrize("piece", [1, 7, 16 << 10])
def test_a_document_is_the_one_that_json_reads(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_documents, "_PIECE_BYTES", piece)
    choose = random.Random(4)
    for kind in (lambda: choose.randrange(-2**63, 2**63), lambda: choose.gauss(0, 1e9), lambda: None,
                 lambda: choose.choice([True, False]), lambda: choose.choice(["", "é\n\\\"[1]", "a" * 100]),
                 lambda: choose.choice([1, 2.5, -3])):
        data = [kind() for _ in range(300)]
        document = read(request(data, id="a", parameters={"deep": [{"x": [1, "]"]}]}, outputs=[]))
        assert plain(document) == json.loads(request(data, id="a", parameters={"deep": [{"x": [1, "]"]}]}, outputs=[]))


def test_nested_values_are_flattened() -> None:
    assert plain(read(request([[1, 2], [[3]], 4, []])))["inputs"][0]["data"] == [1, 2, 3, 4]


NUMBERS = ", ".join(map(repr, np.random.default_rng(0).standard_normal(400).tolist()))
INTEGERS = ",".join(map(str, range(400)))


@pytest.mark.parametrize("step", [300, 128 << 10])
@pytest.mark.parametrize("data", [
    f"[{NUMBERS}]", f"[ {NUMBERS} ]", f"[[{NUMBERS}], [{INTEGERS}]]", f"[[[{NUMBERS}], 1, [{NUMBERS}]], 2]",
    f"[{INTEGERS}, 1.5, {INTEGERS}]", f"[{INTEGERS}, 18446744073709551615]", f"[{INTEGERS}, true, {INTEGERS}]",
    f'[{INTEGERS}, "a", [{NUMBERS}]]', f'["[{NUMBERS}]", "{NUMBERS}"]', f'[1, "{INTEGERS}"]', f"[{INTEGERS}, 1e-400]",
    f"[{INTEGERS},\n[],[{INTEGERS}]]"])
def test_long_lists_of_numbers_are_those_that_json_reads(data: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_documents, "_NUMBERS_BYTES", step)
    text = f'{{"inputs": [{{"name": "x", "data": {data}}}], "parameters": {{"a": [{INTEGERS}]}}}}'.encode()
    expected = json.loads(text)
    expected["inputs"][0]["data"] = flat(expected["inputs"][0]["data"])
    assert plain(read(text)) == expected


@pytest.mark.parametrize("step", [300, 128 << 10])
@pytest.mark.parametrize("data", [
    f"[{NUMBERS},]", f"[{NUMBERS}, ]", f"[,{NUMBERS}]", f"[ , {NUMBERS}]", f"[{NUMBERS},,{NUMBERS}]",
    f"[01, {NUMBERS}]", f"[{NUMBERS} {NUMBERS}]", f"[{INTEGERS}, .5, 1]", f"[{INTEGERS}, +1, 1]",
    f"[{INTEGERS}, 1., 1]", f"[{NUMBERS}", f"[{NUMBERS}}}", f"[{INTEGERS}, 1 1, 2]", f"[{INTEGERS}, -, 2]",
    f"[{' ' * 400},1]", f"[{' ' * 400}]]"])
def test_long_lists_that_are_no_json_are_refused(data: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_documents, "_NUMBERS_BYTES", step)
    with pytest.raises(InvalidRequestError, match="failed to parse"):
        read(f'{{"inputs": [{{"name": "x", "data": {data}}}]}}'.encode())


def test_long_lists_of_numbers_are_read_in_short_steps_and_counted() -> None:
    values = np.random.default_rng(0).standard_normal(100_000)
    text, held = request(values.tolist()), list[int]()
    steps = read_inference(text, len(text), held.append)
    assert sum(1 for _ in steps) >= len(text) // json_documents._NUMBERS_BYTES
    assert values.nbytes <= sum(held) <= 2 * values.nbytes


@pytest.mark.parametrize(("text", "says"), [
    (b"[1]", "not a JSON object"), (b"1", "not a JSON object"), (b"", "failed to parse"),
    (b'{"a": 1', "failed to parse"), (b'{"a": 1} 2', "failed to parse"), (b'{"a": 1, "a": 2}', "'a' occurs twice"),
    (b'{"a": \xff"}', "failed to parse"),
    (b'{"a": "\xff"}', "failed to parse"), (request([{"a": 1}]), "contains a JSON object"),
    (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "more than 100 nested levels"),
    (request(json.loads("[" * 101 + "]" * 101)), "nesting depth exceeds"),
    (b'{"a": ' + b"9" * 5000 + b"}", "more than 1000 digits"), (b'{"inputs": [{"data": [1,]}]}', "failed to parse"),
    (b'{"inputs": [{"data": [1, NaNo]}]}', "failed to parse"),
])
def test_text_that_is_not_a_request_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        read(text)


def test_nan_and_infinity_are_read_in_documents_of_moderate_size() -> None:
    text = request([float("nan"), float("inf"), 1.5])
    array = read(text)["inputs"][0]["data"]
    values = run_steps(read_array(DATATYPES["FP32"], "x", "x", array, ignore, 3))
    np.testing.assert_array_equal(values, np.float32([np.nan, np.inf, 1.5]))
    with pytest.raises(InvalidRequestError, match="failed to parse"):
        read(text + b" " * (2 << 20))


@pytest.mark.parametrize("text", [
    b'{"a": [' + b"{}," * 30_000 + b"{}]}", b'{"' + b'": 1, "'.join(b"%d" % i for i in range(30_000)) + b'": 1}',
    b'{"inputs": [' + b'{"name": "x"},' * 30_000 + b'{"name": "x"}]}', b'{"id": "' + b"x" * (2 << 20) + b'"}'])
def test_what_is_beside_the_values_of_tensors_is_limited(text: bytes) -> None:
    with pytest.raises(TooLargeError, match="more than 1048576 bytes"):
        read(text)


def test_bytes_are_counted_before_they_are_used() -> None:
    held = 0

    def hold(count: int) -> None:
        nonlocal held
        held += count
        if held > 1 << 20:
            raise MemoryLimitError("full")

    for text in (request([1] * 200_000), request(["a"] * 200_000), request(["a" * (2 << 20)])):
        held = 0
        with pytest.raises(MemoryLimitError):
            run_steps(read_inference(text, len(text), hold))
    held = 0
    text = request([1.5] * 20_000)
    run_steps(read_inference(text, len(text), hold))
    assert held == 160_000


@pytest.mark.parametrize(("datatype", "data", "says"), [
    ("INT64", [1.0], "a float in 'data' is not valid for INT64"), ("FP32", [True], "a bool"), ("BOOL", [1], "a int"),
    ("INT64", [2**63], "out of range for INT64"), ("UINT64", [-1], "out of range for UINT64"),
    ("UINT64", [2**63, -1], "out of range for UINT64"), ("INT8", [128], "outside of INT8's"),
    ("FP32", [1, None], "a NoneType"), ("BYTES", [1], "a int"), ("FP32", ["1"], "a str")])
def test_values_of_another_datatype_are_refused(datatype: str, data: list[Any], says: str) -> None:
    array = read(request(data))["inputs"][0]["data"]
    with pytest.raises(InvalidRequestError, match=says):
        run_steps(read_array(DATATYPES[datatype], "x", "x", array, ignore, len(data)))


def test_more_values_than_the_tensor_has_are_refused() -> None:
    array = read(request([1, 2, 3]))["inputs"][0]["data"]
    with pytest.raises(InvalidRequestError, match="expected 2 values for x, got 3"):
        run_steps(read_array(DATATYPES["FP32"], "x", "x", array, ignore, 2))


@pytest.mark.parametrize(("datatype", "data"), [
    ("UINT64", [2**63, 5]), ("INT64", [-2**63, 5]), ("FP64", [1, 2**70]), ("FP32", [1, 2.5]),
    ("FP64", [0.1, 2**70]), ("BOOL", [True]), ("UINT8", [255])])
def test_values_keep_all_their_bits(datatype: str, data: list[Any]) -> None:
    array = read(request(data))["inputs"][0]["data"]
    values = run_steps(read_array(DATATYPES[datatype], "x", "x", array, ignore, len(data)))
    assert values.dtype == DATATYPES[datatype].array and values.tolist() == data


def test_long_members_are_arrays_and_text() -> None:
    text = json.dumps({"prompt": "a" * (2 << 20), "ids": [1, 2], "parameters": {"more": [3.5]}}).encode()
    document = read(text, read_members)
    assert document["prompt"] == "a" * (2 << 20)
    assert plain(document["ids"]) == [1, 2] and plain(document["parameters"]) == {"more": [3.5]}


RANDOM = np.random.default_rng(0)
WORDS = ['a"\\][{', "é,", "\U0001f600", "", "\n" * 9]


@pytest.mark.parametrize(("values", "datatype", "shape"), [
    (RANDOM.standard_normal(20_000).tolist(), "FP32", (20_000,)),
    (RANDOM.standard_normal((40, 50, 10)).tolist(), "FP64", (40, 50, 10)),
    (RANDOM.integers(0, 255, (60, 60, 3)).tolist(), "UINT8", (60, 60, 3)),
    ([[bool(i % 3)] for i in range(20_000)], "BOOL", (20_000, 1)),
    ([WORDS] * 3000, "BYTES", (3000, 5)), ([["x" * 100_000], "y", 'z"\\' * 40_000], "BYTES", (3,)),
    ([[[]] * 9000, []], "FP32", (0, 3)),
], ids=["flat", "nested", "image", "booleans", "words", "long words", "empty"])
@pytest.mark.parametrize("written", [{}, {"indent": 1}, {"ensure_ascii": False}], ids=["plain", "indented", "utf-8"])
def test_long_values_are_those_that_json_reads(values: Any, datatype: str, shape: tuple[int, ...],
                                               written: dict[str, Any]) -> None:
    text = json.dumps({"inputs": [{"name": "x", "data": values}]}, **written).encode()
    tensor = InputTensor("x", DATATYPES[datatype], shape)
    array, expected = run_steps(read_values(tensor, read(text)["inputs"][0]["data"], ignore)), from_json(tensor, values)
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("wrong", ["[1,[,2]]", "[1,[2,],3]", "[1,2,]", "[,1]", "[1 2]", "[1,,2]", "[[1]", '["a]',
                                   "[1}]", "[1]]", "[01]", "[tru]", '["\\x"]', '["\n"]', "[1"])
def test_invalid_json_is_refused_wherever_pieces_are_cut(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece in (1, 2, 3, 5, 64):
        monkeypatch.setattr(json_documents, "_PIECE_BYTES", piece)
        with pytest.raises(InvalidRequestError):
            read(b'{"inputs": [{"data": ' + wrong.encode() + b"}]}")


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
