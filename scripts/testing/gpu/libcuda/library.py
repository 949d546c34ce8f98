"""Emulated library: checks of calls, handles and streams."""
from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from infer_server.engines.ir.graph import Array
from scripts.testing.gpu.ptx.machine import Machine
from scripts.testing.gpu.ptx.memory import BASE, Memory
from scripts.testing.gpu.ptx.text import Kernel

Clock = Callable[[Kernel, tuple[int, int], int], float]     # seconds of a launch: its kernel, grid, threads of a block
Task = Callable[[], None]

LEGACY = 1                      # handle of the default stream
DEFAULT_SHARED_BYTES = 48 << 10  # bytes of shared memory that need no attribute
INVALID, MEMORY, NOT_BEGUN, ORDINAL, IMAGE, CONTEXT, NO_BINARY, BAD_PTX, OLD = (
    1, 2, 3, 101, 200, 201, 209, 218, 222)
HANDLE, NOT_FOUND, RESOURCES, LOST, CAPTURING, CAPTURE_OVER = 400, 500, 701, 719, 900, 901
TEXTS = {INVALID: "invalid argument", MEMORY: "out of memory", NOT_BEGUN: "initialization error",
         ORDINAL: "invalid device ordinal", CONTEXT: "invalid device context",
         IMAGE: "device kernel image is invalid",
         NO_BINARY: "no kernel image is available for execution on the device", BAD_PTX: "a PTX JIT compilation failed",
         OLD: "the provided PTX was compiled with an unsupported toolchain.", HANDLE: "invalid resource handle",
         NOT_FOUND: "named symbol not found", RESOURCES: "too many resources requested for launch",
         LOST: "unspecified launch failure", CAPTURING: "operation not permitted when stream is capturing",
         CAPTURE_OVER: "operation failed due to a previous error during capture"}


class Refused(Exception):
    """Exception with the status code that the call returns."""


@dataclass(frozen=True)
class Out:
    """Argument that receives a result."""
    type: Any


TABLE = object()                # type of an argument that is an array, or bytes
CALLS: dict[str, tuple[Callable[..., None], tuple[Any, ...], bool]] = {}


def call(*kinds: Any, anywhere: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function of the API with its argument types. anywhere: it needs no context."""
    def register(function: Callable[..., None]) -> Callable[..., None]:
        CALLS[function.__name__] = function, kinds, anywhere
        return function
    return register


USED = threading.local()        # stack of contexts of each thread


def used() -> Libcuda | None:
    """Return the GPU of the calling thread's context."""
    return USED.stack[-1] if getattr(USED, "stack", None) else None


@dataclass
class Stream:
    tasks: list[Task] = field(default_factory=list)
    captured: list[tuple[Task, float]] | None = None
    spoiled: bool = False           # True if a forbidden call has ended the capture
    timed: Event | None = None      # launches after this event only advance the clock, and do not run
    seconds: float = 0.0

    def put(self, task: Task, seconds: float = 0.0) -> None:
        if self.captured is not None:
            self.captured.append((task, seconds))
        elif self.timed:
            self.seconds += seconds
        else:
            self.tasks.append(task)

    def finish(self, left: int = 0) -> None:
        """Run all tasks but the last `left` ones."""
        while len(self.tasks) > left:
            self.tasks.pop(0)()


@dataclass
class Event:
    at: float | None = None         # time on the stream's clock
    stream: Stream | None = None


@dataclass
class Graph:
    tasks: list[tuple[Task, float]]


@dataclass
class Ready(Graph):
    """A graph that can be launched."""


@dataclass
class Function:
    kernel: Kernel
    max_shared: int = DEFAULT_SHARED_BYTES


class Libcuda:
    """libcuda of a machine with one GPU, with the API's functions as attributes."""

    def __init__(self, architecture: str, size: int, name: str, clock: Clock) -> None:
        self.architecture, self.name, self.clock = architecture.rstrip("a"), name, clock
        self.memory = Memory(size)
        self.machine = Machine(self.memory)
        self.allocated: dict[int, int] = {}     # address -> bytes
        self.pinned: dict[int, Array] = {}      # by address
        self.shared: dict[bytes, int] = {}      # address, by handle
        self.opened: list[int] = []             # memory handles opened from other processes
        self.lost = False                       # after a hardware error, every call fails
        self.version, self.ptx = 13000, 9.0  # CUDA version that the driver reports; latest PTX version that it compiles
        self.refusal = IMAGE                    # status for machine code, which it cannot run ...
        self.lazy = False                       # ... returned by the lookup of a kernel instead of the load
        self.copies: Counter[str] = Counter()   # copied bytes by direction
        self.objects: dict[int, Any] = {LEGACY: Stream()}
        self._lock, self._last, self._process = threading.RLock(), 0x1000, os.getpid()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in CALLS:
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> int:
        function, kinds, anywhere = CALLS[name]
        assert len(arguments) == len(kinds), f"{name} takes {len(kinds)} arguments"
        plain = [_plain(name, argument, kind) for argument, kind in zip(arguments, kinds, strict=True)]
        try:
            if os.getpid() != self._process and name != "cuGetErrorString":
                raise Refused(NOT_BEGUN)
            if self.lost and name != "cuGetErrorString":
                raise Refused(LOST)
            if not anywhere and used() is not self:
                raise Refused(CONTEXT)
            with self._lock:
                function(self, *plain)
        except Refused as refused:
            status: int = refused.args[0]
            return status
        return 0

    # ---- handles
    def new(self, object_: Any) -> int:
        self._last += 16
        self.objects[self._last] = object_
        return self._last

    def get(self, handle: int | None, kind: type[Any]) -> Any:
        object_ = self.objects.get(handle or (LEGACY if kind is Stream else 0))
        if type(object_) is not kind:
            raise Refused(HANDLE)
        return object_

    def drop(self, handle: int, kind: type[Any]) -> None:
        self.get(handle, kind)
        del self.objects[handle]

    def stream(self, handle: int | None) -> Stream:
        stream: Stream = self.get(handle, Stream)
        return stream

    def wait_for(self, stream: Stream) -> None:
        """Finish a stream's tasks, with those of the legacy stream interleaved.

        Waiting for a stream that is being captured ends the capture with an error.
        """
        if stream.captured is not None:
            stream.spoiled = True
            raise Refused(CAPTURING)
        stream.finish(len(stream.tasks) // 2)
        self.stream(None).finish()
        stream.finish()

    # ---- memory
    def bytes_at(self, address: int, size: int) -> Array:
        inside = self.memory.owned[address - BASE:address - BASE + size]
        if address < BASE or len(inside) != size or not inside.all():
            raise Refused(INVALID)
        return self.memory.array(address, np.uint8, (size,))


def _plain(name: str, argument: Any, kind: Any) -> Any:
    """Return the argument without its ctypes wrapper, after a check of its type."""
    if isinstance(kind, Out):
        assert isinstance(getattr(argument, "_obj", None), kind.type), f"{name}: {argument} is no reference to {kind}"
        return argument._obj
    if kind is TABLE:
        assert argument is None or isinstance(argument, (bytes, ctypes.Array)), f"{name}: {argument}"
        return argument
    assert type(argument) is kind, f"{name}: {argument} is no {kind.__name__}"
    return argument if issubclass(kind, ctypes.Structure) else argument.value
