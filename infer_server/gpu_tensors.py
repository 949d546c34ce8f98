"""Tensors in GPU memory that clients have shared (CUDA shared memory)."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from infer_server.errors import ExecutionError


class GpuMemory(Protocol):
    """GPU memory that a client has allocated."""
    @property
    def address(self) -> int: ...
    @property
    def byte_size(self) -> int: ...

    def read(self, offset: int, byte_size: int) -> memoryview: ...

    def write(self, offset: int, data: memoryview) -> None: ...


def has_gpus() -> bool:
    """Return True if this machine has a GPU with a driver."""
    from infer_server.engines.backends.cuda.runtime.device import DEVICE

    return bool(DEVICE.find())


def gpu_memory(number: int, handle: bytes) -> GpuMemory:
    """Open memory that another process has allocated on a GPU.

    Parameters
    ----------
    number : int
        Number of the GPU.
    handle : bytes
        CUDA IPC handle.

    Raises
    ------
    infer_server.engines.errors.InputError
        The memory cannot be opened. Using it may raise PlanError, if the GPU failed.
    """
    from infer_server.engines.backends.cuda.runtime.sharing import shared_memory

    return shared_memory(number, handle)


@dataclass(frozen=True, slots=True, eq=False)
class GpuBuffer:
    """Output buffer in a client's GPU memory."""
    gpu: int
    memory: GpuMemory
    offset: int
    byte_size: int
    dtype: np.dtype[Any]

    def tensor(self, shape: Sequence[int], dtype: np.dtype[Any]) -> GpuTensor | None:
        """Return the buffer as a tensor; None if the output does not fit or needs a conversion."""
        tensor = GpuTensor(self.gpu, self.memory, self.offset, tuple(shape), dtype)
        return tensor if dtype == self.dtype and tensor.nbytes <= self.byte_size else None


@dataclass(frozen=True, slots=True, eq=False)
class GpuTensor:
    """Tensor in a client's GPU memory, with the attributes of an array that code which only passes it on needs.

    An engine on the same GPU uses it in place. The client must not write to it or free it before it has the response.
    """
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
        """Return a copy in host memory. Raises ExecutionError if the GPU failed."""
        from infer_server.engines.errors import EngineError
        try:
            return np.frombuffer(self.memory.read(self.offset, self.nbytes), self.dtype).reshape(self.shape)
        except EngineError as error:
            raise ExecutionError(f"a tensor in CUDA shared memory: {error}") from error
