"""The phases of the server and its readiness, for checks and for those who wait for a change."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from enum import Enum


class ServerPhase(Enum):
    STARTING = "starting"       # models are being loaded; those that are ready are served
    READY = "ready"             # all are loaded, or have failed
    DRAINING = "draining"       # not ready any more, and still answering
    STOPPED = "stopped"         # nothing new is accepted


class Lifecycle:
    """Belongs to the event loop."""

    def __init__(self, are_models_ready: Callable[[], bool] = lambda: True) -> None:
        """are_models_ready: asked once all models are loaded or have failed; its changes are told by changed()."""
        self._are_models_ready = are_models_ready
        self.phase = ServerPhase.STARTING               # changed by enter()
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.phase is ServerPhase.READY and self._are_models_ready()

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
