"""Tensors in memory of GPUs that clients have made, in the places of arrays of the host's."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from infer_server.errors import ExecutionError


class GpuMemory(Protocol):
    """Memory of a GPU that a client has made."""
    @property
    def address(self) -> int: ...
    @property
    def byte_size(self) -> int: ...

    def read(self, offset: int, byte_size: int) -> memoryview: ...

    def write(self, offset: int, data: memoryview) -> None: ...


def has_gpus() -> bool:
    """Whether this machine has one, and a driver of it."""
    from engines.backends.cuda.runtime.device import DEVICE

    return bool(DEVICE.find())


def gpu_memory(number: int, handle: bytes) -> GpuMemory:
    """What another process has made on the GPU of that number, by CUDA's handle of it. Raises InputError of
    engines.errors: it cannot be had; PlanError, when it is used: the GPU failed."""
    from engines.backends.cuda.runtime.sharing import shared_memory

    return shared_memory(number, handle)


@dataclass(frozen=True, slots=True, eq=False)
class GpuRoom:
    """Where an output is to lie: on the GPU of that number, within a client's memory."""
    gpu: int
    memory: GpuMemory
    offset: int
    byte_size: int
    dtype: np.dtype[Any]

    def tensor(self, shape: Sequence[int], dtype: np.dtype[Any]) -> GpuTensor | None:
        """An output in it; None: it does not fit, or is to be converted first."""
        found = GpuTensor(self.gpu, self.memory, self.offset, tuple(shape), dtype)
        return found if dtype == self.dtype and found.nbytes <= self.byte_size else None


@dataclass(frozen=True, slots=True, eq=False)
class GpuTensor:
    """Has what those ask of an array that only hand it on; an engine on its GPU takes it where it lies. Its client
    neither writes to it nor frees it before it has its answer."""
    gpu: int
    memory: GpuMemory
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "strides": None, "version": 3,
                "data": (self.memory.address + self.offset, False)}

    def reshape(self, shape: tuple[int, ...]) -> GpuTensor:
        return replace(self, shape=shape)

    def array(self) -> NDArray[Any]:
        """A copy in the host's memory. Raises ExecutionError: the GPU failed."""
        from engines.errors import EngineError
        try:
            return np.frombuffer(self.memory.read(self.offset, self.nbytes), self.dtype).reshape(self.shape)
        except EngineError as error:
            raise ExecutionError(f"a tensor in CUDA shared memory: {error}") from error
