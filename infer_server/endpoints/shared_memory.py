"""Shared memory regions that clients register to pass tensors without sending them, and those in host memory.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md

Tensors in host memory are read from a mapping of the region's file if it can be mapped (mapped_memory.py): in place by
an engine that supports it, copied otherwise. Without a mapping, or once a client has truncated the file, they are read
by system calls, by which they are always written. Only registered bytes are accessed.
"""
from __future__ import annotations

import os
import stat
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from infer_server.endpoints.mapped_memory import Mapping, guard, mapped
from infer_server.engines.plan.arena import ChangingArray
from infer_server.errors import (
    ExecutionError,
    InvalidRequestError,
    MemoryLimitError,
    NotServedError,
    RegionExistsError,
    ServeError,
    UnknownRegionError,
    UnopenedRegionError,
)
from infer_server.gpu_tensors import GpuBuffer, GpuTensor
from infer_server.protocol.parameters import MemoryReference

OFF = "Client shared memory is disabled: start the server with --allow-client-shm"
_FOLDER = Path("/dev/shm")          # folder of shm_open()'s objects on Linux
_OWN_KEYS = ("infer_server_", "triton_python_backend_shm_region_")      # key prefixes reserved for the server
_MAX_REGIONS = 4096                 # each holds a descriptor or memory of a GPU


@dataclass(frozen=True, eq=False)
class SharedMemoryRegion(ABC):
    """Registered range of a client's memory."""
    what: ClassVar[str]                 # kind of memory: "system", "cuda"
    name: str
    byte_size: int

    @abstractmethod
    def read(self, offset: int, byte_size: int) -> bytes | memoryview:
        """Return a copy of bytes of the region. Raises InvalidRequestError, ExecutionError."""

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Write data to the region. Raises InvalidRequestError, ExecutionError."""

    def in_place(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any],
                 devices: Set[int | None]) -> GpuTensor | ChangingArray | None:
        """Return a tensor in place if its memory is on one of `devices` (GPU indices; None is the host), else None."""
        return None

    def truncation_error(self, offset: int, byte_size: int) -> ServeError | None:
        """Return an error if a tensor that was just read in place was not complete, else None."""
        return None

    def gpu_buffer(self, offset: int, byte_size: int, dtype: np.dtype[Any]) -> GpuBuffer | None:
        """Return the buffer of an output if the region is on a GPU, else None."""
        return None

    def check(self, offset: int, byte_size: int) -> None:
        """Raise InvalidRequestError if the bytes are not all inside the region."""
        if not 0 <= offset < max(1, self.byte_size):
            raise InvalidRequestError(f"Invalid offset for shared memory region: '{self.name}': {offset} of "
                                      f"{self.byte_size} bytes")
        if not 0 <= byte_size <= self.byte_size - offset:
            raise InvalidRequestError(f"Invalid offset + byte size for shared memory region: '{self.name}': {offset} + "
                                      f"{byte_size} of {self.byte_size} bytes")


@dataclass(frozen=True, eq=False)
class SystemRegion(SharedMemoryRegion):
    """Region in host memory; its descriptor is closed with the last reference to it."""
    what: ClassVar[str] = "system"
    key: str
    offset: int                         # offset in the client's shared memory object
    descriptor: int = field(repr=False)
    mapping: Mapping | None = field(repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)

    def in_place(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any],
                 devices: Set[int | None]) -> ChangingArray | None:
        if None not in devices or self.mapping is None or self.mapping.is_lost:
            return None
        tensor = ChangingArray(shape, dtype, self.mapping.bytes, offset)
        tensor.address = self.mapping.address + offset
        return tensor

    def truncation_error(self, offset: int, byte_size: int) -> ServeError | None:
        lost = self.mapping is not None and self.mapping.is_lost        # the file may have been extended again
        if lost or os.fstat(self.descriptor).st_size < self.offset + offset + byte_size:   # the rest of a page is zeros
            return self._shrunk()
        return None

    def read(self, offset: int, byte_size: int) -> bytes:
        self.check(offset, byte_size)
        if self.mapping and not self.mapping.is_lost:
            data = bytes(self.mapping.bytes[offset:offset + byte_size])
            if error := self.truncation_error(offset, byte_size):
                raise error
            return data
        pieces: list[bytes] = []
        at = self.offset + offset
        end = at + byte_size
        while at < end:                 # Linux reads at most 2 GiB at a time
            piece = os.pread(self.descriptor, end - at, at)
            if not piece:
                raise self._shrunk()
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    def write(self, offset: int, data: memoryview) -> None:
        self.check(offset, data.nbytes)
        at = self.offset + offset
        end = at + data.nbytes
        if os.fstat(self.descriptor).st_size < end:         # a write would extend the file
            raise self._shrunk()
        try:
            while at < end:             # Linux writes at most 2 GiB at a time
                at += os.pwrite(self.descriptor, data[at - end:], at)
        except OSError as error:
            raise ExecutionError(f"shared memory region '{self.name}': {error.strerror}") from error

    def _shrunk(self) -> InvalidRequestError:
        return InvalidRequestError(f"shared memory region '{self.name}' is shorter than it was when it was registered")


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Location of a tensor in a region."""
    region: SharedMemoryRegion
    offset: int
    byte_size: int

    def read(self) -> memoryview:
        return memoryview(self.region.read(self.offset, self.byte_size))

    def truncation_error(self) -> ServeError | None:
        """Return an error if the tensor, just read in place, was not complete (see SharedMemoryRegion)."""
        return self.region.truncation_error(self.offset, self.byte_size)

    def write(self, data: memoryview, tensor: str) -> None:
        if data.nbytes > self.byte_size:
            raise InvalidRequestError(f"shared memory size specified with the request for output '{tensor}' "
                                      f"({self.byte_size} bytes) should be at least {data.nbytes} bytes to hold the "
                                      "results")
        self.region.write(self.offset, data)


