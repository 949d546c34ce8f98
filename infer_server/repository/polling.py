"""Looks for what has changed in the repository, from time to time: model control mode poll.

A model is loaded when its files are as they were at the look before: what is still being copied is let alone, and what
was loaded goes on. One that cannot be loaded is tried again when it changes; one that could not be copied, at each
look.
"""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Hashable, Mapping, Sequence

from infer_server.errors import FetchError, RepositoryError, ServeError
from infer_server.repository.places import Place
from infer_server.repository.repository import Repository
from infer_server.workers import in_daemon_thread

log = logging.getLogger(__name__)

_SETTLING_SECS = 1.0            # from a look that finds a change to the next one


class Poller:
    """Belongs to the event loop."""

    def __init__(self, repository: Repository, places: Sequence[Place], secs: float) -> None:
        """secs: between two looks."""
        self._repository, self._places, self._secs = repository, places, secs
        self._loaded: dict[str, Hashable] = {}          # as they were when they were loaded, or could not be
        self._seen: Mapping[str, Hashable] = {}         # as they were at the last look
        self._reported = ""
        self.has_looked = False                         # and could read all places

    async def begin(self) -> None:
        """To be called before the models are first loaded."""
        self._loaded = dict(await self._look())

    async def run(self) -> None:
        """Looks until it is cancelled."""
        unsettled = False
        while True:
            await asyncio.sleep(min(_SETTLING_SECS, self._secs) if unsettled else self._secs)
            try:
                unsettled = await self.look()
            except Exception:                           # our bug; the next look may go better
                log.exception("polling failed")

    async def look(self) -> bool:
        """Loads and unloads what has changed. True: something still changes."""
        try:
            found = await self._look()
        except RepositoryError as error:                # it may be back at the next look
            if str(error) != self._reported:
                log.warning("polling: %s", error)
            self._reported = str(error)
            return False
        self._reported, seen, self._seen = "", self._seen, found
        changed = [name for name in found
                   if found[name] != self._loaded.get(name) or name in self._repository.unfetched]
        for name in changed:
            if found[name] == seen.get(name):
                self._loaded[name] = found[name]
                await self._quietly(self._repository.load(name))
        for name in self._loaded.keys() - found.keys():
            del self._loaded[name]
            await self._quietly(self._repository.unload(name))
        return any(found[name] != seen.get(name) for name in changed)

    async def _quietly(self, change: Awaitable[None]) -> None:
        try:
            await change
        except ServeError as error:                     # which the log has, and the index
            log.debug("polling: %s", error)
        except Exception:                               # our bug, which the other models must not notice
            log.exception("polling failed")

    async def _look(self) -> Mapping[str, Hashable]:
        found = await in_daemon_thread(self._fingerprints)
        self.has_looked = True
        return found

    def _fingerprints(self) -> Mapping[str, Hashable]:
        """Of each model, in all places that have it: when one has it no more, another may be served."""
        found: dict[str, tuple[Hashable, ...]] = {}
        for place in self._places:
            for name in place.names():
                found[name] = (*found.get(name, ()), str(place), _fingerprint(place, name))
        return found


def _fingerprint(place: Place, name: str) -> Hashable:
    """Raises FetchError."""
    try:
        return place.fingerprint(name)
    except FetchError:
        raise
    except RepositoryError as error:        # of this model alone: its load says what is wrong, and the others go on
        return str(error)
