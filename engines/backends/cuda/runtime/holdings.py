"""What something has on a GPU, given back when it is closed or forgotten, or could not be made."""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from engines.backends.cuda.runtime.driver import GpuDriver
from engines.backends.cuda.runtime.library import CudaError
from engines.ir.graph import Array


class Holdings:
    """As a context manager it releases them if its block fails."""

    def __init__(self, gpu: GpuDriver, owner: object | None = None) -> None:
        """owner: with which they are released, at the latest."""
        self._gpu = gpu
        self._releases: list[Callable[[], None]] = []
        if owner is not None:
            weakref.finalize(owner, self.release).atexit = False    # a process that ends gives all back

    def add(self, release: Callable[[], None]) -> None:
        """release: called before those that were added earlier."""
        self._releases.append(release)

    def allocate(self, size: int) -> int:
        """Raises CudaMemoryError."""
        address = self._gpu.allocate(size)
        self.add(partial(self._gpu.free, address))
        return address

    def release(self) -> None:
        """Once; of a lost device nothing can be given back."""
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


class Passing(Holdings):
    """What is needed for the length of a block, whatever comes of it."""

    def place(self, array: Array) -> int:
        """The address of a copy. Raises CudaMemoryError."""
        address = self.allocate(array.nbytes)
        self._gpu.write(address, array)
        return address

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()
