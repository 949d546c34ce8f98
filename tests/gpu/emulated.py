"""A GPU with the words of the driver (engines/backends/cuda/runtime/driver.py) that the PTX machine plays."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engines.backends.cuda.runtime.driver import CudaError, CudaMemoryError
from engines.ir.graph import Array
from tests.gpu.ptx.machine import Machine
from tests.gpu.ptx.memory import BASE, Memory
from tests.gpu.ptx.text import Kernel, parse


class EmulatedGpu:
    """Runs PTX when it is launched. It takes no machine code."""

    def __init__(self, architecture: str, size: int = 64 << 20) -> None:
        self.architecture = architecture.rstrip("a")
        self.memory = Memory(size)
        self.machine = Machine(self.memory)
        self.pinned_bytes = 0
        self.lost = False           # as a device after an error of the hardware: whatever is asked fails

    def use(self) -> None:
        self._here()

    def _here(self) -> None:
        if self.lost:
            raise CudaError("the device is lost (719)")

    def allocate(self, size: int) -> int:
        self._here()
        try:
            return self.memory.place(max(size, 1))
        except MemoryError as error:
            raise CudaMemoryError(f"{error} (2)") from error

    def free(self, address: int) -> None:
        """Nothing comes back: a test is short."""

    def pinned(self, size: int) -> Array:
        self.pinned_bytes += size
        return np.zeros(max(size, 1), np.uint8)

    def unpin(self, memory: Array) -> None:
        self.pinned_bytes -= len(memory)

    def write(self, address: int, array: Array) -> None:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes_at(address, len(flat))[:] = flat

    def bytes_at(self, address: int, size: int) -> Array:
        assert self.memory.owned[address - BASE:address - BASE + size].all(), "a copy outside of what is allocated"
        return self.memory.array(address, np.uint8, (size,))

    def load(self, code: bytes) -> dict[str, Kernel]:
        return parse(code.decode())

    def function(self, module: dict[str, Kernel], name: str, shared_bytes: int) -> Kernel:
        return module[name]

    def stream(self) -> EmulatedStream:
        return EmulatedStream(self)


class EmulatedStream:
    """What is put into it is done at once, or recorded."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu = gpu
        self._recorded: list[Callable[[], None]] | None = None

    def _put(self, task: Callable[[], None]) -> None:
        self._gpu.use()
        if self._recorded is None:
            task()
        else:
            self._recorded.append(task)

    def launch(self, function: Kernel, grid: tuple[int, int], threads: int, addresses: Sequence[int], rows: int,
               shared_bytes: int) -> None:
        self._put(lambda: self._gpu.machine.launch(function, grid, threads, [*addresses, rows], shared_bytes))

    def copy_in(self, address: int, host: Array) -> None:
        self._put(lambda: self._gpu.write(address, host))

    def copy_out(self, host: Array, address: int) -> None:
        def copy() -> None:
            host[:] = self._gpu.bytes_at(address, len(host))
        self._put(copy)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self._recorded = []
        work()
        tasks, self._recorded = self._recorded, None

        def graph() -> None:
            for task in tasks:
                self._put(task)
        return graph

    def wait(self) -> None:
        self._gpu.use()

    def close(self) -> None:
        """Nothing is on its way."""
