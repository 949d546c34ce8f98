"""Emulated GPU (scripts/testing/gpu/ptx) behind the runtime's own driver (engines/backends/cuda/runtime/driver.py)."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.cuda.runtime.device import DEVICE
from infer_server.engines.backends.cuda.runtime.driver import CudaGpu
from infer_server.engines.backends.cuda.runtime.library import Library, info_of
from infer_server.engines.ir.graph import Array
from scripts.testing.gpu.libcuda.library import Clock, Libcuda
from scripts.testing.gpu.ptx.text import Kernel


def by_code(kernel: Kernel, grid: tuple[int, int], threads: int) -> float:
    """Return a time as if every instruction ran once, regardless of loops."""
    return len(kernel.code) * grid[0] * grid[1] * threads * 1e-12 + 1e-6


class EmulatedGpu(CudaGpu):
    """GPU whose calls of libcuda go to the emulation `cuda`."""
    takes_cubins = False

    def __init__(self, architecture: str, size: int = 64 << 20, name: str = "emulated", clock: Clock = by_code) -> None:
        self.cuda = Libcuda(architecture, size, name, clock)
        super().__init__(0, Library(self.cuda))

    @property
    def lost(self) -> bool:
        return self.cuda.lost

    @lost.setter
    def lost(self, lost: bool) -> None:
        self.cuda.lost = lost

    @property
    def allocated(self) -> dict[int, int]:
        """Bytes of the allocations by address."""
        return self.cuda.allocated

    @property
    def pinned_bytes(self) -> int:
        return sum(map(len, self.cuda.pinned.values()))

    @property
    def modules(self) -> int:
        return sum(isinstance(each, dict) for each in self.cuda.objects.values())

    @property
    def opened(self) -> list[int]:
        """Memory of other processes by address."""
        return self.cuda.opened

    def share(self, address: int) -> bytes:
        """Return the handle that cuIpcGetMemHandle gives for an address."""
        handle = f"memory {address}".encode().ljust(64, b"\0")
        self.cuda.shared[handle] = address
        return handle

    def bytes_at(self, address: int, size: int) -> Array:
        return self.cuda.bytes_at(address, size)


def machine_with(*gpus: EmulatedGpu) -> dict[str, Callable[..., Any]]:
    """Return the functions by which DEVICE finds a machine's GPUs."""
    return {"open_gpu": gpus.__getitem__, "find": lambda: [
        info_of(gpu.driver, 0)._replace(number=number, uuid=f"GPU-{number}") for number, gpu in enumerate(gpus)]}


def install(patch: pytest.MonkeyPatch, *gpus: EmulatedGpu) -> None:
    """Give this machine these GPUs until the patch ends."""
    for name, function in machine_with(*gpus).items():
        patch.setattr(DEVICE, name, function)


class DeviceArray:
    """Array of another library on the emulated GPU, with __cuda_array_interface__."""

    def __init__(self, gpu: EmulatedGpu, array: Array, read_only: bool = False) -> None:
        self.gpu, self.shape, self.dtype = gpu, array.shape, array.dtype
        self.address = gpu.allocate(array.nbytes)
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": array.dtype.str, "strides": None,
                                         "data": (self.address, read_only), "version": 3, "stream": 1}
        gpu.write(self.address, array)

    def host(self) -> Array:
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return self.gpu.bytes_at(self.address, size).view(self.dtype).reshape(self.shape).copy()
