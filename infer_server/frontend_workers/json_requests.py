"""Conversion of HTTP inference requests with JSON tensors to binary tensors, in a frontend worker.

Parsing the JSON of a picture takes tens of milliseconds, which the engine process saves. Requests that cannot be
converted are forwarded unchanged, so that errors are reported in one place.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from infer_server.endpoints.http.messages import HttpRequest
from infer_server.errors import InvalidRequestError, TooLargeError
from infer_server.protocol.json_documents import LARGE_BYTES, read_inference
from infer_server.protocol.json_values import JsonArray, Steps, parsed

_WORTHWHILE_BYTES = 2 << 10         # smaller JSON is parsed as quickly as its binary form
_MAX_INPUTS = 64                    # maximum number of inputs of a request that is converted
_LENGTH = "inference-header-content-length"
_NO_REQUEST = (InvalidRequestError, TooLargeError, KeyError, TypeError, ValueError, AttributeError)


def is_worthwhile(request: HttpRequest) -> bool:
    """Return True for an inference request with JSON tensors, unless it is small."""
    return (len(request.body) >= _WORTHWHILE_BYTES and _LENGTH not in request.headers and request.method == "POST"
            and request.path.endswith("/infer"))


def with_bytes(request: HttpRequest, hold: Callable[[int], None]) -> Steps[HttpRequest]:
    """Return a request with its inputs as bytes after the JSON, or unchanged if it cannot be converted.

    hold: called to count the bytes of the inputs; may raise.
    """
    body = request.body
    try:
        document = (yield from read_inference(body, len(body), hold)) if len(body) > LARGE_BYTES else parsed(body)
        head, pieces = yield from _split_values(document, hold)
    except _NO_REQUEST:
        return request
    text = json.dumps(head).encode()
    return request._replace(body=b"".join((text, *pieces)),
                            headers={**request.headers, _LENGTH: str(len(text))})


def _split_values(head: Any, hold: Callable[[int], None]) -> Steps[tuple[dict[str, Any], list[memoryview]]]:
    """Return a request with the sizes of its inputs instead of their values, and the values as bytes."""
    from infer_server.protocol.codec import declared_inputs, encode_raw  # here: workers rarely need numpy
    from infer_server.protocol.json_tensors import from_json, read_values
    declared = head["inputs"]
    if len(declared) > _MAX_INPUTS or any(type(extent) is not int for each in declared for extent in each["shape"]):
        raise TypeError("a shape is no list of integers")
    tensors = declared_inputs(SimpleNamespace(name=each["name"], datatype=each["datatype"], shape=each["shape"])
                              for each in declared)
    inputs, pieces = [], []
    for each, tensor in zip(declared, tensors, strict=True):
        parameters = {} if each.get("parameters") is None else each["parameters"]
        if parameters.keys() & {"binary_data_size", "shared_memory_region"}:
            raise ValueError("its values are elsewhere")
        data = each["data"]
        array = (yield from read_values(tensor, data, hold)) if isinstance(data, JsonArray) else from_json(tensor, data)
        pieces.append(encode_raw(array, tensor.datatype))
        inputs.append({**{name: value for name, value in each.items() if name != "data"},
                       "parameters": {**parameters, "binary_data_size": pieces[-1].nbytes}})
    return {**head, "inputs": inputs}, pieces
