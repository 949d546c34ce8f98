"""Phases and readiness of the server, for health checks and watchers."""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from enum import Enum


class ServerPhase(Enum):
    """Phase of the server."""
    STARTING = "starting"       # models are being loaded; ready ones are served
    READY = "ready"             # all models are loaded or have failed
    DRAINING = "draining"       # reports not ready, still accepts requests
    STOPPED = "stopped"         # accepts no new requests


class StartUp:
    """Durations of the phases of the server's start: importing, listening, loading."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}      # start of each phase in progress
        self._secs: dict[str, float] = {}       # duration of each phase that has ended

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
        """Return the seconds of each phase that has begun, up to now for a phase in progress."""
        now = time.monotonic()
        return {**self._secs, **{name: now - began for name, began in self._began.items()}}


class Lifecycle:
    """Phase and readiness of the server. Belongs to the event loop."""

    def __init__(self, are_models_ready: Callable[[], bool] = lambda: True,
                 has_repository: Callable[[], bool] = lambda: True,
                 has_memory: Callable[[], bool] = lambda: True,
                 retries: Callable[[], bool] = lambda: False) -> None:
        """Begin in the phase STARTING; changes of the predicates are reported with changed().

        Parameters
        ----------
        are_models_ready : callable
            Returns False if a model has failed; called after all models are loaded or have failed.
        has_repository : callable
            Returns False if the repository cannot be read.
        has_memory : callable
            Returns False if the memory for requests is used up.
        retries : callable
            Returns True if a repository that cannot be read is tried again, so that a restart would not help.
        """
        self._are_models_ready, self._has_repository = are_models_ready, has_repository
        self._has_memory, self._retries = has_memory, retries
        self.phase = ServerPhase.STARTING               # changed by enter()
        self.startup = StartUp()
        self._changed = asyncio.Event()

    @property
    def live(self) -> bool:
        """False if the repository cannot be read, so that the server should be restarted."""
        return self._has_repository() or self._retries()

    @property
    def ready(self) -> bool:
        return (self.phase is ServerPhase.READY and self._has_repository() and self._are_models_ready()
                and self._has_memory())

    def enter(self, phase: ServerPhase) -> None:
        self.phase = phase
        self.changed()

    def changed(self) -> None:
        """Notify the watchers that readiness may have changed."""
        # Current waiters hold the old event; later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def readiness(self) -> AsyncIterator[bool]:
        """Yield the readiness now and after each change; ends after STOPPED."""
        while True:
            phase, changed = self.phase, self._changed
            yield self.ready
            if phase is ServerPhase.STOPPED:
                return
            await changed.wait()
