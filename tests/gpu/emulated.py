"""A GPU with the words of the driver (engines/backends/cuda/runtime/driver.py) that the PTX machine plays."""
from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from engines.backends.cuda.runtime.driver import CudaError, CudaMemoryError
from engines.ir.graph import Array
from tests.gpu.ptx.machine import Machine
from tests.gpu.ptx.memory import BASE, Memory
from tests.gpu.ptx.text import Kernel, parse

Clock = Callable[[Kernel, tuple[int, int], int], float]     # seconds of a launch: its kernel, grid, threads of a block


def by_code(kernel: Kernel, grid: tuple[int, int], threads: int) -> float:
    """As if every instruction ran once, whatever loops there are."""
    return len(kernel.code) * grid[0] * grid[1] * threads * 1e-12 + 1e-6


USED = threading.local()                # the GPU of each thread, as the driver has a context


def used() -> EmulatedGpu | None:
    """The calling thread's."""
    return getattr(USED, "gpu", None)


class EmulatedGpu:
    """Runs PTX when it is launched."""
    takes_cubins = False

    def __init__(self, architecture: str, size: int = 64 << 20, name: str = "emulated", clock: Clock = by_code) -> None:
        self.architecture, self.name, self.clock = architecture.rstrip("a"), name, clock
        self._memory = Memory(size)
        self.machine = Machine(self._memory)
        self.pinned_bytes = 0
        self.allocated: dict[int, int] = {}     # address -> bytes
        self.modules = 0
        self._shared: dict[bytes, int] = {}     # address, by handle
        self.opened: list[int] = []             # of other processes
        self.lost = False           # as a device after an error of the hardware: whatever is asked fails

    def use(self) -> None:
        self._here()
        USED.gpu = self

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        before = used()
        self.use()
        try:
            yield
        finally:
            USED.gpu = before

    def _here(self) -> None:
        if self.lost:
            raise CudaError("the device is lost (719)")

    def memory(self) -> tuple[int, int]:
        whole = len(self._memory.bytes)
        return whole - sum(self.allocated.values()), whole

    def allocate(self, size: int) -> int:
        self._here()
        try:
            address = self._memory.place(max(size, 1))
        except MemoryError as error:
            raise CudaMemoryError(f"{error} (2)") from error
        self.bytes_at(address, size)[:] = 0
        self.allocated[address] = max(size, 1)
        return address

    def free(self, address: int) -> None:
        self._here()
        self._memory.take_back(address, self.allocated.pop(address))

    def pinned(self, size: int) -> Array:
        self.pinned_bytes += size
        memory = np.zeros(max(size, 1), np.uint8)
        weakref.finalize(memory, self._unpin, size)
        return memory

    def _unpin(self, size: int) -> None:
        self.pinned_bytes -= size

    def write(self, address: int, array: Array) -> None:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes_at(address, len(flat))[:] = flat

    def bytes_at(self, address: int, size: int) -> Array:
        inside = self._memory.owned[address - BASE:address - BASE + size]
        assert len(inside) == size and inside.all(), "a copy outside of what is allocated"
        return self._memory.array(address, np.uint8, (size,))

    def read(self, host: Array, address: int) -> None:
        self._here()
        host[:] = self.bytes_at(address, len(host))

    def share(self, address: int) -> bytes:
        """What another process would get of cuIpcGetMemHandle."""
        handle = f"memory {address}".encode().ljust(64, b"\0")
        self._shared[handle] = address
        return handle

    def open_shared(self, handle: bytes) -> tuple[int, int]:
        self._here()
        if handle not in self._shared:
            raise CudaError("cuIpcOpenMemHandle_v2: invalid resource handle (400)")
        address = self._shared[handle]
        self.opened.append(address)
        return address, self.allocated[address]

    def close_shared(self, address: int) -> None:
        self._here()
        self.opened.remove(address)

    def holds(self, address: int) -> bool:
        return bool(0 <= address - BASE < len(self._memory.owned) and self._memory.owned[address - BASE])

    def wait_for(self, stream: int) -> None:
        """All is done at once."""

    def load(self, code: bytes) -> dict[str, Kernel]:
        self.modules += 1
        return parse(code.decode())

    def unload(self, module: dict[str, Kernel]) -> None:
        self.modules -= 1

    def function(self, module: dict[str, Kernel], name: str, shared_bytes: int) -> Kernel:
        return module[name]

    def stream(self) -> EmulatedStream:
        return EmulatedStream(self)


class EmulatedStream:
    """What is put into it is done at once, or recorded, or only counted by the clock."""
    number = 1

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu = gpu
        self._recorded: list[Callable[[], None]] | None = None
        self._seconds: float | None = None

    def _put(self, task: Callable[[], None], seconds: float = 0.0) -> None:
        def run() -> None:
            if self._seconds is None:
                task()
            else:
                self._seconds += seconds
        self._gpu.use()
        if self._recorded is None:
            run()
        else:
            self._recorded.append(run)

    def launch(self, function: Kernel, grid: tuple[int, int], threads: int, addresses: Sequence[int], rows: int,
               shared_bytes: int) -> None:
        self._put(lambda: self._gpu.machine.launch(function, grid, threads, [*addresses, rows], shared_bytes),
                  self._gpu.clock(function, grid, threads))

    def copy_in(self, address: int, host: Array) -> None:
        self._put(lambda: self._gpu.write(address, host))

    def copy_out(self, host: Array, address: int) -> None:
        def copy() -> None:
            host[:] = self._gpu.bytes_at(address, len(host))
        self._put(copy)

    def copy_rows(self, to: int, to_step: int, source: int, source_step: int, width: int, rows: int) -> None:
        def copy() -> None:
            for row in range(rows):
                self._gpu.write(to + row * to_step, self._gpu.bytes_at(source + row * source_step, width))
        self._put(copy)

    def record(self, work: Callable[[], None]) -> EmulatedGraph:
        self._recorded = []
        work()
        tasks, self._recorded = self._recorded, None
        return EmulatedGraph(self._gpu, tasks)

    def seconds(self, work: Callable[[], None]) -> float:
        """By the clock: nothing runs."""
        self._seconds = 0.0
        try:
            work()
            return self._seconds
        finally:
            self._seconds = None

    def wait(self) -> None:
        self._gpu.use()

    def close(self) -> None:
        """Nothing is on its way."""


class EmulatedGraph:
    def __init__(self, gpu: EmulatedGpu, tasks: Sequence[Callable[[], None]]) -> None:
        self._gpu, self._tasks = gpu, tasks

    def __call__(self) -> None:
        self._gpu.use()
        for task in self._tasks:
            task()

    def close(self) -> None:
        self._tasks = ()


class DeviceArray:
    """An array of another library on the emulated GPU: by __cuda_array_interface__."""

    def __init__(self, gpu: EmulatedGpu, array: Array, read_only: bool = False) -> None:
        self.gpu, self.shape, self.dtype = gpu, array.shape, array.dtype
        self.address = gpu.allocate(array.nbytes)
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": array.dtype.str, "strides": None,
                                         "data": (self.address, read_only), "version": 3, "stream": 1}
        gpu.write(self.address, array)

    def host(self) -> Array:
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return self.gpu.bytes_at(self.address, size).view(self.dtype).reshape(self.shape).copy()
