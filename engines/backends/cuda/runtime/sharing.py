"""Memory of a GPU that another process has made, by the handle that it gives away: CUDA's between processes."""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import numpy as np

from engines.backends.cuda.runtime.device import DEVICE
from engines.backends.cuda.runtime.driver import GpuDriver
from engines.backends.cuda.runtime.library import CudaError
from engines.errors import InputError, PlanError

HANDLE_BYTES = 64


class SharedMemory:
    """Given back when nobody refers to it any more. Its owner may free it before: what is read then is anything."""

    def __init__(self, gpu: GpuDriver, handle: bytes) -> None:
        """Raises CudaError: the driver knows no such memory."""
        gpu.use()
        self._gpu = gpu
        self.address, self.byte_size = gpu.open_shared(handle)
        weakref.finalize(self, _close, gpu, self.address).atexit = False

    def read(self, offset: int, byte_size: int) -> memoryview:
        """A copy. Raises PlanError: the GPU failed."""
        host = np.empty(byte_size, np.uint8)
        with _said():
            self._gpu.use()
            self._gpu.read(host, self.address + offset)
        return host.data

    def write(self, offset: int, data: memoryview) -> None:
        """Raises PlanError: the GPU failed."""
        with _said():
            self._gpu.use()
            self._gpu.write(self.address + offset, np.frombuffer(data, np.uint8))


@contextlib.contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except CudaError as error:
        raise PlanError(f"a copy on the GPU failed: {error}") from error


def shared_memory(number: int, handle: bytes) -> SharedMemory:
    """The memory of the GPU of that number. Raises InputError: it cannot be had."""
    gpus = DEVICE.find()
    if number not in (gpu.number for gpu in gpus):
        raise InputError(f"there is no GPU {number}; this machine has {', '.join(str(gpu.number) for gpu in gpus)}")
    if len(handle) != HANDLE_BYTES:
        raise InputError(f"a handle has {HANDLE_BYTES} bytes, and not {len(handle)}")
    try:
        return SharedMemory(DEVICE.at(number).gpu, handle)
    except CudaError as error:
        raise InputError(str(error)) from error


def _close(gpu: GpuDriver, address: int) -> None:
    with contextlib.suppress(CudaError), gpu.within():      # a lost device has lost it
        gpu.close_shared(address)
