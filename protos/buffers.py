"""Byte buffers whose memory is not initialised."""
from __future__ import annotations

import ctypes

_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_bytearray.argtypes, _bytearray.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object


def uninitialised(size: int) -> bytearray:
    """Return a bytearray of `size` bytes with arbitrary contents: pages that nothing is written to take no memory."""
    buffer: bytearray = _bytearray(None, size)
    return buffer
