"""Dtypes: which are floats to kernels, and those that numpy lacks.

A bfloat16 is the upper half of a float32; arrays in memory hold it as uint16, its bits. Floats of eight bits and fewer,
and integers of four and two, are bits of a byte each, the lowest ones: uint8. ml_dtypes gives numpy a dtype of each
name; only what builds plans needs it, and steps of the reference on such tensors.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engines.ir.graph import Array, TensorType

FLOAT = np.dtype(np.float32)
NARROW = ("float16", "bfloat16")        # floats of 16 bits
RARE = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn",
        "float6_e3m2fn", "float4_e2m1fn", "int4", "uint4", "int2", "uint2")     # which only the reference computes on
BITS: Mapping[str, str] = {"bfloat16": "uint16", **dict.fromkeys(RARE, "uint8")}    # how arrays hold what numpy lacks


def is_narrow(type_: TensorType) -> bool:
    """Whether the tensor's values are floats of 16 bits; in what they are stored is another question."""
    return type_.dtype.name in NARROW


def is_float(type_: TensorType) -> bool:
    """Whether kernels compute on the tensor's values as float32: those of 64 bits stay to the reference."""
    return type_.dtype == FLOAT or is_narrow(type_)


def is_rare(dtype: np.dtype[Any]) -> bool:
    return dtype.name in RARE


def integer_limits(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """The least and the greatest number of a type of integers; None for another type."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if "int" not in dtype.name or not is_rare(dtype):
        return None
    bits = int(dtype.name[-1])
    return (0, 2 ** bits - 1) if dtype.name.startswith("u") else (-2 ** (bits - 1), 2 ** (bits - 1) - 1)


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of tensors in a graph: ml_dtypes' where numpy has none."""
    if name not in BITS:
        return np.dtype(name)
    import ml_dtypes  # here, for a server that only runs plans does without

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def memory_dtype(name: str) -> np.dtype[Any]:
    """The dtype of the arrays that hold such elements in memory."""
    return np.dtype(BITS.get(name, name))


def as_in_memory(array: Array) -> Array:
    """An array of ml_dtypes' types as its bits; any other as it is."""
    if array.dtype.isbuiltin == 1:      # no type of ml_dtypes; to ask for a name takes numpy a microsecond
        return array
    bits = BITS.get(array.dtype.name)
    return array.view(bits) if bits else array


def as_named(array: Array, name: str) -> Array:
    """The inverse: bits in ml_dtypes' dtype of this name."""
    return array.view(dtype_named(name)) if name in BITS else array


def name_in_file(dtype: np.dtype[Any]) -> str:
    """For `dtype_in_file`: numpy's own text tells nothing of ml_dtypes' types."""
    return dtype.name if dtype.name in BITS else dtype.str


def dtype_in_file(name: str) -> np.dtype[Any]:
    """Raises TypeError or ValueError: none of numbers; never one of Python objects."""
    dtype = dtype_named(name)
    if dtype.hasobject:
        raise ValueError(f"dtype {name}")
    return dtype


def from_bfloat16(bits: Array) -> Array:
    """bfloat16, as uint16 -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(real: Array) -> Array:
    """float32 -> the nearest bfloat16, as uint16; halves to even, and NaN stays NaN, of the same sign."""
    bits = np.asarray(real, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(real), bits >> 16 | 0x40, nearest).astype(np.uint16)
