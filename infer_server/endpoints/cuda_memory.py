"""CUDA shared memory: regions on GPUs that clients register by an IPC handle to pass tensors.

An engine on the same GPU reads and writes numeric tensors in place; all other tensors are copied through host memory.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md
"""
from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from infer_server.endpoints.shared_memory import Regions, SharedMemoryRegion
from infer_server.engines.errors import EngineError
from infer_server.errors import ExecutionError, InvalidRequestError
from infer_server.gpu_tensors import GpuBuffer, GpuMemory, GpuTensor, gpu_memory, has_gpus


@dataclass(frozen=True, eq=False)
class CudaRegion(SharedMemoryRegion):
    """Region in the memory of a GPU."""
    what: ClassVar[str] = "cuda"
    device_id: int
    memory: GpuMemory = field(repr=False)

    def read(self, offset: int, byte_size: int) -> memoryview:
        self.check(offset, byte_size)
        try:
            return self.memory.read(offset, byte_size)
        except EngineError as error:
            raise self._failed(error) from error

    def write(self, offset: int, data: memoryview) -> None:
        self.check(offset, data.nbytes)
        try:
            self.memory.write(offset, data)
        except EngineError as error:
            raise self._failed(error) from error

    def in_place(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any],
                 devices: Set[int | None]) -> GpuTensor | None:
        if self.device_id not in devices:
            return None
        return GpuTensor(self.device_id, self.memory, offset, tuple(shape), dtype)

    def gpu_buffer(self, offset: int, byte_size: int, dtype: np.dtype[Any]) -> GpuBuffer:
        return GpuBuffer(self.device_id, self.memory, offset, byte_size, dtype)

    def _failed(self, error: Exception) -> ExecutionError:
        return ExecutionError(f"CUDA shared memory region '{self.name}': {error}")


def register(regions: Regions, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
    """Register a region by the CUDA IPC handle of a client's memory on a GPU. Raises as Regions.register()."""
    regions.check_addition(name, "cuda")
    failed = f"failed to register CUDA shared memory region: '{name}', "
    if not has_gpus():
        raise InvalidRequestError(f"{failed}GPUs not supported")
    try:
        memory = gpu_memory(device_id, handle)
    except EngineError as error:
        raise InvalidRequestError(f"{failed}{error}") from error
    if not 0 < byte_size <= memory.byte_size:
        raise InvalidRequestError(f"{failed}a byte_size of {byte_size}; the handle's memory has {memory.byte_size}")
    regions.add(CudaRegion(name, byte_size, device_id, memory))
