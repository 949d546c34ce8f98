"""Conversion of dataclasses to and from JSON by their annotations, without pickle.

A value of another type than its annotation raises FieldError, which names the field: "steps[3].rows: ...". The
annotation decides how a JSON value is read:

    bool, str, None     unchanged
    int                 64 bits; true and false are rejected
    float               a float or an int
    tuple, Mapping      members as annotated; a Mapping's keys are str
    a dataclass         an object with its fields; fields with a default may be absent, unknown ones are rejected
    a union             the member that the JSON type matches
    Any                 unchecked
"""
from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np

_LEAST, _MOST = -1 << 63, (1 << 63) - 1

Decode = Callable[[Any], Any]
_ByType = dict[type, Decode]            # type of the JSON value -> its decoder


class FieldError(ValueError):
    """Value that does not match its field's annotation. `path` locates it: ".steps[3].rows"."""

    def __init__(self, what: str) -> None:
        self.what, self.path = what, ""

    def at(self, step: str) -> FieldError:
        """Prepend a step to the path and return the error itself."""
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        return f"{self.path.removeprefix('.')}: {self.what}" if self.path else self.what


def to_plain(value: Any) -> Any:
    """Convert a dataclass, mapping, set or NumPy scalar to what json can write (json.dumps' `default`).

    Raises TypeError for other types.
    """
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
    """Return the decoded fields of a dataclass that `content` has, by name. Raises FieldError."""
    decoders = _decoders(cls)
    found: dict[str, Any] = {}
    for name, value in content.items():
        decode = decoders.get(name)
        if decode is None:
            raise FieldError(f"a {cls.__name__} has no field '{name}'")
        try:
            found[name] = decode(value)
        except FieldError as error:
            raise error.at(f".{name}") from None
    return found


def read_record(cls: type, content: Mapping[str, Any]) -> Any:
    """Return an instance of the dataclass `cls` decoded from a JSON object. Raises FieldError."""
    return _record(cls)(content)


@cache
def _decoders(cls: type) -> dict[str, Decode]:
    hints = typing.get_type_hints(cls)
    return {f.name: _decoder(hints[f.name]) for f in dataclasses.fields(cls)}


def _record(cls: type) -> Decode:
    needed = frozenset(f.name for f in dataclasses.fields(cls)
                       if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)

    def decode(value: Mapping[str, Any]) -> Any:
        fields = from_plain(cls, value)
        if not needed <= fields.keys():
            raise FieldError(f"a {cls.__name__} without '{min(needed - fields.keys())}'")
        return cls(**fields)

    return decode


def _decoder(hint: Any) -> Decode:
    """Return the decoder of an annotation."""
    if hint is Any:
        return _identity
    if hint is int:
        return _int         # by far the most frequent: skip the lookup by type
    return partial(_by_type, _table(hint), _name(hint))


def _by_type(table: _ByType, expected: str, value: Any) -> Any:
    decode = table.get(type(value))
    if decode is None:
        raise FieldError(f"{_shown(value)} is no {expected}")
    return decode(value)


def _table(hint: Any) -> _ByType:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {kind: decode for member in arguments for kind, decode in _table(member).items()}
    if origin is tuple:
        several = arguments[-1] is Ellipsis
        return {list: partial(_tuple, _decoder(arguments[0])) if several
                else partial(_fixed_tuple, tuple(map(_decoder, arguments)))}
    if isinstance(origin, type) and issubclass(origin, Mapping):      # NDArray may be a TypeAliasType, no class
        return {dict: partial(_mapping, _decoder(arguments[1]))}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return {dict: _record(hint)}
    if hint is float:
        return {float: _identity, int: _int}
    return {hint: _int if hint is int else _identity}


def _tuple(inner: Decode, value: list[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    try:
        for item in value:
            found.append(inner(item))
    except FieldError as error:
        raise error.at(f"[{len(found)}]") from None
    return tuple(found)


def _fixed_tuple(inners: tuple[Decode, ...], value: list[Any]) -> tuple[Any, ...]:
    if len(value) != len(inners):
        raise FieldError(f"{_shown(value)} has not {len(inners)} members")
    return tuple(inner(item) for inner, item in zip(inners, value, strict=True))


def _mapping(inner: Decode, value: dict[str, Any]) -> dict[str, Any]:
    if inner is _identity:
        return value
    found = {}
    for key, item in value.items():
        try:
            found[key] = inner(item)
        except FieldError as error:
            raise error.at(f"['{key}']") from None
    return found


def _int(value: Any) -> int:
    if type(value) is not int or not _LEAST <= value <= _MOST:
        raise FieldError(f"{_shown(value)} is no int")
    return value


def _identity(value: Any) -> Any:
    return value


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _shown(value: Any) -> str:
    """Return the value's repr, at most 60 characters of it."""
    text = repr(value) if not isinstance(value, int) or abs(value) <= _MOST else "a number of more than 64 bits"
    return text if len(text) <= 60 else f"{text[:57]}..."
