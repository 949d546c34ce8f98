"""CUDA driver library (libcuda) through ctypes: calls, errors, and the list of GPUs.

The few calls that serving needs cost less than importing NVIDIA's cuda-bindings.
"""
from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint
from typing import Any
from uuid import UUID

from infer_server.engines.backends.device import GpuInfo

LIBRARY = "libcuda.so.1"
OLDEST = 11, 4                          # first CUDA with cuGraphInstantiateWithFlags and all other calls
_MAJOR, _MINOR = 75, 76                 # device attributes
_OUT_OF_MEMORY = 2
_NOT_TAKEN = (200, 209, 218, 221, 222, 223)     # INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, JIT_COMPILER_NOT_FOUND,
                                                # UNSUPPORTED_PTX_VERSION, JIT_COMPILATION_DISABLED


class CudaError(Exception):
    """Error of the driver, or a missing driver."""


class CudaMemoryError(CudaError):
    """The GPU's or the host's memory is exhausted."""


class CudaCodeError(CudaError):
    """The driver rejects this form of the code; another form may load."""


_KINDS = {_OUT_OF_MEMORY: CudaMemoryError, **dict.fromkeys(_NOT_TAKEN, CudaCodeError)}


class Library:
    """The libcuda library. Calling it by name raises CudaError on failure or if there is no driver."""

    def __init__(self, library: Any = None) -> None:
        """Load libcuda, or use `library`, an object with its functions as attributes."""
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaError(f"no NVIDIA driver is installed ({error})") from error
        self._process = os.getpid()
        self("cuInit", c_uint(0))

    def __call__(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise CudaError(f"the NVIDIA driver is too old: it lacks {name}; update it") from error
        if status := function(*arguments):
            text = c_char_p()
            self._library.cuGetErrorString(c_int(status), byref(text))
            kind = _KINDS.get(status, CudaError)
            raise kind(f"{name}: {(text.value or b'?').decode()} ({status}){self._forked()}")

    def _forked(self) -> str:
        return "" if os.getpid() == self._process else (
            "; CUDA cannot be used in a process forked from one that uses the GPU: use the start method 'spawn'")

    def cuda_version(self) -> tuple[int, int]:
        """Return the version of CUDA that the driver supports, as (major, minor)."""
        version = c_int()
        self("cuDriverGetVersion", byref(version))
        return version.value // 1000, version.value % 1000 // 10

    def count(self) -> int:
        """Return the number of GPUs."""
        count = c_int()
        self("cuDeviceGetCount", byref(count))
        return count.value


def list_gpus() -> list[GpuInfo]:
    """Return the GPUs of this machine, none if there is no driver or it does not start."""
    try:
        library = Library()
        return [info_of(library, number) for number in range(library.count())]
    except CudaError:
        return []


def info_of(library: Library, number: int) -> GpuInfo:
    """Return the properties of a GPU. Raise CudaError if its index is out of range."""
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
