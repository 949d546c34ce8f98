"""The CUDA driver, libcuda, through ctypes, with nothing to install: its calls, its errors, the GPUs that it finds.

NVIDIA's cuda-bindings would do the same; the few calls that serving needs are less than importing it costs.
"""
from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint
from typing import Any
from uuid import UUID

from engines.backends.device import GpuInfo

LIBRARY = "libcuda.so.1"
OLDEST = 11, 4                          # the first CUDA whose driver has cuGraphInstantiateWithFlags, and all the rest
_MAJOR, _MINOR = 75, 76                 # device attributes
_OUT_OF_MEMORY = 2
_NOT_TAKEN = (200, 209, 218, 221, 222, 223)     # invalid image, none for this GPU, invalid PTX; PTX, and no compiler of
                                                # it, PTX of a later version, none is to be compiled


class CudaError(Exception):
    """What the driver refused, or that there is none."""


class CudaMemoryError(CudaError):
    """The GPU has not so much memory left."""


class CudaCodeError(CudaError):
    """The driver does not take that code; in another form it may."""


_KINDS = {_OUT_OF_MEMORY: CudaMemoryError, **dict.fromkeys(_NOT_TAKEN, CudaCodeError)}


class Library:
    """libcuda. Raises CudaError, also where there is none."""

    def __init__(self, library: Any = None) -> None:
        """library: has its functions as attributes; None: libcuda itself."""
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaError(f"there is no NVIDIA driver here ({error})") from error
        self._process = os.getpid()
        self("cuInit", c_uint(0))

    def __call__(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise CudaError(f"the NVIDIA driver here is too old: it has no {name}") from error
        if status := function(*arguments):
            text = c_char_p()
            self._library.cuGetErrorString(c_int(status), byref(text))
            kind = _KINDS.get(status, CudaError)
            raise kind(f"{name}: {(text.value or b'?').decode()} ({status}){self._forked()}")

    def _forked(self) -> str:
        return "" if os.getpid() == self._process else (
            "; this process was forked from one that uses the GPU, which CUDA does not allow: start it by 'spawn'")

    def cuda_version(self) -> tuple[int, int]:
        """The version of CUDA that the driver came with."""
        version = c_int()
        self("cuDriverGetVersion", byref(version))
        return version.value // 1000, version.value % 1000 // 10

    def count(self) -> int:
        """Of its GPUs."""
        count = c_int()
        self("cuDeviceGetCount", byref(count))
        return count.value


def found_gpus() -> list[GpuInfo]:
    """The GPUs of this machine; none where there is no driver, or it refuses to start."""
    try:
        library = Library()
        return [info_of(library, number) for number in range(library.count())]
    except CudaError:
        return []


def info_of(library: Library, number: int) -> GpuInfo:
    """Raises CudaError: there is none of that number."""
    if not 0 <= number < library.count():
        raise CudaError(f"there is no GPU {number}: this machine has {library.count()}, counted from 0")
    device, name, memory = c_int(), ctypes.create_string_buffer(256), c_size_t()
    uuid = ctypes.create_string_buffer(16)
    library("cuDeviceGet", byref(device), c_int(number))
    library("cuDeviceGetName", name, c_int(len(name)), device)
    library("cuDeviceTotalMem_v2", byref(memory), device)
    library("cuDeviceGetUuid", uuid, device)
    major, minor = (_attribute(library, device, which) for which in (_MAJOR, _MINOR))
    return GpuInfo(number, name.value.decode(), f"sm_{major}{minor}", memory.value, f"GPU-{UUID(bytes=uuid.raw)}")


def _attribute(library: Library, device: c_int, number: int) -> int:
    value = c_int()
    library("cuDeviceGetAttribute", byref(value), c_int(number), device)
    return value.value
