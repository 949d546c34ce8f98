"""Structures of the CUDA driver API."""
from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_ulonglong, c_void_p


class Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class RowCopy(ctypes.Structure):
    """CUDA_MEMCPY2D."""
    _fields_ = [(name, type_) for side in ("src", "dst") for name, type_ in (
        (f"{side}XInBytes", c_size_t), (f"{side}Y", c_size_t), (f"{side}MemoryType", c_int), (f"{side}Host", c_void_p),
        (f"{side}Device", c_ulonglong), (f"{side}Array", c_void_p), (f"{side}Pitch", c_size_t))
    ] + [("WidthInBytes", c_size_t), ("Height", c_size_t)]
