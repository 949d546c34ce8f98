"""A GPU through its driver: memory, code, streams, graphs.

Names and arguments of the calls: the CUDA driver API. It has not run on a GPU yet; the tests put a libcuda of their own
below it.
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

from engines.backends.cuda.runtime.library import OLDEST, CudaError, Library, info_of
from engines.backends.cuda.runtime.structures import Handle, RowCopy
from engines.ir.graph import Array

ELF = b"\x7fELF"                        # how machine code begins
_MAX_DYNAMIC_SHARED = 8                 # function attribute
_MOST_WITHOUT_ASKING = 48 << 10         # bytes of shared memory
_CAPTURE_RELAXED, _NON_BLOCKING = 2, 1    # relaxed: the garbage collector may free memory meanwhile
_ON_DEVICE = 2                          # a kind of memory
_POINTER_DEVICE = 9                     # pointer attribute
_LEGACY = 1                             # the stream of calls that name none. It returns before a memset, or a copy from
                                        # pageable memory, has reached the GPU, and our own streams do not wait for it
_ERROR_LOG, _LOG_BYTES = 5, 6           # options of what makes code of PTX
_PEERS = 1                              # a handle's memory may be of a GPU that is reached from this one


class Recorded(Protocol):
    """What was put into a stream, as one piece (a CUDA graph)."""

    def __call__(self) -> None:
        """Put it there once more."""

    def close(self) -> None: ...


class Stream(Protocol):
    """What is put into it runs in order."""
    @property
    def number(self) -> int:
        """The driver's handle of it, that other libraries take."""

    def launch(self, function: Any, grid: tuple[int, int], threads: int, addresses: Sequence[int], rows: int,
               shared_bytes: int) -> None: ...

    def copy_in(self, address: int, host: Array) -> None: ...

    def copy_out(self, host: Array, address: int) -> None: ...

    def copy_rows(self, to: int, to_step: int, source: int, source_step: int, width: int, rows: int) -> None:
        """So many rows of `width` bytes from one place on the GPU to another, each row a step behind the one before."""

    def record(self, work: Callable[[], None]) -> Recorded:
        """What `work` puts into the stream, which it does not run."""

    def seconds(self, work: Callable[[], None]) -> float:
        """Of the GPU's own clock, that what `work` puts into the stream takes."""

    def wait(self) -> None: ...

    def close(self) -> None: ...


class GpuDriver(Protocol):
    """A GPU as the runtime uses it."""
    takes_cubins: bool      # or PTX only

    @property
    def name(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    def cuda_version(self) -> tuple[int, int]:
        """The version of CUDA that the driver came with."""

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all."""

    def use(self) -> None:
        """Make it the calling thread's."""

    def within(self) -> AbstractContextManager[None]:
        """It is the calling thread's for the length of a block, and then what was before: for what runs on whatever
        thread drops the last reference."""

    def allocate(self, size: int) -> int:
        """Zeroed. Raises CudaMemoryError."""

    def free(self, address: int) -> None: ...

    def pinned(self, size: int) -> Array:
        """Bytes of the host, zeroed, that copies go from and to without a stop; freed with the last view of them."""

    def write(self, address: int, array: Array) -> None: ...

    def read(self, host: Array, address: int) -> None: ...

    def holds(self, address: int) -> bool:
        """Whether that is memory of this GPU."""

    def open_shared(self, handle: bytes) -> tuple[int, int]:
        """Address and bytes of memory that another process has made, and gave a handle of."""

    def close_shared(self, address: int) -> None: ...

    def wait_for(self, stream: int) -> None:
        """Until all is done that another library has put into its stream."""

    def load(self, code: bytes) -> Any:
        """A module of a cubin or of PTX."""

    def unload(self, module: Any) -> None: ...

    def function(self, module: Any, name: str, shared_bytes: int) -> Any: ...

    def stream(self) -> Stream: ...


class CudaGpu:
    """A GPU with its primary context."""
    takes_cubins = True

    def __init__(self, number: int = 0, driver: Library | None = None) -> None:
        self.driver, self._device, self._context = driver or Library(), c_int(), c_void_p()
        if self.cuda_version() < OLDEST:
            raise CudaError("the NVIDIA driver here is too old: it is of CUDA {}.{}, and one of {}.{} or later is "
                            "needed".format(*self.cuda_version(), *OLDEST))
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
            with contextlib.suppress(CudaError):        # of a lost device
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
        with contextlib.suppress(CudaError), self.within():     # a lost device has lost it
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
        except CudaError:       # it is none that the driver knows
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
        else:       # of any width
            self._driver("cuMemcpyDtoDAsync_v2", c_ulonglong(to), c_ulonglong(source), c_size_t(width), self._handle)

    def record(self, work: Callable[[], None]) -> Recorded:
        driver, graph = self._driver, c_void_p()
        driver("cuStreamBeginCapture_v2", self._handle, c_int(_CAPTURE_RELAXED))
        try:
            work()
        except Exception:       # a capture that an error has ended makes no graph
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
        """ctypes lets other threads of Python run meanwhile."""
        self._driver("cuStreamSynchronize", self._handle)

    def close(self) -> None:
        self._driver("cuStreamDestroy_v2", self._handle)


class CudaGraph:
    def __init__(self, driver: Library, graph: c_void_p, stream: c_void_p) -> None:
        """graph: it is given up."""
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
    """The GPU of that number, once in a process. Raises CudaError: there is none."""
    return CudaGpu(number)
