"""All supported JSON parsers return the same values."""
from __future__ import annotations

import json
import math
from functools import reduce
from typing import Any

import numpy as np
import pytest

from infer_server.errors import InvalidRequestError
from infer_server.protocol import json_values
from infer_server.protocol.codec import DATATYPES, InputTensor
from infer_server.protocol.json_tensors import from_json
from infer_server.protocol.json_values import parsed

SPACE = b" " * json_values._FEW_BYTES
RANDOM = np.random.default_rng(0).standard_normal(500)


def read(text: bytes) -> Any:
    """Return the parsed value, or the error message. NaN becomes "nan", which equals itself."""
    try:
        return json.loads(json.dumps(parsed(text)), parse_constant=str)
    except InvalidRequestError as error:
        return str(error)


@pytest.mark.parametrize("text", [
    json.dumps(RANDOM.tolist()).encode(), json.dumps(RANDOM.astype(np.float32).tolist()).encode(),
    b'{"a": 1, "b": [true, null], "a": -0}', '["\\u00e9 é \\ud83d\\ude00"]'.encode(), b"[NaN, Infinity, 1]",
    b"[1e400, -1e400]", b"[9223372036854775808, 18446744073709551615, -9223372036854775808]", b"[[[[]]], {}]",
    b'["\\ud800"]', b'["\xff"]', b"[01]", b"[1, ]", b"[1 2]", b'{"a": }', b"[", b"", b"[" * 100_000,
    b"\xef\xbb\xbf[1]"])
def test_large_bodies_are_read_as_small_ones_are(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = read(text + SPACE), read(bytearray(text + SPACE))
    monkeypatch.setattr(json_values, "_FEW_BYTES", 1 << 30)         # json reads it
    assert actual == (read(text + SPACE),) * 2


@pytest.mark.parametrize("datatype, data, says", [
    ("FP32", [[1, 2.5], [3, True]], "a bool in 'data' is not valid for FP32"),
    ("INT64", [1, 2.0, 3, 4], "a float in 'data'"),
    ("INT64", [1, 2, 3, 2**63], "out of range for INT64"), ("INT8", [1, 2, 3, 128], "outside of INT8's"),
    ("FP32", [[1, 2], [3]], "expected 4 values for .*, got 3"), ("BYTES", ["a", "b", "c", 4], "a int in 'data'"),
    ("FP32", reduce(lambda inner, _: [inner], range(101), 1), "JSON nesting depth exceeds")])
def test_values_that_are_not_the_datatypes_are_refused(datatype: str, data: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        from_json(InputTensor("x", DATATYPES[datatype], (2, 2)), data)


def test_nested_values_and_those_of_one_list_are_one_tensor() -> None:
    tensor = InputTensor("x", DATATYPES["FP32"], (2, 2))
    for data in ([[1, 2.5], [3, math.inf]], [1, 2.5, [3, math.inf]], [1, 2.5, 3, math.inf]):
        np.testing.assert_array_equal(from_json(tensor, data), np.array([[1, 2.5], [3, np.inf]], np.float32))
