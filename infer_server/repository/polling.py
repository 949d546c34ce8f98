"""Poll the repository for changed models (model control mode poll).

A model is loaded once its files are unchanged between two polls, so that a copy in progress is not read; the loaded
versions keep serving meanwhile. A model that failed to load is tried again when its files change; one that failed to
copy, at each poll.
"""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import suppress

from infer_server.errors import FetchError, RepositoryError, ServeError
from infer_server.repository.repository import Repository
from infer_server.repository.roots import RepositoryRoot
from infer_server.workers import in_daemon_thread

log = logging.getLogger(__name__)

_SETTLING_SECS = 1.0            # delay between polls while files change


class Poller:
    """Repository poller. Belongs to the event loop."""

    def __init__(self, repository: Repository, roots: Sequence[RepositoryRoot], secs: float) -> None:
        """Poll `roots` every `secs` seconds; `repository` loads and unloads the models."""
        self._repository, self._roots, self._secs = repository, roots, secs
        self._loaded: dict[str, Hashable] = {}          # fingerprint at the last load attempt, by model
        self._seen: Mapping[str, Hashable] = {}         # fingerprint at the last poll, by model
        self._reported = ""
        self.has_polled = False                         # True after a poll that could read all repositories

    async def begin(self) -> None:
        """Record the initial fingerprints, if the repository can be read; call this before models are first loaded."""
        with suppress(RepositoryError):                 # loading reports it
            self._loaded = dict(await self._read_fingerprints())

    async def run(self) -> None:
        """Poll until cancelled."""
        unsettled = False
        while True:
            await asyncio.sleep(min(_SETTLING_SECS, self._secs) if unsettled else self._secs)
            try:
                unsettled = await self.poll()
            except Exception:                           # an internal error; the next poll may succeed
                log.exception("polling failed")

    async def poll(self) -> bool:
        """Poll once: load changed models, unload removed ones. Return True if files are still changing."""
        try:
            current = await self._read_fingerprints()
        except RepositoryError as error:                # the repository may be reachable again at the next poll
            if str(error) != self._reported:
                log.warning("polling: %s", error)
            self._reported = str(error)
            return False
        self._reported, seen, self._seen = "", self._seen, current
        changed = [name for name in current
                   if current[name] != self._loaded.get(name) or name in self._repository.unfetched]
        for name in changed:
            if current[name] == seen.get(name):
                self._loaded[name] = current[name]
                await self._quietly(self._repository.load(name))
        for name in self._loaded.keys() - current.keys():
            del self._loaded[name]
            await self._quietly(self._repository.unload(name))
        return any(current[name] != seen.get(name) for name in changed)

    async def _quietly(self, change: Awaitable[None]) -> None:
        try:
            await change
        except ServeError as error:                     # already logged, and shown in the index
            log.debug("polling: %s", error)
        except Exception:                               # an internal error, which must not affect other models
            log.exception("polling failed")

    async def _read_fingerprints(self) -> Mapping[str, Hashable]:
        fingerprints = await in_daemon_thread(self._fingerprints)
        self.has_polled = True
        return fingerprints

    def _fingerprints(self) -> Mapping[str, Hashable]:
        """Return a fingerprint of each model over all repositories that contain it."""
        fingerprints: dict[str, tuple[Hashable, ...]] = {}
        for root in self._roots:
            for name in root.names():
                fingerprints[name] = (*fingerprints.get(name, ()), str(root), _fingerprint(root, name))
        return fingerprints


async def load_when_reachable(roots: Sequence[RepositoryRoot], secs: float, load: Callable[[], Awaitable[None]]
                              ) -> None:
    """Ask roots that could not be read again every `secs` seconds, and call `load` when all of them can.

    `load` is called again if it raises RepositoryError, or OSError for a port that cannot be opened.
    """
    while True:
        await asyncio.sleep(secs)
        try:
            await in_daemon_thread(lambda: [root.names() for root in roots])
            await load()
            return
        except RepositoryError as error:
            log.debug("%s; it is asked again in %g s", error, secs)
        except OSError as error:
            log.error("%s", error)


async def load_unfetched(repository: Repository, secs: float) -> None:
    """Load models whose copy failed again every `secs` seconds, until there are none."""
    while repository.unfetched:
        await asyncio.sleep(secs)
        for name in sorted(repository.unfetched):
            with suppress(ServeError):                  # logged by the repository
                await repository.load(name)


def _fingerprint(root: RepositoryRoot, name: str) -> Hashable:
    """Return a model's fingerprint, or the error message if the model itself is invalid. Raises FetchError."""
    try:
        return root.fingerprint(name)
    except FetchError:
        raise
    except RepositoryError as error:        # concerns only this model: its load reports the reason
        return str(error)