R = TypeVar("R", bound=SharedMemoryRegion)


class Regions:
    """Registered regions of every kind by name. Not thread-safe: belongs to the event loop."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        if allowed:
            guard()                     # compiled now rather than while requests wait
        self._regions: dict[str, SharedMemoryRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a region of host memory.

        Raises NotServedError, RegionExistsError, InvalidRequestError, MemoryLimitError.
        """
        self.check_addition(name, "system")
        descriptor = _opened(name, key, offset, byte_size)
        self.add(SystemRegion(name, byte_size, key, offset, descriptor, mapped(descriptor, offset, byte_size)))

    def check_addition(self, name: str, kind: str) -> None:
        """Check that a region of a name may be registered.

        Raises NotServedError, RegionExistsError, InvalidRequestError, MemoryLimitError.
        """
        self._check_allowed()
        if not name:
            raise InvalidRequestError("failed to register shared memory region: invalid args: 'region name' is "
                                      f"necessary to register {kind} shared memory region")
        if name in self._regions:
            raise RegionExistsError(f"shared memory region '{name}' already in manager")
        if len(self._regions) >= _MAX_REGIONS:
            raise MemoryLimitError(f"{_MAX_REGIONS} regions of shared memory are registered; unregister some")

    def add(self, region: SharedMemoryRegion) -> None:
        self._regions[region.name] = region

    def unregister(self, kind: type[SharedMemoryRegion], name: str) -> None:
        """Unregister a region, or all of a kind (""). Executing requests keep using it. Raises NotServedError."""
        self._check_allowed()
        for region in self._those(kind, name):
            del self._regions[region.name]

    def registered(self, kind: type[R], name: str = "") -> list[R]:
        """Return the region of a name, or all of a kind (""). Raises UnknownRegionError."""
        regions = self._those(kind, name)
        if name and not regions:
            raise UnknownRegionError(f"Unable to find {kind.what} shared memory region: '{name}'")
        return regions

    def _those(self, kind: type[R], name: str) -> list[R]:
        return [region for region in self._regions.values() if isinstance(region, kind) and name in ("", region.name)]

    def locate(self, reference: MemoryReference) -> TensorLocation:
        """Return the location that a request refers to.

        Raises NotServedError, UnknownRegionError, or InvalidRequestError if it is not inside the region.
        """
        self._check_allowed()
        name, offset, byte_size = reference
        region = self._regions.get(name)
        if region is None:
            raise UnknownRegionError(f"Unable to find shared memory region: '{name}'")
        region.check(offset, byte_size)
        return TensorLocation(region, offset, byte_size)

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise NotServedError(OFF)


def _opened(name: str, key: str, offset: int, byte_size: int) -> int:
    """Open a client's shared memory object and return its descriptor.

    Raises InvalidRequestError for an invalid key or range, UnopenedRegionError if it cannot be opened.
    """
    file = key.removeprefix("/")
    for prefix in _OWN_KEYS:
        if key.lstrip("/").startswith(prefix):
            raise InvalidRequestError(f"cannot register shared memory region '{name}' with key '{key}' as the key "
                                      f"contains the reserved prefix '{prefix}'")
    if not file or "/" in file or "\0" in file or file in (".", "..") or len(os.fsencode(file)) > 255:
        raise InvalidRequestError(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
    try:
        descriptor = os.open(_FOLDER / file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise UnopenedRegionError(f"Unable to open shared memory region: '{key}': {error.strerror}") from error
    status = os.fstat(descriptor)
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    if offset >= 0 and 0 < byte_size <= size - offset:
        return descriptor
    os.close(descriptor)
    raise InvalidRequestError(f"failed to register shared memory region '{name}': invalid args: {byte_size} bytes at "
                              f"{offset} of '{key}', which has {size}")
