"""The models that the server knows, and the state of each version: loading, ready, unloading, unavailable and why.

All of it belongs to the event loop; what blocks (reading, building, loading, draining) runs on worker threads.
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

from infer_server.config.kinds import Kind
from infer_server.config.steps import Step, called_models
from infer_server.errors import (
    FetchError,
    InvalidRequestError,
    RepositoryError,
    ServeError,
    UnavailableError,
    UnknownModelError,
)
from infer_server.protocol.parameters import digits
from infer_server.protocol.redaction import redacted
from infer_server.repository.folders import Fingerprint, Source, after_load, fingerprints, read_model, told
from infer_server.repository.model import Model, State, Status
from infer_server.repository.overrides import read_written, written
from infer_server.repository.places import AMBIGUOUS, Place, names_in, place_of
from infer_server.workers import Turns, Waits, in_daemon_thread
from protos import model_config

log = logging.getLogger(__name__)

LOAD_FAILED = "load failed for model"       # Triton's words for what was found, and could not be loaded
_UNLOADED = "unloaded"  # the reason of versions that were let go of when somebody asked for it
LOADS = 2               # at a time: a model that takes minutes to build does not hold up all others
MOST_LOADS = 64         # that may be asked for
_READS = 16             # likewise, of folders, or copies of them: of thousands of models, not thousands of threads


@dataclass(frozen=True)
class IndexEntry:
    name: str
    version: str                        # "" if no version of the model could even be found
    state: str                          # "" if it was never loaded
    reason: str


class Repository:
    """Folders of models. find() is the request path: two dictionary lookups."""

    def __init__(self, places: Sequence[Place], load: Callable[[Source], Model], config_name: str = "",
                 loads: int = LOADS) -> None:
        """config_name: see read_model. loads: models that are loaded at a time."""
        self._places = places
        self._config_name = config_name
        self._load = load
        self._watchers: list[Callable[[], None]] = []
        self._versions: dict[str, dict[int, Status]] = {}
        self._reasons: dict[str, str] = {}                  # of models that failed before any version was found
        self._locks: dict[str, asyncio.Lock] = {}           # one load or unload at a time, while there is one
        self._users = Counter[str]()                        # of each lock
        self._drains = set[asyncio.Future[None]]()          # that are under way
        self._closed = False
        self._starting: dict[str, asyncio.Future[None]] = {}    # the loads of load_all
        self._needed = Counter[str]()                       # by ensembles that are being loaded
        self.waiting = Waits().waiting
        self._loads, self._reads = Turns(loads), asyncio.Semaphore(_READS)
        self.unfetched = set[str]()             # models that may be copied the next time, as they were not the last

    def watch(self, changed: Callable[[], None]) -> None:
        """changed: called when the state of a model has changed."""
        self._watchers.append(changed)

    def _changed(self) -> None:
        for changed in self._watchers:
            changed()

    def find(self, name: str, version: str = "") -> Model:
        """A ready model: the version asked for, else the highest ready one.

        Raises UnknownModelError: it is not there, or none of its versions is, or will be, with the reason;
        UnavailableError for one that may yet be; InvalidRequestError for a version that is no number.
        """
        statuses = self._versions.get(name)
        if statuses is None:
            why = f"has no available versions: {self._reasons[name]}" if name in self._reasons else "is not found"
            raise UnknownModelError(f"Request for unknown model: '{name}' {why}")
        if version:
            number = digits(version)
            if number is None:
                raise InvalidRequestError(f"failed to get model version from specified version string '{version}', "
                                          "version should be an integral value > 0")
            status = statuses.get(number)
            if status is None:
                known = ", ".join(map(str, sorted(statuses)))
                raise UnknownModelError(
                    f"Request for unknown model: '{name}' version {version} is not found; it has {known}")
            if status.model is None:
                raise UnavailableError(f"Request for unknown model: '{name}' version {version} is not at ready state: "
                                       f"{_why(status)}")
            return status.model
        for status in statuses.values():        # highest first
            if status.model is not None:
                return status.model
        highest = next(iter(statuses.values()))
        error = UnknownModelError if highest.state is State.UNAVAILABLE else UnavailableError
        raise error(f"Request for unknown model: '{name}' has no available versions: {_why(highest)}")

    def versions(self, name: str) -> list[int]:
        """The ready versions of a model."""
        return sorted(number for number, status in self._versions.get(name, {}).items() if status.model is not None)

    def models(self) -> list[Model]:
        """All models that are ready, the versions of each in order."""
        return [status.model for statuses in self._versions.values()
                for _, status in sorted(statuses.items()) if status.model]

    def needed(self) -> set[str]:
        """The models that ensembles call which are being loaded."""
        return set(self._needed)

    def failures(self) -> dict[str, str]:
        """Why models that were to be served are not, by "name" or "name version n"."""
        failed = {f"{name} version {version}": status.reason
                  for name, statuses in self._versions.items() for version, status in statuses.items()
                  if status.state is State.UNAVAILABLE and status.reason != _UNLOADED and not status.replaces}
        return {**self._reasons, **failed}

    async def names(self) -> list[str]:
        """The models that are there, loaded or not. Raises RepositoryError: a place cannot be read."""
        return sorted(set(await in_daemon_thread(lambda: names_in(self._places))))

    def known(self) -> list[IndexEntry]:
        """Return the versions that are or were to be loaded."""
        entries = [IndexEntry(name, str(version), status.state.value, status.reason)
                   for name, statuses in self._versions.items() for version, status in statuses.items()]
        return entries + [IndexEntry(name, "", State.UNAVAILABLE.value, reason)
                          for name, reason in self._reasons.items()]

    async def index(self) -> list[IndexEntry]:
        """Every model in the folder, loaded or not, by name and version."""
        entries = self.known()
        known = self._versions.keys() | self._reasons.keys()
        for name, count in Counter(await in_daemon_thread(lambda: names_in(self._places))).items():
            if name not in known:
                entries.append(IndexEntry(name, "", "", "") if count == 1 else IndexEntry(
                    name, "", State.UNAVAILABLE.value, AMBIGUOUS))
        return sorted(entries, key=lambda entry: (entry.name, entry.version))

    async def load_all(self, names: Iterable[str] | None = None) -> None:
        """Loads models, by default every one there is. A failure is logged and kept as a reason; the others go on.

        Raises RepositoryError if a folder itself cannot be read.
        """
        if names is None:
            names = await self.names()
            if not names:
                log.warning("there is no model in %s; a model is a folder with a folder for each version",
                            ", ".join(map(str, self._places)))
        names = list(dict.fromkeys(names))
        self._starting = {name: asyncio.ensure_future(self.load(name)) for name in names}
        results = await asyncio.gather(*self._starting.values(), return_exceptions=True)
        self._starting = {}
        for name, result in zip(names, results, strict=True):
            if isinstance(result, UnknownModelError):       # of names given; load() has logged what else failed
                self._reasons[name] = redacted(str(result))
                log.error("%s", result)
            elif isinstance(result, BaseException) and not isinstance(result, ServeError):
                raise result

    async def load(self, name: str, message: model_config.ModelConfig | None = None,
                   files: Mapping[str, bytes] | None = None, at_once: bool = False) -> None:
        """Loads or reloads a model; versions that are ready go on serving until their successors are.

        `message` overrides its config.pbtxt, `files` all of its folder. at_once: however many are being loaded, for one
        of those may wait for this. Raises UnknownModelError; InvalidRequestError for such files; RepositoryError, after
        all versions were tried.
        """
        turn = nullcontext() if at_once else self._loads
        with self._loads.one_more() if at_once else nullcontext(), ExitStack() as until_loaded:
            if not files:
                await self._load_from(name, lambda: self._read(name, message), turn)
                return
            folder = await in_daemon_thread(lambda: until_loaded.enter_context(written(name, files)))
            await self._load_from(name, lambda: read_written(folder, name, message), turn)

    async def _load_from(self, name: str, read: Callable[[], Sequence[Source]],
                         turn: AbstractAsyncContextManager[None]) -> None:
        async with self._alone(name):
            with ExitStack() as until_loaded:
                sources, prints = await self._ready_to_load(name, read, turn, until_loaded)
                await self._load_versions(name, sources, prints, turn)

    async def _ready_to_load(self, name: str, read: Callable[[], Sequence[Source]],
                             turn: AbstractAsyncContextManager[None], until_loaded: ExitStack
                             ) -> tuple[Sequence[Source], Mapping[int, Fingerprint]]:
        """Return the versions of a model and their fingerprints, when what an ensemble calls is there, which stays
        there until it is loaded. Raises RepositoryError."""
        seen = set[str]()
        try:
            async with self._reads:
                sources, prints, steps = await in_daemon_thread(lambda: self._with_steps(name, read, seen))
            self.unfetched.discard(name)
            until_loaded.enter_context(self._needing(steps))
            for step in steps:
                with self.waiting(name, step):
                    await self._load_needed(step, turn is not self._loads)
        except RepositoryError as error:
            if isinstance(error, FetchError):
                self.unfetched.add(name)
            if not self.versions(name):             # whatever was said of them before
                self._versions.pop(name, None)
                self._reasons[name] = redacted(str(error))
            log.error("model '%s' cannot be loaded: %s", name, error)
            raise
        finally:
            for other in seen - self._users.keys():     # else who has begun to load it does that
                self._release(other)
        return sources, prints

    async def _load_versions(self, name: str, sources: Sequence[Source], prints: Mapping[int, Fingerprint],
                             turn: AbstractAsyncContextManager[None]) -> None:
        """Load the versions that changed; those whose files and configuration are the same stay loaded."""
        self._reasons.pop(name, None)
        ready = {version: status for version, status in self._versions.get(name, {}).items() if status.model}
        wanted = {source.version: Status(State.LOADING, replaces=bool(ready)) for source in sources}
        self._versions[name] = dict(sorted({**wanted, **ready}.items(), reverse=True))
        failures = []
        for source in sources:
            fingerprint = prints[source.version]
            if (before := ready.get(source.version)) and before.is_of(fingerprint):
                self._versions[name][source.version] = before.kept(source.message)
                log.info("model '%s' version %d did not change, and stays loaded", name, source.version)
                continue
            try:
                await self._load_version(source, fingerprint, turn)
            except RepositoryError as error:
                failures.append(f"version {source.version} is at UNAVAILABLE state: {error}")
        if len(failures) < len(sources):        # else what was there before is all there is
            retired = [self._versions[name].pop(version) for version in ready.keys() - wanted.keys()]
            await self._drain(status.model for status in retired if status.model)
        if failures:
            raise RepositoryError(f"{LOAD_FAILED} '{name}': {'; '.join(failures)}")

    def _read(self, name: str, message: model_config.ModelConfig | None = None) -> list[Source]:
        place = place_of(self._places, name)
        place.fetch(name)
        return read_model(place.path, name, message, self._config_name)

    def _with_steps(self, name: str, read: Callable[[], Sequence[Source]], seen: set[str]
                    ) -> tuple[Sequence[Source], Mapping[int, Fingerprint], list[str]]:
        """Return the versions of a model, their fingerprints, and the models that an ensemble calls, those first that
        others call. Blocks. seen: is given those that were read, whether they are loaded or not.

        Raises RepositoryError. Which of the called models cannot be read is found out when they are loaded.
        """
        sources = told(read)

        def steps_of(model: str) -> Sequence[Step]:
            if model == name:
                return sources[0].config.steps if sources else ()
            seen.add(model)
            try:
                called = told(partial(self._read, model))
            except RepositoryError:
                return ()
            return called[0].config.steps if called else ()

        return sources, told(lambda: fingerprints(sources)), called_models(name, steps_of)

    async def _load_needed(self, name: str, at_once: bool) -> None:
        """Loads what an ensemble calls, unless it is there or on its way; it says itself what is wrong with it."""
        if task := self._starting.get(name):
            await asyncio.wait([task])
        if self.versions(name):
            return
        try:
            await self.load(name, at_once=at_once)
        except ServeError as error:
            log.debug("a step's model '%s' is not ready: %s", name, error)

    @contextmanager
    def _needing(self, steps: Sequence[str]) -> Iterator[None]:
        self._needed.update(steps)
        try:
            yield
        finally:
            self._needed -= Counter(steps)          # which drops those that are needed no more

    async def unload(self, name: str) -> None:
        """Answers what the model has accepted, then lets go of it. Raises UnknownModelError."""
        async with self._alone(name):
            if name not in self._versions and name not in self._reasons:
                raise UnknownModelError(f"model '{name}' is not loaded")
            self._reasons.pop(name, None)
            statuses = self._versions.pop(name, {})
            if not statuses:
                return
            models = [status.model for status in statuses.values() if status.model]
            self._versions[name] = {version: Status(State.UNLOADING, "unloading") for version in statuses}
            await self._drain(models)
            self._versions[name] = {version: Status(State.UNAVAILABLE, _UNLOADED) for version in statuses}
            log.info("model '%s' is unloaded", name)

    async def close(self) -> None:
        """Drains every model, also what becomes ready meanwhile, and waits for those that are being drained already.
        The event loop goes on running, so that their answers are delivered."""
        self._closed = True
        for kind in (Kind.ENSEMBLE, Kind.PYTHON, Kind.ENGINE):      # who calls others goes before them
            await self._drain(model for model in self.models() if model.config.kind is kind)
        while self._drains:
            await asyncio.wait(self._drains)

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        """One load or unload of a model at a time; at its end tells of the change, and releases the files of a model
        of which nothing is served."""
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
            for place in self._places:
                place.release(name)

    async def _load_version(self, source: Source, fingerprint: Fingerprint,
                            turn: AbstractAsyncContextManager[None]) -> None:
        statuses = self._versions[source.name]
        before = statuses[source.version]
        try:
            async with turn:
                began = time.monotonic()
                loading = asyncio.ensure_future(in_daemon_thread(lambda: told(lambda: self._load(source))))
                try:
                    model = await asyncio.shield(loading)
                except asyncio.CancelledError:
                    loading.add_done_callback(self._let_go)     # nobody else will
                    raise
                if self._closed:
                    self._begin_drains([model])
                    raise RepositoryError("the server is shutting down")
                model.load_secs, model.loaded_ns = time.monotonic() - began, time.monotonic_ns()
        except RepositoryError as error:
            if before.model is None:
                statuses[source.version] = replace(before, state=State.UNAVAILABLE, reason=redacted(str(error)))
            else:
                statuses[source.version] = replace(before, reason=redacted(f"serves what was loaded before: {error}"))
            log.error("model '%s' version %d cannot be loaded: %s", source.name, source.version, error)
            raise
        statuses[source.version] = Status(State.READY, model=model, fingerprint=after_load(source, fingerprint))
        log.info("model '%s' version %d is ready", source.name, source.version)
        self._changed()                         # the other versions may take long
        if before.model is not None:
            await self._drain([before.model])

    def _let_go(self, loading: asyncio.Future[Model]) -> None:
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


def _why(status: Status) -> str:
    return status.reason or status.state.value.lower()
