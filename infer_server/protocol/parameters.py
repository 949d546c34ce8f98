"""Parameters of requests, tensors and model loads: plain values by name, independent of the message."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from infer_server.errors import InvalidRequestError

Parameters = Mapping[str, Any]          # bool, int, float or str; from JSON also lists and objects
NONE: Parameters = MappingProxyType({})

_MAX_DIGITS = 20                        # digits of a 64-bit integer
_REGION, _BYTES, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_RESERVED = "triton_"
_TRITON_PARAMETERS = ("triton_enable_empty_final_response",)
_REQUEST_PARAMETERS = frozenset((*_TRITON_PARAMETERS, "sequence_id", "sequence_start", "sequence_end", "priority",
                                 "timeout", "binary_data_output"))


def from_messages(messages: Mapping[str, Any]) -> Parameters:
    """Return the values of a map<string, InferParameter> or a similar message; unset ones are omitted."""
    choices = ((name, message, message.WhichOneof("parameter_choice")) for name, message in messages.items())
    return {name: getattr(message, choice) for name, message, choice in choices if choice}


def set_parameter(message: Any, value: Any) -> None:
    """Set the value of an InferParameter. Raises InvalidRequestError for a value that it cannot hold."""
    fields = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param", bytes: "bytes_param"}
    field = fields.get(type(value), "")
    if field not in message.DESCRIPTOR.fields_by_name:
        raise InvalidRequestError(f"a parameter must be a string, a number or a boolean; got {type(value).__name__}")
    try:
        setattr(message, field, value)
    except ValueError as error:             # an integer of more than 64 bits
        raise InvalidRequestError(f"a parameter of {value}: {error}") from error


def typed(parameters: Parameters, name: str, kind: type, default: Any, prefix: str = "") -> Any:
    """Return the value of a parameter, or `default`.

    Raises
    ------
    InvalidRequestError
        The value is not of type `kind`; the message begins with `prefix`.
    """
    value = parameters.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise InvalidRequestError(f"{prefix}invalid value type for '{name}' parameter, expected {kind.__name__}, got "
                                  f"{type(value).__name__}")
    return value


def digits(text: str) -> int | None:
    """Parse a decimal number; return None if the text is not one or has too many digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def natural(parameters: Parameters, name: str, default: int = 0, prefix: str = "") -> int:
    """Return an integer parameter of 0 or more. Raises InvalidRequestError."""
    value: int = typed(parameters, name, int, default, prefix)
    if value < 0:
        raise InvalidRequestError(f"{prefix}invalid value for '{name}' parameter, expected >= 0, got {value}")
    return value


class MemoryReference(NamedTuple):
    """Reference to a tensor in shared memory."""
    region: str
    offset: int
    byte_size: int


def references_of(tensors: Iterable[tuple[str, Parameters]]) -> dict[int, MemoryReference]:
    """Return the references of tensors, given with names and parameters, by position. Raises InvalidRequestError."""
    references = {i: reference_of(*tensor) for i, tensor in enumerate(tensors) if tensor[1]}
    return {i: reference for i, reference in references.items() if reference}


def reference_of(tensor: str, parameters: Parameters) -> MemoryReference | None:
    """Return the reference of a tensor, or None if it is in the message. Raises InvalidRequestError."""
    prefix = f"'{tensor}': "
    region = typed(parameters, _REGION, str, None, prefix)
    if region is None:
        return None
    if _BYTES not in parameters:
        raise InvalidRequestError(
            f"'{_BYTES}' must be specified along with '{_REGION}' parameter for tensor '{tensor}'")
    return MemoryReference(region, natural(parameters, _OFFSET, 0, prefix), natural(parameters, _BYTES, 0, prefix))


def for_models(parameters: Parameters) -> Parameters:
    """Return the custom parameters, which are passed to models, without those that the server interprets."""
    return {name: value for name, value in parameters.items() if name not in _REQUEST_PARAMETERS}


def check_forwarded(headers: Iterable[str]) -> None:
    """Raise InvalidRequestError for a header whose name is reserved as a parameter."""
    for name in headers:
        if name in _REQUEST_PARAMETERS or name == "headers" or name.startswith(_RESERVED):
            raise InvalidRequestError(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")


def check_reserved(parameters: Parameters) -> None:
    """Raise InvalidRequestError for an unknown parameter with Triton's reserved prefix."""
    for name in parameters:
        if name.startswith(_RESERVED) and name not in _TRITON_PARAMETERS:
            raise InvalidRequestError(
                f"parameter keys starting with '{_RESERVED}' are reserved for Triton usage. Only the following keys "
                f"starting with '{_RESERVED}' are allowed: {' '.join(_TRITON_PARAMETERS)}; got '{name}'")
    typed(parameters, _TRITON_PARAMETERS[0], bool, False)
