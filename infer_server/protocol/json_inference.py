"""JSON of an inference request over HTTP.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infer_server.errors import InvalidRequestError
from infer_server.protocol.parameters import MemoryReference, references_of


@dataclass(frozen=True)
class JsonTensor:
    """Input or requested output, as the JSON declares it."""
    name: str
    datatype: str = ""
    shape: Sequence[int] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None

    def name_and_parameters(self) -> tuple[str, Mapping[str, Any]]:
        """Return name and parameters."""
        return self.name, self.parameters


@dataclass(eq=False)
class Form:
    """JSON of a request. Requests that differ only in the binary tensors after the JSON share one."""
    head: Mapping[str, Any]
    is_cached: bool = False                     # True if it is cached for requests with equal JSON

    def __post_init__(self) -> None:
        """Parse the JSON. Raises InvalidRequestError if it is not an inference request."""
        self.id: str = typed(self.head, "id", str, "")
        self.parameters: dict[str, Any] = typed(self.head, "parameters", dict, {})
        self.inputs = _tensors(self.head, "inputs")
        self.outputs = _tensors(self.head, "outputs")
        self.encoder: Any = None                # encoder of the last request, if it can be reused

    def forget_values(self) -> None:
        """Drop the values of the inputs, which keep the body in memory."""
        self.head = {}
        self.inputs = [replace(tensor, data=None if tensor.data is None else ()) for tensor in self.inputs]

    @functools.cached_property
    def sizes(self) -> list[int | None]:
        """Size of each input in the binary data after the JSON; None if it is not there. Raises InvalidRequestError."""
        return [typed(tensor.parameters, "binary_data_size", int, None) for tensor in self.inputs]

    @functools.cached_property
    def references(self) -> Mapping[int, MemoryReference]:
        """References of the inputs in shared memory, by position. Raises InvalidRequestError."""
        return references_of(tensor.name_and_parameters() for tensor in self.inputs)


def _tensors(head: Mapping[str, Any], key: str) -> list[JsonTensor]:
    tensors = []
    for each in typed(head, key, list, []):
        tensor = as_object(each, f"an element of '{key}'")
        name = typed(tensor, "name", str, "")
        shape = typed(tensor, "shape", list, [])
        if not name:
            raise InvalidRequestError(f"an element of '{key}' has no name")
        if any(type(extent) is not int or extent < 0 for extent in shape):
            raise InvalidRequestError("Unable to parse 'shape': attempt to access JSON non-unsigned-integer as "
                                      f"unsigned-integer: the shape of '{name}' is {shape}")
        tensors.append(JsonTensor(name, typed(tensor, "datatype", str, ""), shape,
                                  typed(tensor, "parameters", dict, {}), tensor.get("data")))
    return tensors


def as_object(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{label} is not a JSON object")
    return value


def typed(head: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Return a member of a JSON object, or `default`. Raises InvalidRequestError for one of another type."""
    value = head.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        raise InvalidRequestError(f"'{key}': expected {kind.__name__}, got {type(value).__name__}")
    return value
