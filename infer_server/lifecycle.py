"""The phases of the server and its readiness, for checks and for those who wait for a change."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from enum import Enum


class Phase(Enum):
    STARTING = "starting"       # models are being loaded; those that are ready are served
    READY = "ready"             # all are loaded, or have failed
    DRAINING = "draining"       # not ready any more, and still answering
    STOPPED = "stopped"         # nothing new is accepted


class Lifecycle:
    """Belongs to the event loop."""

    def __init__(self, are_models_ready: Callable[[], bool] = lambda: True) -> None:
        """are_models_ready: asked once all models are loaded or have failed; its changes are told by changed()."""
        self._are_models_ready = are_models_ready
        self._phase = Phase.STARTING
        self._changed = asyncio.Event()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def ready(self) -> bool:
        return self._phase is Phase.READY and self._are_models_ready()

    def enter(self, phase: Phase) -> None:
        self._phase = phase
        self.changed()

    def changed(self) -> None:
        """Readiness may be another than before."""
        # Whoever waits holds the old event; whoever comes later waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def readiness(self) -> AsyncIterator[bool]:
        """Whether it is ready: now, and after each change from now on; ends after STOPPED."""
        while True:
            phase, changed = self._phase, self._changed
            yield self.ready
            if phase is Phase.STOPPED:
                return
            await changed.wait()
