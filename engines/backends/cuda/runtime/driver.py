"""A GPU through the CUDA driver API: memory, code, streams and graphs.

Tests replace libcuda below it by their own.
"""
from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import Any, Protocol

import numpy as np

from infer_server.engines.backends.cuda.runtime.library import OLDEST, CudaError, Library, info_of
from infer_server.engines.backends.cuda.runtime.structures import Handle, RowCopy
from infer_server.engines.ir.graph import Array

ELF = b"\x7fELF"                        # first bytes of machine code
_MAX_DYNAMIC_SHARED = 8                 # function attribute
_MOST_WITHOUT_ASKING = 48 << 10         # bytes of dynamic shared memory without cuFuncSetAttribute
_CAPTURE_RELAXED, _NON_BLOCKING = 2, 1    # relaxed: allows the garbage collector to free memory
_ON_DEVICE = 2                          # CU_MEMORYTYPE_DEVICE
_POINTER_DEVICE = 9                     # pointer attribute
_LEGACY = 1                             # the default stream. Its memsets and copies from pageable memory may be pending
                                        # when the call returns, and non-blocking streams do not wait for it
_ERROR_LOG, _LOG_BYTES = 5, 6           # options of the PTX compiler
_PEERS = 1                              # allows memory of a peer GPU


class Recorded(Protocol):
    """Work recorded from a stream, as a CUDA graph."""

    def __call__(self) -> None:
        """Launch the graph in its stream."""

    def close(self) -> None: ...


class Stream(Protocol):
    """Queue of work that runs in order."""
    @property
    def number(self) -> int:
        """The driver's handle, for use by other libraries."""

    def launch(self, function: Any, grid: tuple[int, int], threads: int, addresses: Sequence[int], rows: int,
               shared_bytes: int) -> None: ...

    def copy_in(self, address: int, host: Array) -> None: ...

    def copy_out(self, host: Array, address: int) -> None: ...

    def copy_rows(self, to: int, to_step: int, source: int, source_step: int, width: int, rows: int) -> None:
        """Copy `rows` rows of `width` bytes within the GPU. Rows begin `to_step` and `source_step` bytes apart."""

    def record(self, work: Callable[[], None]) -> Recorded:
        """Record the work that `work` enqueues, without running it."""

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the time on the GPU, in seconds, of the work that `work` enqueues."""

    def wait(self) -> None: ...

    def close(self) -> None: ...


class GpuDriver(Protocol):
    """Operations on a GPU that the runtime needs."""
    takes_cubins: bool      # False: PTX only

    @property
    def name(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    def cuda_version(self) -> tuple[int, int]:
        """Return the version of CUDA that the driver supports, as (major, minor)."""

    def memory(self) -> tuple[int, int]:
        """Return the free and the total memory in bytes."""

    def use(self) -> None:
        """Make the GPU's context current in the calling thread."""

    def within(self) -> AbstractContextManager[None]:
        """Return a context manager that makes the GPU's context current, and restores the previous one at exit.

        Finalizers use it: they run on whichever thread drops the last reference.
        """

    def allocate(self, size: int) -> int:
        """Allocate zeroed memory. Raise CudaMemoryError if there is not enough."""

    def free(self, address: int) -> None: ...

    def pinned(self, size: int) -> Array:
        """Allocate zeroed, page-locked host memory, freed with the last view of it."""

    def write(self, address: int, array: Array) -> None: ...

    def read(self, host: Array, address: int) -> None: ...

    def holds(self, address: int) -> bool:
        """Return True if the address is in this GPU's memory."""

    def open_shared(self, handle: bytes) -> tuple[int, int]:
        """Open memory of another process by its IPC handle, and return its address and size in bytes."""

    def close_shared(self, address: int) -> None: ...

    def wait_for(self, stream: int) -> None:
        """Wait for all work in another library's stream."""

    def load(self, code: bytes) -> Any:
        """Load a cubin or PTX and return the module."""

    def unload(self, module: Any) -> None: ...

    def function(self, module: Any, name: str, shared_bytes: int) -> Any: ...

    def stream(self) -> Stream: ...


