"""The phases of the server and its readiness, for checks and for those who wait for a change."""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from enum import Enum


class ServerPhase(Enum):
    STARTING = "starting"       # models are being loaded; those that are ready are served
    READY = "ready"             # all are loaded, or have failed
    DRAINING = "draining"       # not ready any more, and still answering
    STOPPED = "stopped"         # nothing new is accepted


class StartUp:
    """Durations of the phases of the server's start: importing, listening, loading."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}      # phases that go on
        self._secs: dict[str, float] = {}       # phases that have ended

    def took(self, phase: str, secs: float) -> None:
        self._secs[phase] = secs

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._began[name] = time.monotonic()
        try:
            yield
        finally:
            self._secs[name] = time.monotonic() - self._began.pop(name)

    def durations(self) -> dict[str, float]:
        """Return the seconds of each phase that has begun, up to now of one that goes on."""
        now = time.monotonic()
        return {**self._secs, **{name: now - began for name, began in self._began.items()}}


class Lifecycle:
    """Belongs to the event loop."""

    def __init__(self, are_models_ready: Callable[[], bool] = lambda: True,
                 has_repository: Callable[[], bool] = lambda: True,
                 has_memory: Callable[[], bool] = lambda: True) -> None:
        """are_models_ready: asked once all models are loaded or have failed. has_repository: whether it could be read.
        has_memory: whether there is room for requests. Their changes are told by changed()."""
        self._are_models_ready, self._has_repository = are_models_ready, has_repository
        self._has_memory = has_memory
        self.phase = ServerPhase.STARTING               # changed by enter()
        self.startup = StartUp()
        self._changed = asyncio.Event()

    @property
    def live(self) -> bool:
        """Whether it serves, or may yet: one that could not read what to serve is to be started anew."""
        return self._has_repository()

    @property
    def ready(self) -> bool:
        return self.phase is ServerPhase.READY and self.live and self._are_models_ready() and self._has_memory()

    def enter(self, phase: ServerPhase) -> None:
        self.phase = phase
        self.changed()

    def changed(self) -> None:
        """To be called when readiness may have changed; tells those who watch it."""
        # Whoever waits holds the old event; whoever comes later waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def readiness(self) -> AsyncIterator[bool]:
        """Yields whether the server is ready: now, and after each change; ends after STOPPED."""
        while True:
            phase, changed = self.phase, self._changed
            yield self.ready
            if phase is ServerPhase.STOPPED:
                return
            await changed.wait()
