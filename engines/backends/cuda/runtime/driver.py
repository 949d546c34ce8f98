"""The CUDA driver, libcuda, through ctypes: all that serving needs of it, with nothing to install.

NVIDIA's cuda-bindings would do the same; these few calls are less than importing it costs. Names and arguments: the
CUDA driver API. It has not run on a GPU yet; the tests' emulated GPU has the same words.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import Any, Protocol

import numpy as np

from engines.ir.graph import Array

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76                 # device attributes
_MAX_DYNAMIC_SHARED = 8                 # function attribute
_MOST_WITHOUT_ASKING = 48 << 10         # bytes of shared memory
_CAPTURE_THREAD_LOCAL, _NON_BLOCKING = 1, 1
_OUT_OF_MEMORY = 2


class CudaError(Exception):
    """What the driver refused, or that there is none."""


class CudaMemoryError(CudaError):
    """The GPU has not so much memory left."""


class Stream(Protocol):
    """What is put into it runs in order."""

    def launch(self, function: Any, grid: tuple[int, int], threads: int, addresses: Sequence[int], rows: int,
               shared_bytes: int) -> None: ...

    def copy_in(self, address: int, host: Array) -> None: ...

    def copy_out(self, host: Array, address: int) -> None: ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` puts into the stream, to be launched as one (a CUDA graph)."""

    def wait(self) -> None: ...

    def close(self) -> None: ...


class GpuDriver(Protocol):
    """A GPU as the runtime uses it."""
    @property
    def architecture(self) -> str: ...

    def use(self) -> None:
        """Make it the calling thread's."""

    def allocate(self, size: int) -> int:
        """Zeroed. Raises CudaMemoryError."""

    def free(self, address: int) -> None: ...

    def pinned(self, size: int) -> Array:
        """Bytes of the host that copies go from and to without a stop, until they are given to `unpin`."""

    def unpin(self, memory: Array) -> None: ...

    def write(self, address: int, array: Array) -> None: ...

    def load(self, code: bytes) -> Any:
        """A module of a cubin or of PTX."""

    def function(self, module: Any, name: str, shared_bytes: int) -> Any: ...

    def stream(self) -> Stream: ...


class Library:
    """libcuda. Raises CudaError, also where there is none."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaError(f"there is no NVIDIA driver here ({error})") from error
        self("cuInit", c_uint(0))

    def __call__(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            text = c_char_p()
            self._library.cuGetErrorString(c_int(status), byref(text))
            kind = CudaMemoryError if status == _OUT_OF_MEMORY else CudaError
            raise kind(f"{name}: {(text.value or b'?').decode()} ({status})")


class CudaGpu:
    """A GPU with its primary context."""

    def __init__(self, index: int = 0) -> None:
        self.driver, self._device, self._context = Library(), c_int(), c_void_p()
        self.driver("cuDeviceGet", byref(self._device), c_int(index))
        self.driver("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._pinned: dict[int, c_void_p] = {}
        self.use()

    def use(self) -> None:
        self.driver("cuCtxSetCurrent", self._context)

    def _attribute(self, number: int) -> int:
        value = c_int()
        self.driver("cuDeviceGetAttribute", byref(value), c_int(number), self._device)
        return value.value

    @property
    def architecture(self) -> str:
        return f"sm_{self._attribute(_MAJOR)}{self._attribute(_MINOR)}"

    # ---- memory
    def allocate(self, size: int) -> int:
        address, size = c_ulonglong(), max(size, 1)
        self.driver("cuMemAlloc_v2", byref(address), c_size_t(size))
        self.driver("cuMemsetD8_v2", address, ctypes.c_ubyte(0), c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self.driver("cuMemFree_v2", c_ulonglong(address))

    def pinned(self, size: int) -> Array:
        address, size = c_void_p(), max(size, 1)
        self.driver("cuMemHostAlloc", byref(address), c_size_t(size), c_uint(0))
        memory = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_ubyte)), (size,))
        self._pinned[memory.ctypes.data] = address
        memory[:] = 0
        return memory

    def unpin(self, memory: Array) -> None:
        self.driver("cuMemFreeHost", self._pinned.pop(memory.ctypes.data))

    def write(self, address: int, array: Array) -> None:
        array = np.ascontiguousarray(array)
        self.driver("cuMemcpyHtoD_v2", c_ulonglong(address), c_void_p(array.ctypes.data), c_size_t(array.nbytes))

    # ---- code
    def load(self, code: bytes) -> c_void_p:
        module = c_void_p()
        self.driver("cuModuleLoadData", byref(module), code if code[:4] == b"\x7fELF" else code + b"\0")
        return module

    def function(self, module: c_void_p, name: str, shared_bytes: int) -> c_void_p:
        function = c_void_p()
        self.driver("cuModuleGetFunction", byref(function), module, name.encode())
        if shared_bytes > _MOST_WITHOUT_ASKING:
            self.driver("cuFuncSetAttribute", function, c_int(_MAX_DYNAMIC_SHARED), c_int(shared_bytes))
        return function

    def stream(self) -> Stream:
        return CudaStream(self)


class CudaStream:
    def __init__(self, gpu: CudaGpu) -> None:
        self._driver, self._handle = gpu.driver, c_void_p()
        self._driver("cuStreamCreate", byref(self._handle), c_uint(_NON_BLOCKING))

    def launch(self, function: c_void_p, grid: tuple[int, int], threads: int, addresses: Sequence[int], rows: int,
               shared_bytes: int) -> None:
        arguments = [*map(c_ulonglong, addresses), c_uint(rows)]
        table = (c_void_p * len(arguments))(*(ctypes.cast(ctypes.pointer(a), c_void_p) for a in arguments))
        one = c_uint(1)
        self._driver("cuLaunchKernel", function, *map(c_uint, grid), one, c_uint(threads), one, one,
                     c_uint(shared_bytes), self._handle, table, None)

    def copy_in(self, address: int, host: Array) -> None:
        self._driver("cuMemcpyHtoDAsync_v2", c_ulonglong(address), c_void_p(host.ctypes.data), c_size_t(host.nbytes),
                     self._handle)

    def copy_out(self, host: Array, address: int) -> None:
        self._driver("cuMemcpyDtoHAsync_v2", c_void_p(host.ctypes.data), c_ulonglong(address), c_size_t(host.nbytes),
                     self._handle)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        driver, graph, ready = self._driver, c_void_p(), c_void_p()
        driver("cuStreamBeginCapture_v2", self._handle, c_int(_CAPTURE_THREAD_LOCAL))
        try:
            work()
        finally:
            driver("cuStreamEndCapture", self._handle, byref(graph))
        driver("cuGraphInstantiateWithFlags", byref(ready), graph, c_ulonglong(0))
        driver("cuGraphDestroy", graph)
        return lambda: driver("cuGraphLaunch", ready, self._handle)

    def wait(self) -> None:
        """ctypes lets other threads of Python run meanwhile."""
        self._driver("cuStreamSynchronize", self._handle)

    def close(self) -> None:
        self._driver("cuStreamDestroy_v2", self._handle)


@cache
def open_gpu(index: int = 0) -> GpuDriver:
    """The GPU of that number, once in a process. Raises CudaError: there is none."""
    return CudaGpu(index)
