"""Owner of GPU resources, which frees them on close, on garbage collection, and after a failed constructor."""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from infer_server.engines.backends.cuda.runtime.driver import GpuDriver
from infer_server.engines.backends.cuda.runtime.library import CudaError
from infer_server.engines.ir.graph import Array


class GpuResources:
    """Stack of GPU resources. As a context manager it releases them if its block raises."""

    def __init__(self, gpu: GpuDriver, owner: object | None = None) -> None:
        """Create an empty stack, which is released at the latest when `owner` is collected."""
        self._gpu = gpu
        self._releases: list[Callable[[], None]] = []
        if owner is not None:
            weakref.finalize(owner, self.release).atexit = False    # the driver frees all at exit

    def add(self, release: Callable[[], None]) -> None:
        """Add a release function. They are called in reverse order."""
        self._releases.append(release)

    def allocate(self, size: int) -> int:
        """Allocate GPU memory that is freed on release. Raise CudaMemoryError if there is not enough."""
        address = self._gpu.allocate(size)
        self.add(partial(self._gpu.free, address))
        return address

    def release(self) -> None:
        """Release everything once. Errors are ignored, as a lost device cannot free anything."""
        with contextlib.ExitStack() as block:
            if self._releases:
                with contextlib.suppress(CudaError):
                    block.enter_context(self._gpu.within())
            while self._releases:
                with contextlib.suppress(CudaError):
                    self._releases.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind:
            self.release()


class ScopedResources(GpuResources):
    """Stack of GPU resources that is released at the end of its `with` block."""

    def upload(self, array: Array) -> int:
        """Copy an array to the GPU and return its address. Raise CudaMemoryError if there is not enough memory."""
        address = self.allocate(array.nbytes)
        self._gpu.write(address, array)
        return address

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()
