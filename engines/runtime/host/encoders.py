"""Encoders of strings, as tables of scikit-learn's exports begin with them: ai.onnx.ml's, by dictionaries.

Those of numbers are compiled (infer_server.engines.frontend.operators.ml.features).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from infer_server.engines.errors import PlanError
from infer_server.engines.ir.graph import Array, Node

Attrs = Mapping[str, Any]
Encode = Callable[..., tuple[Any, ...]]
NAN_IS_A_KEY = 4        # the opset of ai.onnx.ml from which on a NaN is told by a key that is one
_KINDS: Mapping[str, Any] = {"strings": object, "int64s": np.int64, "floats": np.float32}
_DEFAULTS: Mapping[str, Any] = {"strings": "_Unused", "int64s": -1, "floats": -0.0}


def _label_encoder(attrs: Attrs) -> Encode:
    if "classes_strings" in attrs:      # as the first version has it: classes by their places, or the other way
        names = [*map(_text, attrs["classes_strings"])]
        return _either_way(names, range(len(names)), attrs)
    keys, _, _ = _table(attrs, "keys")
    values, kind, dtype = _table(attrs, "values")
    given = attrs.get("default_tensor")
    usual = attrs.get(f"default_{kind[:-1]}", _DEFAULTS[kind]) if given is None else np.asarray(given).item()
    if attrs.get("onnx_opset", 0) >= NAN_IS_A_KEY:
        keys = [*map(_key, keys)]
    return _mapped(_firsts(keys, values), _text(usual), dtype)


def _category_mapper(attrs: Attrs) -> Encode:
    return _either_way([*map(_text, attrs["cats_strings"])], attrs["cats_int64s"], attrs)


def _either_way(names: Sequence[str], numbers: Sequence[int], attrs: Attrs) -> Encode:
    """Return a mapper between names and numbers in both directions; of duplicates the last one wins, as in ORT."""
    to_number = _mapped(dict(zip(names, numbers, strict=True)), attrs.get("default_int64", -1), np.int64)
    to_name = _mapped(dict(zip(numbers, names, strict=True)), _text(attrs.get("default_string", "_Unused")), object)
    return lambda x: to_number(x) if x.dtype.kind in "OU" else to_name(x)


def _firsts(keys: Sequence[Any], values: Sequence[Any]) -> dict[Any, Any]:
    """Return a dict of keys and values; of duplicate keys the first one wins, as in ONNX Runtime."""
    return dict(reversed([*zip(keys, values, strict=True)]))


def _key(value: Any) -> Any:
    """Return the lookup key of a value: None for NaN, which does not equal itself."""
    return value if value == value else None


def _mapped(table: Mapping[Any, Any], usual: Any, dtype: Any) -> Encode:
    def encode(x: Array) -> tuple[Array, ...]:
        made = np.empty(x.size, dtype)
        values = x.reshape(-1).tolist()
        made[:] = [table.get(value, usual) for value in (map(_key, values) if None in table else values)]
        return (made.reshape(x.shape),)
    return encode


def _one_hot_encoder(attrs: Attrs) -> Encode:
    categories = [*map(_text, attrs.get("cats_strings") or attrs["cats_int64s"])]
    unknown, may_be_unknown = len(categories), attrs.get("zeros", 1)
    indices = {category: index for index, category in enumerate(categories)}    # of equal ones the last, as there
    rows = np.eye(unknown + 1, unknown, dtype=np.float32)                       # the last one is of no category

    def encode(x: Array) -> tuple[Array, ...]:
        found = [indices.get(value, unknown) for value in x.reshape(-1).tolist()]
        if not may_be_unknown and unknown in found:
            raise ValueError(f"{x.reshape(-1)[found.index(unknown)]!r} is none of its categories, and `zeros` is 0")
        return (rows.take(found, 0).reshape(*x.shape, unknown),)
    return encode


def categories_of(node: Node) -> list[str]:
    """List the strings that an encoder knows; [] for a node that encodes none."""
    names = ("cats_strings", "keys_strings", "classes_strings")
    words = next((node.attrs[name] for name in names if node.attrs.get(name)), node.attrs.get("keys_tensor", ()))
    return [word for word in map(_text, np.asarray(words, object).reshape(-1).tolist()) if isinstance(word, str)]


def _columns(attrs: Attrs) -> Encode:
    return lambda x, indices: (np.atleast_2d(x).take(indices.reshape(-1), -1),)


def _table(attrs: Attrs, which: str) -> tuple[list[Any], str, Any]:
    """Return the keys or the values of a LabelEncoder with their kind and dtype. Raises PlanError if it has none."""
    if (tensor := attrs.get(f"{which}_tensor")) is not None:
        kind = {"f": "floats", "i": "int64s"}.get(tensor.dtype.kind, "strings")
        dtype = object if kind == "strings" else tensor.dtype
        return [*map(_text, np.asarray(tensor).reshape(-1).tolist())], kind, dtype
    for kind, dtype in _KINDS.items():
        if found := attrs.get(f"{which}_{kind}"):
            return [*map(_text, found)], kind, dtype
    raise PlanError(f"a LabelEncoder has no {which}")


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


# Factories that return the encoding function for a node's attributes.
ENCODERS: Mapping[str, Callable[[Attrs], Encode]] = {
    "ArrayFeatureExtractor": _columns, "CategoryMapper": _category_mapper, "LabelEncoder": _label_encoder,
    "OneHotEncoder": _one_hot_encoder}
