"""The phases of the server, for readiness checks and for those who wait for a change of phase."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import Enum


class Phase(Enum):
    STARTING = "starting"       # models are being loaded; those that are ready are served
    READY = "ready"
    DRAINING = "draining"       # not ready any more, and still answering
    STOPPED = "stopped"         # nothing new is accepted


class Lifecycle:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._phase = Phase.STARTING
        self._changed = asyncio.Event()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def ready(self) -> bool:
        return self._phase is Phase.READY

    def enter(self, phase: Phase) -> None:
        self._phase = phase
        # Whoever waits holds the old event; whoever comes later waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def phases(self) -> AsyncIterator[Phase]:
        """The phase now, and each one entered from now on; ends after STOPPED."""
        while True:
            phase, changed = self._phase, self._changed
            yield phase
            if phase is Phase.STOPPED:
                return
            await changed.wait()
