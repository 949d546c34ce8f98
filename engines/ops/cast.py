"""Conversions between element types."""
from __future__ import annotations

from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.dtypes import dtype_named, is_rare
from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.ir.symbolic import is_symbolic
from infer_server.engines.ops.op import Stored
from infer_server.engines.ops.pointwise import Pointwise

_LIMITS = {"float8_e4m3fn": 448, "float8_e4m3fnuz": 240, "float8_e5m2": 57344, "float8_e5m2fnuz": 57344}


class Cast(Pointwise):
    """Conversion to the dtype `to`.

    saturate: numbers beyond a float8 become its largest one, else infinity, or NaN without infinities. round_mode:
    rounding of float8_e8m0fnu to powers of two, "up", "down" or "nearest".
    """
    symbolic = True
    stored = Stored.CONVERTED       # between floats only

    @classmethod
    def result_dtype(cls, node: Node, dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
        return dtype_named(node.attrs["to"])

    @staticmethod
    def formula(x: Array, to: str, saturate: int = 1, round_mode: str = "up") -> Array:
        kind = dtype_named(to)
        if x.dtype == object:
            return np.asarray(np.frompyfunc(lambda v: _symbolic_cast(v, kind), 1, 1)(x), object)
        if is_rare(x.dtype):
            x = x.astype(np.float32)        # exact
        if to == "float8_e8m0fnu":
            return _power_of_two(x.astype(np.float32), bool(saturate), round_mode).view(kind)
        return narrowed(x, kind, bool(saturate))


class BitCast(Pointwise):
    """Reinterpretation of the bits as the dtype `to`, of equal width."""

    @classmethod
    def result_dtype(cls, node: Node, dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
        kind = dtype_named(node.attrs["to"])
        if kind.itemsize != dtypes[0].itemsize:
            raise GraphError(f"{dtypes[0]} cannot be reinterpreted as {kind}, which has another width")
        return kind

    @staticmethod
    def formula(x: Array, to: str) -> Array:
        return x.view(dtype_named(to))


def narrowed(x: Array, kind: np.dtype[Any], saturate: bool) -> Array:
    """Convert x to another dtype; with `saturate` within the range of a float8."""
    if saturate and (limit := _LIMITS.get(kind.name)):
        x = np.clip(x, -limit, limit)
    return x.astype(kind)


def _power_of_two(x: Array, saturate: bool, mode: str) -> Array:
    """Round |x| to exponents of float32, which is what float8_e8m0fnu stores."""
    bits = x.view(np.uint32)
    exponent, rest = bits >> 23 & 0xFF, bits & 0x7FFFFF
    half = 0x400000
    up = {"up": rest > 0, "down": np.zeros_like(rest, bool),
          "nearest": (rest > half) | (rest == half) & (exponent > 0)}[mode]
    rounded = np.minimum(exponent + up, 0xFE if saturate else 0xFF)
    return np.where(exponent == 0xFF, exponent, rounded).astype(np.uint8)


def _symbolic_cast(value: Any, kind: np.dtype[Any]) -> Any:
    """Cast a symbolic element. Extents are integers in every dtype; numbers become Python ints or floats."""
    if not isinstance(value, int | float) or is_symbolic(value) and kind.kind in "iu":
        return value
    return float(value) if kind.kind == "f" else int(value)
