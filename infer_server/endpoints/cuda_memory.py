"""CUDA shared memory: regions on GPUs that clients register by a handle, to pass tensors that lie there.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from engines.errors import EngineError
from infer_server.backend import GpuMemory, gpu_memory, has_gpus
from infer_server.endpoints.shared_memory import Region, Regions
from infer_server.errors import ExecutionError, InvalidRequestError


@dataclass(frozen=True, eq=False)
class CudaRegion(Region):
    """Memory of a GPU. Copies go from and to it as they do with a region of the host's."""
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

    def _failed(self, error: Exception) -> ExecutionError:
        return ExecutionError(f"CUDA shared memory region '{self.name}': {error}")


def register(regions: Regions, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
    """handle: CUDA's of a client's memory on that GPU. Raises as Regions.register()."""
    regions.check_room(name, "CUDA")
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