class CudaGpu:
    """GPU with its primary context."""
    takes_cubins = True

    def __init__(self, number: int = 0, driver: Library | None = None) -> None:
        self.driver, self._device, self._context = driver or Library(), c_int(), c_void_p()
        if self.cuda_version() < OLDEST:
            raise CudaError("the NVIDIA driver is too old: it supports CUDA {}.{}, and {}.{} or later is needed".format(
                *self.cuda_version(), *OLDEST))
        info = info_of(self.driver, number)
        self.number, self.name, self.architecture = number, info.name, info.architecture
        self.driver("cuDeviceGet", byref(self._device), c_int(number))
        self.driver("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self.use()

    def cuda_version(self) -> tuple[int, int]:
        return self.driver.cuda_version()

    def use(self) -> None:
        self.driver("cuCtxSetCurrent", self._context)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        self.driver("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            with contextlib.suppress(CudaError):        # the device may be lost
                self.driver("cuCtxPopCurrent_v2", byref(c_void_p()))

    # ---- memory
    def memory(self) -> tuple[int, int]:
        free, whole = c_size_t(), c_size_t()
        self.driver("cuMemGetInfo_v2", byref(free), byref(whole))
        return free.value, whole.value

    def allocate(self, size: int) -> int:
        address, size = c_ulonglong(), max(size, 1)
        self.driver("cuMemAlloc_v2", byref(address), c_size_t(size))
        self.driver("cuMemsetD8_v2", address, ctypes.c_ubyte(0), c_size_t(size))
        self.wait_for(_LEGACY)
        return address.value

    def free(self, address: int) -> None:
        self.driver("cuMemFree_v2", c_ulonglong(address))

    def pinned(self, size: int) -> Array:
        address, size = c_void_p(), max(size, 1)
        self.driver("cuMemHostAlloc", byref(address), c_size_t(size), c_uint(0))
        memory = (ctypes.c_ubyte * size).from_address(address.value or 0)
        weakref.finalize(memory, self._unpin, address).atexit = False
        array = np.frombuffer(memoryview(memory), np.uint8)
        array[:] = 0
        return array

    def _unpin(self, address: c_void_p) -> None:
        with contextlib.suppress(CudaError), self.within():     # a lost device has freed it
            self.driver("cuMemFreeHost", address)

    def write(self, address: int, array: Array) -> None:
        array = np.ascontiguousarray(array)
        self.driver("cuMemcpyHtoD_v2", c_ulonglong(address), c_void_p(array.ctypes.data), c_size_t(array.nbytes))
        self.wait_for(_LEGACY)

    def read(self, host: Array, address: int) -> None:
        self.driver("cuMemcpyDtoH_v2", c_void_p(host.ctypes.data), c_ulonglong(address), c_size_t(host.nbytes))

    def open_shared(self, handle: bytes) -> tuple[int, int]:
        address, begin, size = c_ulonglong(), c_ulonglong(), c_size_t()
        self.driver("cuIpcOpenMemHandle_v2", byref(address), Handle.from_buffer_copy(handle), c_uint(_PEERS))
        self.driver("cuMemGetAddressRange_v2", byref(begin), byref(size), address)
        return address.value, begin.value + size.value - address.value

    def close_shared(self, address: int) -> None:
        self.driver("cuIpcCloseMemHandle", c_ulonglong(address))

    def holds(self, address: int) -> bool:
        number = c_int()
        try:
            self.driver("cuPointerGetAttribute", byref(number), c_int(_POINTER_DEVICE), c_ulonglong(address))
        except CudaError:       # unknown to the driver
            return False
        return number.value == self.number

    def wait_for(self, stream: int) -> None:
        self.driver("cuStreamSynchronize", c_void_p(stream))

    # ---- code
    def load(self, code: bytes) -> c_void_p:
        module, log = c_void_p(), ctypes.create_string_buffer(4096)
        options = (c_int * 2)(_ERROR_LOG, _LOG_BYTES)
        values = (c_void_p * 2)(ctypes.addressof(log), len(log))
        try:
            self.driver("cuModuleLoadDataEx", byref(module), code if code[:4] == ELF else code + b"\0", c_uint(2),
                        options, values)
        except CudaError as error:
            raise type(error)(f"{error} {log.value.decode(errors='replace')}".strip()) from error
        return module

    def unload(self, module: c_void_p) -> None:
        self.driver("cuModuleUnload", module)

    def function(self, module: c_void_p, name: str, shared_bytes: int) -> c_void_p:
        function = c_void_p()
        self.driver("cuModuleGetFunction", byref(function), module, name.encode())
        if shared_bytes > _MOST_WITHOUT_ASKING:
            self.driver("cuFuncSetAttribute", function, c_int(_MAX_DYNAMIC_SHARED), c_int(shared_bytes))
        return function

    def stream(self) -> Stream:
        return CudaStream(self)


class CudaStream:
    """CUDA stream that does not synchronise with the default stream."""

    def __init__(self, gpu: CudaGpu) -> None:
        self._driver, self._handle = gpu.driver, c_void_p()
        self._driver("cuStreamCreate", byref(self._handle), c_uint(_NON_BLOCKING))
        self.number = self._handle.value or 0

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

    def copy_rows(self, to: int, to_step: int, source: int, source_step: int, width: int, rows: int) -> None:
        copy = RowCopy(srcMemoryType=_ON_DEVICE, srcDevice=source, srcPitch=source_step, dstMemoryType=_ON_DEVICE,
                       dstDevice=to, dstPitch=to_step, WidthInBytes=width, Height=rows)
        if rows > 1:
            self._driver("cuMemcpy2DAsync_v2", byref(copy), self._handle)
        else:       # no pitch, so any width is allowed
            self._driver("cuMemcpyDtoDAsync_v2", c_ulonglong(to), c_ulonglong(source), c_size_t(width), self._handle)

    def record(self, work: Callable[[], None]) -> Recorded:
        driver, graph = self._driver, c_void_p()
        driver("cuStreamBeginCapture_v2", self._handle, c_int(_CAPTURE_RELAXED))
        try:
            work()
        except Exception:       # an invalidated capture yields no graph
            with contextlib.suppress(CudaError):
                driver("cuStreamEndCapture", self._handle, byref(graph))
                driver("cuGraphDestroy", graph)
            raise
        driver("cuStreamEndCapture", self._handle, byref(graph))
        return CudaGraph(driver, graph, self._handle)

    def seconds(self, work: Callable[[], None]) -> float:
        driver, milliseconds, events = self._driver, ctypes.c_float(), [c_void_p(), c_void_p()]
        for event in events:
            driver("cuEventCreate", byref(event), c_uint(0))
        begin, end = events
        try:
            driver("cuEventRecord", begin, self._handle)
            work()
            driver("cuEventRecord", end, self._handle)
            driver("cuEventSynchronize", end)
            driver("cuEventElapsedTime", byref(milliseconds), begin, end)
        finally:
            for event in events:
                driver("cuEventDestroy_v2", event)
        return milliseconds.value / 1e3

    def wait(self) -> None:
        """Wait for the stream. ctypes releases the GIL meanwhile."""
        self._driver("cuStreamSynchronize", self._handle)

    def close(self) -> None:
        self._driver("cuStreamDestroy_v2", self._handle)


class CudaGraph:
    """CUDA graph, ready to launch in a stream."""

    def __init__(self, driver: Library, graph: c_void_p, stream: c_void_p) -> None:
        """Instantiate `graph`, which is destroyed in any case."""
        self._driver, self._ready, self._stream = driver, c_void_p(), stream
        try:
            driver("cuGraphInstantiateWithFlags", byref(self._ready), graph, c_ulonglong(0))
        finally:
            driver("cuGraphDestroy", graph)

    def __call__(self) -> None:
        self._driver("cuGraphLaunch", self._ready, self._stream)

    def close(self) -> None:
        self._driver("cuGraphExecDestroy", self._ready)


@cache
def open_gpu(number: int = 0) -> GpuDriver:
    """Return the GPU with index `number`, opened once per process. Raise CudaError if there is none."""
    return CudaGpu(number)
