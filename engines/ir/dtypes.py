"""Element types: which ones kernels treat as floats, and those that NumPy lacks.

bfloat16 is the upper half of a float32; arrays store it as uint16. Floats of eight bits or fewer, and integers of four
and two bits, are stored as uint8, in the low bits. ml_dtypes provides NumPy dtypes for them; only builds and fallback
steps on such tensors need it.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array, TensorType

FLOAT = np.dtype(np.float32)
NARROW = ("float16", "bfloat16")        # 16-bit floats
RARE = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn",
        "float6_e3m2fn", "float4_e2m1fn", "int4", "uint4", "int2", "uint2")     # supported by the reference only
BITS: Mapping[str, str] = {"bfloat16": "uint16", **dict.fromkeys(RARE, "uint8")}    # storage of dtypes that NumPy lacks


def is_narrow(type_: TensorType) -> bool:
    """Return True if the tensor's values are 16-bit floats, however they are stored."""
    return type_.dtype.name in NARROW


def is_float(type_: TensorType) -> bool:
    """Return True if kernels compute on the tensor's values as float32; float64 is left to the reference."""
    return type_.dtype == FLOAT or is_narrow(type_)


def is_rare(dtype: np.dtype[Any]) -> bool:
    return dtype.name in RARE


def integer_limits(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return the least and the greatest number of an integer dtype, or None for other dtypes."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if "int" not in dtype.name or not is_rare(dtype):
        return None
    bits = int(dtype.name[-1])
    return (0, 2 ** bits - 1) if dtype.name.startswith("u") else (-2 ** (bits - 1), 2 ** (bits - 1) - 1)


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of tensors in a graph, from ml_dtypes if NumPy lacks it."""
    if name not in BITS:
        return np.dtype(name)
    import ml_dtypes  # imported here: serving does not need it

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


@lru_cache(64)
def memory_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of arrays that store such elements."""
    return np.dtype(BITS.get(name, name))


def as_in_memory(array: Array) -> Array:
    """Return an array of an ml_dtypes type as its bits; other arrays unchanged."""
    if array.dtype.isbuiltin == 1:      # fast path: a dtype's name takes a microsecond
        return array
    bits = BITS.get(array.dtype.name)
    return array.view(bits) if bits else array


def as_named(array: Array, name: str) -> Array:
    """View bits as ml_dtypes' dtype of this name, the inverse of `as_in_memory`."""
    return array.view(dtype_named(name)) if name in BITS else array


def name_in_file(dtype: np.dtype[Any]) -> str:
    """Return the text of a dtype that `dtype_in_file` reads; NumPy's own is ambiguous for ml_dtypes."""
    return dtype.name if dtype.name in BITS else dtype.str


def dtype_in_file(name: str) -> np.dtype[Any]:
    """Parse a dtype. Raise TypeError or ValueError if it is unknown or holds Python objects."""
    dtype = dtype_named(name)
    if dtype.hasobject:
        raise ValueError(f"dtype {name}")
    return dtype


def from_bfloat16(bits: Array) -> Array:
    """Convert bfloat16, stored as uint16, to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(real: Array) -> Array:
    """Round float32 to bfloat16, stored as uint16: half to even; NaN keeps its sign."""
    bits = np.asarray(real, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(real), bits >> 16 | 0x40, nearest).astype(np.uint16)
