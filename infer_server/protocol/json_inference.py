"""The JSON of an inference request over HTTP, as a message.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infer_server.errors import InvalidRequestError
from infer_server.protocol.parameters import Reference, references_of


@dataclass(frozen=True)
class JsonTensor:
    """An input or a requested output, as the JSON has it."""
    name: str
    datatype: str = ""
    shape: Sequence[int] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    data: Any = None

    def asked(self) -> tuple[str, Mapping[str, Any]]:
        """Return what is asked of it beside its values."""
        return self.name, self.parameters


@dataclass(eq=False)
class Form:
    """The JSON of a request. Requests that differ only in the tensors behind the JSON share one."""
    head: Mapping[str, Any]
    is_kept: bool = False                       # it may come again

    def __post_init__(self) -> None:
        """Raises InvalidRequestError: it is no inference request."""
        self.id: str = typed(self.head, "id", str, "")
        self.parameters: dict[str, Any] = typed(self.head, "parameters", dict, {})
        self.inputs = _tensors(self.head, "inputs")
        self.outputs = _tensors(self.head, "outputs")
        self.encoder: Any = None                # of the last request, if another may have the same

    def forget_values(self) -> None:
        """Drop the values of the inputs, with which the body that they are in stays in memory."""
        self.head = {}
        self.inputs = [replace(tensor, data=None if tensor.data is None else ()) for tensor in self.inputs]

    @functools.cached_property
    def sizes(self) -> list[int | None]:
        """Return the size of each input in the bytes behind the JSON, or None if it is not there. Raises
        InvalidRequestError."""
        return [typed(tensor.parameters, "binary_data_size", int, None) for tensor in self.inputs]

    @functools.cached_property
    def references(self) -> Mapping[int, Reference]:
        """The inputs that lie in shared memory, by their positions. Raises InvalidRequestError."""
        return references_of(tensor.asked() for tensor in self.inputs)


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


def as_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} is no JSON object")
    return value


def typed(head: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """A member of a JSON object. Raises InvalidRequestError for one of another kind."""
    value = head.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        raise InvalidRequestError(f"'{key}': expected {kind.__name__}, got {type(value).__name__}")
    return value
