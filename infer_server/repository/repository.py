"""Repository of models and the state of each version: loading, ready, unloading, or unavailable with a reason.

Everything belongs to the event loop; blocking work (reading, building, loading, draining) runs on worker threads.
"""
from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from infer_server.config.kinds import ModelKind
from infer_server.config.steps import EnsembleStep, called_models
from infer_server.errors import (
    FetchError,
    RepositoryError,
    ServeError,
    UnavailableError,
    UnknownModelError,
)
from infer_server.protocol.redaction import redacted
from infer_server.protos import model_config
from infer_server.repository.folders import Fingerprint, Source, after_load, checked_read, fingerprints, read_model
from infer_server.repository.model import Model, Status, VersionState, loaded_version
from infer_server.repository.overrides import read_temporary, temporary_repository
from infer_server.repository.roots import AMBIGUOUS, RepositoryRoot, model_names, root_of
from infer_server.workers import AdjustableSemaphore, WaitGraph, in_daemon_thread

log = logging.getLogger(__name__)

LOAD_FAILED = "load failed for model"       # Triton's message
_UNLOADED = "unloaded"  # reason of versions that were unloaded on request
LOADS = 2               # default number of parallel loads: a build of minutes does not hold up all others
MAX_LOADS = 64          # maximum number of parallel loads
_READS = 16             # parallel reads and copies of model folders, which bounds the worker threads


@dataclass(frozen=True)
class IndexEntry:
    """Entry of the repository index."""
    name: str
    version: str                        # "" if no version is known
    state: str                          # "" if the model was never loaded
    reason: str


