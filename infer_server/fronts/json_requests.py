"""Inferences over HTTP whose tensors are JSON: read here, and handed on as bytes (the binary tensor data extension).

To read a picture's JSON takes an interpreter tens of milliseconds. What does not become arrays here is handed on as it
came, so that what is said of it is said in one place.
"""
from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from infer_server.endpoints.http.messages import HttpRequest, parsed
from infer_server.errors import InvalidRequestError

_WORTHWHILE_BYTES = 2 << 10         # less is read as quickly as what it would become
_LENGTH = "inference-header-content-length"


def with_bytes(request: HttpRequest) -> HttpRequest:
    """The same inference, its inputs as bytes behind the JSON if they were within it."""
    if (len(request.body) < _WORTHWHILE_BYTES or _LENGTH in request.headers or request.method != "POST"
            or not request.path.endswith("/infer")):
        return request
    try:
        head, pieces = _apart(parsed(request.body))
    except (InvalidRequestError, KeyError, TypeError, ValueError, AttributeError):      # no such request
        return request
    text = json.dumps(head).encode()
    return request._replace(body=b"".join((text, *pieces)),
                            headers={**request.headers, _LENGTH: str(len(text))})


def _apart(head: Any) -> tuple[dict[str, Any], list[memoryview]]:
    """A request with its inputs' sizes in the places of their values, and the values."""
    from infer_server.protocol.codec import declared_inputs, encode_raw  # here: other fronts do without numpy
    from infer_server.protocol.json_tensors import from_json
    given = head["inputs"]
    if any(type(extent) is not int for each in given for extent in each["shape"]):
        raise TypeError("a shape is no list of integers")
    tensors = declared_inputs(SimpleNamespace(name=each["name"], datatype=each["datatype"], shape=each["shape"])
                              for each in given)
    inputs, pieces = [], []
    for each, tensor in zip(given, tensors, strict=True):
        others = {} if each.get("parameters") is None else each["parameters"]
        if others.keys() & {"binary_data_size", "shared_memory_region"}:
            raise ValueError("its values are elsewhere")
        pieces.append(encode_raw(from_json(tensor, each["data"]), tensor.datatype))
        inputs.append({**{name: value for name, value in each.items() if name != "data"},
                       "parameters": {**others, "binary_data_size": pieces[-1].nbytes}})
    return {**head, "inputs": inputs}, pieces
