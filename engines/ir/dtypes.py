"""Dtypes: which are floats to kernels, and bfloat16, which numpy lacks.

A bfloat16 is the upper half of a float32; arrays in memory hold it as uint16, its bits. ml_dtypes gives numpy a dtype
of that name; only what builds plans needs it.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from engines.ir.graph import Array, TensorType

FLOAT = np.dtype(np.float32)
NARROW = ("float16", "bfloat16")        # floats of 16 bits


def is_narrow(type_: TensorType) -> bool:
    """Whether the tensor's values are floats of 16 bits; in what they are stored is another question."""
    return type_.dtype.name in NARROW


def is_float(type_: TensorType) -> bool:
    """Whether kernels compute on the tensor's values as float32: those of 64 bits stay to the reference."""
    return type_.dtype == FLOAT or is_narrow(type_)


def bfloat16() -> np.dtype[Any]:
    """numpy's dtype of that name, as ml_dtypes has it."""
    import ml_dtypes  # here, for a server that only runs plans does without

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of tensors in a graph."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def memory_dtype(name: str) -> np.dtype[Any]:
    """The dtype of the arrays that hold such elements in memory."""
    return np.dtype("uint16" if name == "bfloat16" else name)


def as_in_memory(array: Array) -> Array:
    """ml_dtypes' bfloat16 as its bits; any other array as it is."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def from_bfloat16(bits: Array) -> Array:
    """bfloat16, as uint16 -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(real: Array) -> Array:
    """float32 -> the nearest bfloat16, as uint16; halves to even, and NaN stays NaN, of the same sign."""
    bits = np.asarray(real, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(real), bits >> 16 | 0x40, nearest).astype(np.uint16)
