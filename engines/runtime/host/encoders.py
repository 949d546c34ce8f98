"""Encoders of strings, as tables of scikit-learn's exports begin with them: ai.onnx.ml's, by dictionaries.

Those of numbers are compiled (engines.frontend.operators.ml.features).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from engines.ir.graph import Array

Attrs = Mapping[str, Any]
Encode = Callable[..., tuple[Any, ...]]
_KINDS: Mapping[str, Any] = {"strings": object, "int64s": np.int64, "floats": np.float32}
_DEFAULTS: Mapping[str, Any] = {"strings": "_Unused", "int64s": -1, "floats": -0.0}


def _label_encoder(attrs: Attrs) -> Encode:
    keys, _ = _numbers(attrs, "keys")
    values, kind = _numbers(attrs, "values")
    given = attrs.get("default_tensor")
    usual = attrs.get(f"default_{kind[:-1]}", _DEFAULTS[kind]) if given is None else np.asarray(given).item()
    return _mapped(zip(keys, values, strict=True), _text(usual), _KINDS[kind] if given is None else given.dtype)


def _category_mapper(attrs: Attrs) -> Encode:
    names, numbers = [*map(_text, attrs["cats_strings"])], attrs["cats_int64s"]
    to_number = _mapped(zip(names, numbers, strict=True), attrs.get("default_int64", -1), np.dtype(np.int64))
    to_name = _mapped(zip(numbers, names, strict=True), _text(attrs.get("default_string", "_Unused")), np.dtype(object))
    return lambda x: to_number(x) if x.dtype.kind in "OU" else to_name(x)


def _mapped(pairs: Iterable[tuple[Any, Any]], usual: Any, dtype: Any) -> Encode:
    table: dict[Any, Any] = {}
    for key, value in pairs:
        table.setdefault(key, value)        # of equal keys the first one counts

    def encode(x: Array) -> tuple[Array, ...]:
        made = np.empty(x.size, dtype)
        made[:] = [table.get(value, usual) for value in x.reshape(-1).tolist()]
        return (made.reshape(x.shape),)
    return encode


def _one_hot_encoder(attrs: Attrs) -> Encode:
    categories = attrs.get("cats_strings") or attrs["cats_int64s"]
    places = {_text(category): place for place, category in enumerate(categories)}
    rows = np.concatenate([np.eye(len(places), dtype=np.float32), np.zeros((1, len(places)), np.float32)])
    unknown, may_be_unknown = len(places), attrs.get("zeros", 1)

    def encode(x: Array) -> tuple[Array, ...]:
        found = [places.get(value, unknown) for value in x.reshape(-1).tolist()]
        if not may_be_unknown and unknown in found:
            raise ValueError(f"{x.reshape(-1)[found.index(unknown)]!r} is none of its categories, and `zeros` is 0")
        return (rows.take(found, 0).reshape(*x.shape, len(places)),)
    return encode


def _columns(attrs: Attrs) -> Encode:
    return lambda x, places: (np.atleast_2d(x).take(places.reshape(-1), -1),)


def _numbers(attrs: Attrs, which: str) -> tuple[list[Any], str]:
    """The keys or the values, and of which kind they are; in one of the attributes that may hold them."""
    if (tensor := attrs.get(f"{which}_tensor")) is not None:
        kind = {"f": "floats", "i": "int64s"}.get(tensor.dtype.kind, "strings")
        return [*map(_text, np.asarray(tensor).reshape(-1).tolist())], kind
    kind = next(kind for kind in _KINDS if attrs.get(f"{which}_{kind}"))
    return [*map(_text, attrs[f"{which}_{kind}"])], kind


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


# Given the attributes, they make what encodes.
ENCODERS: Mapping[str, Callable[[Attrs], Encode]] = {
    "ArrayFeatureExtractor": _columns, "CategoryMapper": _category_mapper, "LabelEncoder": _label_encoder,
    "OneHotEncoder": _one_hot_encoder}
