"""Dataclasses <-> JSON: written by field, read by annotation. No pickle, nothing that executes."""
from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np


def to_plain(value: Any) -> Any:
    """What json cannot write by itself: dataclasses (by field), mappings, sets, numpy's numbers. Else TypeError."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a plan cannot hold a {type(value).__name__}: {value!r}")


def from_plain(cls: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """Field name -> value. Raises KeyError for a field that the class does not have."""
    decoders = _decoders(cls)
    return {name: decoders[name](value) for name, value in content.items()}


@cache
def _decoders(cls: type) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return {f.name: _decoder(hints[f.name]) for f in dataclasses.fields(cls)}


def _record_decoder(cls: type) -> Callable[[Any], Any]:
    """Most of a plan is small records of numbers: only the fields that JSON does not give as they are get a look."""
    decoders = [(name, decode) for name, decode in _decoders(cls).items() if decode is not _same]

    return lambda value: cls(**value | {name: decode(value[name]) for name, decode in decoders if name in value})


def _decoder(hint: Any) -> Callable[[Any], Any]:
    """JSON knows lists, not tuples, and no dataclasses: what undoes that for a value of this type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record_decoder(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        inner = _decoder(arguments[0])
        return tuple if inner is _same else lambda value: tuple(inner(v) for v in value)
    if origin is tuple:
        inners = [_decoder(argument) for argument in arguments]
        return lambda value: tuple(inner(v) for inner, v in zip(inners, value, strict=True))
    return _same


def _union_decoder(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    """A union has at most one member that needs decoding here, and JSON writes that one as an object."""
    inner = next((decode for decode in map(_decoder, arguments) if decode is not _same), _same)
    return lambda value: inner(value) if isinstance(value, dict) else value


def _same(value: Any) -> Any:
    return value
