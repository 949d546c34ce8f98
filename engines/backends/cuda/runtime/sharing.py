"""GPU memory of another process, opened by its CUDA IPC handle."""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import numpy as np

from infer_server.engines.backends.cuda.runtime.device import DEVICE
from infer_server.engines.backends.cuda.runtime.driver import GpuDriver
from infer_server.engines.backends.cuda.runtime.library import CudaError
from infer_server.engines.errors import InputError, PlanError

HANDLE_BYTES = 64


class SharedMemory:
    """Opened GPU memory, closed when it is collected. If its owner frees it earlier, its contents are undefined."""

    def __init__(self, gpu: GpuDriver, handle: bytes) -> None:
        """Open the memory of a handle. Raise CudaError if the driver does not know it."""
        gpu.use()
        self._gpu = gpu
        self.address, self.byte_size = gpu.open_shared(handle)
        weakref.finalize(self, _close, gpu, self.address).atexit = False

    def read(self, offset: int, byte_size: int) -> memoryview:
        """Return a copy of `byte_size` bytes. Raise PlanError if the GPU fails."""
        host = np.empty(byte_size, np.uint8)
        with _as_plan_error():
            self._gpu.use()
            self._gpu.read(host, self.address + offset)
        return host.data

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at an offset in bytes. Raise PlanError if the GPU fails."""
        with _as_plan_error():
            self._gpu.use()
            self._gpu.write(self.address + offset, np.frombuffer(data, np.uint8))


@contextlib.contextmanager
def _as_plan_error() -> Iterator[None]:
    try:
        yield
    except CudaError as error:
        raise PlanError(f"a copy on the GPU failed: {error}") from error


def shared_memory(number: int, handle: bytes) -> SharedMemory:
    """Open the memory of a handle on the GPU with index `number`. Raise InputError if that fails."""
    gpus = DEVICE.find()
    if number not in (gpu.number for gpu in gpus):
        raise InputError(f"there is no GPU {number}; this machine has {', '.join(str(gpu.number) for gpu in gpus)}")
    if len(handle) != HANDLE_BYTES:
        raise InputError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    try:
        return SharedMemory(DEVICE.at(number).gpu, handle)
    except CudaError as error:
        raise InputError(str(error)) from error


def _close(gpu: GpuDriver, address: int) -> None:
    with contextlib.suppress(CudaError), gpu.within():      # a lost device has freed it
        gpu.close_shared(address)
