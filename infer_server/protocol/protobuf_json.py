"""Convert messages of the protocol to JSON with the names of the .proto, every field, and 64-bit integers as numbers.

json_format itself writes those as strings, which neither clients of Triton's HTTP endpoint nor Python models expect.
"""
from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = frozenset({FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64})


def to_json(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object."""
    written: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_numbers(written, message.DESCRIPTOR)


def _with_numbers(written: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    """Convert 64-bit integers, from strings, in the JSON object of a message with this descriptor."""
    fields = descriptor.fields_by_name
    return {name: _value(value, fields[name]) for name, value in written.items()}


def _value(value: Any, field: Any) -> Any:
    if isinstance(value, dict) and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _value(each, inner) for key, each in value.items()}
    if isinstance(value, list):
        return [_value(each, field) for each in value]
    if isinstance(value, dict):
        return _with_numbers(value, field.message_type)
    return int(value) if field.cpp_type in _INTEGERS else value