class Repository:
    """Models of one or more repositories. `find`, which every request calls, costs two dictionary lookups."""

    def __init__(self, roots: Sequence[RepositoryRoot], load: Callable[[Source], Model], config_name: str = "",
                 loads: int = LOADS) -> None:
        """Serve models from `roots` with up to `loads` parallel calls of `load`, which blocks.

        config_name is the value of --model-config-name; see `read_model`.
        """
        self.roots = roots
        self._config_name = config_name
        self._load = load
        self._watchers: list[Callable[[], None]] = []
        self._versions: dict[str, dict[int, Status]] = {}
        self._reasons: dict[str, str] = {}                  # reasons of models that failed before a version was found
        self._locks: dict[str, asyncio.Lock] = {}           # by model, while it is loaded or unloaded
        self._users = Counter[str]()                        # holders and waiters of each lock
        self._drains = set[asyncio.Future[None]]()          # in progress
        self._closed = False
        self.is_listed = True                               # False until load_all() knows what it loads
        self._starting: dict[str, asyncio.Future[None]] = {}    # loads of load_all
        self._needed = Counter[str]()                       # models called by ensembles that are being loaded
        self.waiting = WaitGraph().waiting
        self._loads, self._reads = AdjustableSemaphore(loads), asyncio.Semaphore(_READS)
        self.unfetched = set[str]()             # models whose last copy failed and may succeed on a retry

    def watch(self, changed: Callable[[], None]) -> None:
        """Register a callback for changes of the state of any model."""
        self._watchers.append(changed)

    def _changed(self) -> None:
        for changed in self._watchers:
            changed()

    def find(self, name: str, version: str = "") -> Model:
        """Return a ready model: the given version, or the highest ready one.

        Raises
        ------
        UnknownModelError
            The model or version does not exist, or no version could be loaded; the message has the reason.
        UnavailableError
            The version is not ready, or the server is starting and may load the model yet.
        InvalidRequestError
            The version is not a positive integer.
        """
        statuses = self._versions.get(name)
        if statuses is None:
            raise self._without_versions(name)
        if version:
            return loaded_version(name, version, statuses)
        for status in statuses.values():        # highest first
            if status.model is not None:
                return status.model
        highest = next(iter(statuses.values()))
        error = UnknownModelError if highest.state is VersionState.UNAVAILABLE else UnavailableError
        raise error(f"Request for unknown model: '{name}' has no available versions: {highest.why}")

    def _without_versions(self, name: str) -> ServeError:
        """Return the error of requests for a model that has no versions, perhaps because it waits to be loaded."""
        loading = self._starting.get(name)
        if not self.is_listed or (loading and not loading.done()):
            return UnavailableError(f"Request for unknown model: '{name}' is not at ready state: the server is "
                                    "starting; retry later")
        why = f"has no available versions: {self._reasons[name]}" if name in self._reasons else "is not found"
        return UnknownModelError(f"Request for unknown model: '{name}' {why}")

    def versions(self, name: str) -> list[int]:
        """Return the ready versions of a model, lowest first."""
        return sorted(number for number, status in self._versions.get(name, {}).items() if status.model is not None)

    def models(self) -> list[Model]:
        """Return all ready models; the versions of a model in ascending order."""
        return [status.model for statuses in self._versions.values()
                for _, status in sorted(statuses.items()) if status.model]

    def needed(self) -> set[str]:
        """Return the models that an ensemble calls while it is being loaded."""
        return set(self._needed)

    def failures(self) -> dict[str, str]:
        """Return the reasons why models are not served, by "name" or "name version n"."""
        failed = {f"{name} version {version}": status.reason
                  for name, statuses in self._versions.items() for version, status in statuses.items()
                  if status.state is VersionState.UNAVAILABLE and status.reason != _UNLOADED and not status.replaces}
        return {**self._reasons, **failed}

    async def names(self) -> list[str]:
        """Return the models in the repositories, loaded or not. Raises RepositoryError if one cannot be read."""
        return sorted(set(await in_daemon_thread(lambda: model_names(self.roots))))

    def known(self) -> list[IndexEntry]:
        """Return the versions whose load was requested, with their state."""
        entries = [IndexEntry(name, str(version), status.state.value, status.reason)
                   for name, statuses in self._versions.items() for version, status in statuses.items()]
        return entries + [IndexEntry(name, "", VersionState.UNAVAILABLE.value, reason)
                          for name, reason in self._reasons.items()]

    async def index(self) -> list[IndexEntry]:
        """Return every model in the repositories, loaded or not, sorted by name and version."""
        entries = self.known()
        known = self._versions.keys() | self._reasons.keys()
        for name, count in Counter(await in_daemon_thread(lambda: model_names(self.roots))).items():
            if name not in known:
                entries.append(IndexEntry(name, "", "", "") if count == 1 else IndexEntry(
                    name, "", VersionState.UNAVAILABLE.value, AMBIGUOUS))
        return sorted(entries, key=lambda entry: (entry.name, entry.version))

    async def load_all(self, names: Iterable[str] | None = None) -> None:
        """Load models, by default all; log and record failures. Raises RepositoryError if listing them fails."""
        if names is None:
            names = await self.names()
            if not names:
                log.warning("there is no model in %s; a model is a folder with a folder for each version",
                            ", ".join(map(str, self.roots)))
        names, self.is_listed = list(dict.fromkeys(names)), True
        self._starting = {name: asyncio.ensure_future(self.load(name)) for name in names}
        results = await asyncio.gather(*self._starting.values(), return_exceptions=True)
        self._starting = {}
        for name, result in zip(names, results, strict=True):
            if isinstance(result, UnknownModelError):       # load() has logged all other failures
                self._reasons[name] = redacted(str(result))
                log.error("%s", result)
            elif isinstance(result, BaseException) and not isinstance(result, ServeError):
                raise result

    async def load(self, name: str, message: model_config.ModelConfig | None = None,
                   files: Mapping[str, bytes] | None = None, at_once: bool = False) -> None:
        """Load or reload a model; ready versions keep serving until their successors are ready.

        `message` replaces config.pbtxt, `files` the model's folder. at_once: do not wait for a free load slot, because
        a load that holds one may wait for this one. Raises UnknownModelError; InvalidRequestError if the files are not
        valid; RepositoryError if a version failed, after all were tried.
        """
        turn = nullcontext() if at_once else self._loads
        with self._loads.one_more() if at_once else nullcontext(), ExitStack() as until_loaded:
            if not files:
                await self._load_from(name, lambda: self._read(name, message), turn)
                return
            folder = await in_daemon_thread(lambda: until_loaded.enter_context(temporary_repository(name, files)))
            await self._load_from(name, lambda: read_temporary(folder, name, message), turn)

    async def _load_from(self, name: str, read: Callable[[], Sequence[Source]],
                         turn: AbstractAsyncContextManager[None]) -> None:
        async with self._exclusive(name):
            with ExitStack() as until_loaded:
                sources, prints = await self._ready_to_load(name, read, turn, until_loaded)
                await self._load_versions(name, sources, prints, turn)

    async def _ready_to_load(self, name: str, read: Callable[[], Sequence[Source]],
                             turn: AbstractAsyncContextManager[None], until_loaded: ExitStack
                             ) -> tuple[Sequence[Source], Mapping[int, Fingerprint]]:
        """Return the versions of a model and their fingerprints after loading the models that an ensemble calls.

        Those models are protected from eviction until `until_loaded` is closed. Raises RepositoryError.
        """
        seen = set[str]()
        try:
            async with self._reads:
                sources, prints, steps = await in_daemon_thread(lambda: self._with_steps(name, read, seen))
            self.unfetched.discard(name)
            until_loaded.enter_context(self._marked_needed(steps))
            for step in steps:
                with self.waiting(name, step):
                    await self._load_needed(step, turn is not self._loads)
        except RepositoryError as error:
            if isinstance(error, FetchError):
                self.unfetched.add(name)
            if not self.versions(name):             # replace the reasons of earlier failures
                self._versions.pop(name, None)
                self._reasons[name] = redacted(str(error))
            log.error("model '%s' cannot be loaded: %s", name, error)
            raise
        finally:
            for other in seen - self._users.keys():     # a load in progress releases its model itself
                self._release(other)
        return sources, prints

    async def _load_versions(self, name: str, sources: Sequence[Source], prints: Mapping[int, Fingerprint],
                             turn: AbstractAsyncContextManager[None]) -> None:
        """Load the versions whose files or configuration changed; the others stay loaded."""
        self._reasons.pop(name, None)
        ready = {version: status for version, status in self._versions.get(name, {}).items() if status.model}
        loading = {source.version: Status(VersionState.LOADING, replaces=bool(ready)) for source in sources}
        self._versions[name] = dict(sorted({**loading, **ready}.items(), reverse=True))
        failures = []
        for source in sources:
            fingerprint = prints[source.version]
            if (before := ready.get(source.version)) and before.matches(fingerprint):
                self._versions[name][source.version] = before.with_policy(source.message)
                if before.model:
                    before.model.loaded_ns = time.monotonic_ns()        # a use: others are evicted first
                log.info("model '%s' version %d did not change and stays loaded", name, source.version)
                continue
            try:
                await self._load_version(source, fingerprint, turn)
            except RepositoryError as error:
                failures.append(f"version {source.version} is at UNAVAILABLE state: {error}")
        if len(failures) < len(sources):        # otherwise keep the old versions: there are no others
            retired = [self._versions[name].pop(version) for version in ready.keys() - loading.keys()]
            await self._drain(status.model for status in retired if status.model)
        if failures:
            raise RepositoryError(f"{LOAD_FAILED} '{name}': {'; '.join(failures)}")

    def _read(self, name: str, message: model_config.ModelConfig | None = None) -> list[Source]:
        root = root_of(self.roots, name)
        root.fetch(name)
        return read_model(root.path, name, message, self._config_name)

    def _with_steps(self, name: str, read: Callable[[], Sequence[Source]], seen: set[str]
                    ) -> tuple[Sequence[Source], Mapping[int, Fingerprint], list[str]]:
        """Read a model: return its versions, their fingerprints, and the models that it calls, callees first. Blocks.

        Adds the names of the called models to `seen`. Raises RepositoryError if the model itself cannot be read; the
        others fail when they are loaded.
        """
        sources = checked_read(read)

        def steps_of(model: str) -> Sequence[EnsembleStep]:
            if model == name:
                return sources[0].config.steps if sources else ()
            seen.add(model)
            try:
                called = checked_read(partial(self._read, model))
            except RepositoryError:
                return ()
            return called[0].config.steps if called else ()

        return sources, checked_read(lambda: fingerprints(sources)), called_models(name, steps_of)

    async def _load_needed(self, name: str, at_once: bool) -> None:
        """Load a model that an ensemble calls unless it is ready or being loaded; log its errors."""
        if task := self._starting.get(name):
            await asyncio.wait([task])
        if self.versions(name):
            return
        try:
            await self.load(name, at_once=at_once)
        except ServeError as error:
            log.debug("a step's model '%s' is not ready: %s", name, error)

    @contextmanager
    def _marked_needed(self, steps: Sequence[str]) -> Iterator[None]:
        self._needed.update(steps)
        try:
            yield
        finally:
            self._needed -= Counter(steps)          # drops keys at zero

    async def unload(self, name: str) -> None:
        """Unload a model after it has answered all accepted requests. Raises UnknownModelError if it is not loaded."""
        async with self._exclusive(name):
            if name not in self._versions and name not in self._reasons:
                raise UnknownModelError(f"model '{name}' is not loaded")
            self._reasons.pop(name, None)
            statuses = self._versions.pop(name, {})
            if not statuses:
                return
            models = [status.model for status in statuses.values() if status.model]
            self._versions[name] = {version: Status(VersionState.UNLOADING, "unloading") for version in statuses}
            await self._drain(models)
            self._versions[name] = {version: Status(VersionState.UNAVAILABLE, _UNLOADED) for version in statuses}
            log.info("model '%s' is unloaded", name)

    async def close(self) -> None:
        """Drain all models, including those that become ready in the meantime.

        The event loop must keep running so that responses are delivered.
        """
        self._closed = True
        for kind in (ModelKind.ENSEMBLE, ModelKind.PYTHON, ModelKind.ENGINE):      # callers before callees
            await self._drain(model for model in self.models() if model.config.kind is kind)
        while self._drains:
            await asyncio.wait(self._drains)

    @asynccontextmanager
    async def _exclusive(self, name: str) -> AsyncIterator[None]:
        """Hold a model's lock; on exit release the copies of a model without ready versions and notify the watchers."""
        self._users[name] += 1
        try:
            async with self._locks.setdefault(name, asyncio.Lock()):
                try:
                    yield
                finally:
                    self._release(name)
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]
            self._changed()

    def _release(self, name: str) -> None:
        if not self.versions(name):
            for root in self.roots:
                root.release(name)

    async def _load_version(self, source: Source, fingerprint: Fingerprint,
                            turn: AbstractAsyncContextManager[None]) -> None:
        statuses = self._versions[source.name]
        before = statuses[source.version]
        try:
            async with turn:
                began = time.monotonic()
                loading = asyncio.ensure_future(in_daemon_thread(lambda: checked_read(lambda: self._load(source))))
                try:
                    model = await asyncio.shield(loading)
                except asyncio.CancelledError:
                    loading.add_done_callback(self._drain_late)     # the model would never be drained otherwise
                    raise
                if self._closed:
                    self._begin_drains([model])
                    raise RepositoryError("the server is shutting down")
                model.load_secs, model.loaded_ns = time.monotonic() - began, time.monotonic_ns()
        except RepositoryError as error:
            if before.model is None:
                statuses[source.version] = replace(before, state=VersionState.UNAVAILABLE, reason=redacted(str(error)))
            else:
                statuses[source.version] = replace(before, reason=redacted(f"serves what was loaded before: {error}"))
            log.error("model '%s' version %d cannot be loaded: %s", source.name, source.version, error)
            raise
        statuses[source.version] = Status(VersionState.READY, model=model, fingerprint=after_load(source, fingerprint))
        log.info("model '%s' version %d is ready", source.name, source.version)
        self._changed()                         # now: loading the other versions may take long

        if before.model is not None:
            await self._drain([before.model])

    def _drain_late(self, loading: asyncio.Future[Model]) -> None:
        if not loading.cancelled() and not loading.exception():
            self._begin_drains([loading.result()])

    def _begin_drains(self, models: Iterable[Model]) -> Sequence[asyncio.Future[None]]:
        drains = [asyncio.ensure_future(in_daemon_thread(model.drain)) for model in models]
        self._drains.update(drains)
        for drain in drains:
            drain.add_done_callback(self._drains.discard)
        return drains

    async def _drain(self, models: Iterable[Model]) -> None:
        if drains := self._begin_drains(models):
            await asyncio.wait(drains)
