"""Models that are loaded when they are first asked for; those that were used least recently make room for them."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine

from infer_server.config.kinds import Kind
from infer_server.errors import RepositoryError, ServeError, UnknownModelError
from infer_server.repository.model import Model
from infer_server.repository.repository import Repository

log = logging.getLogger(__name__)

_Then = Callable[[], None]
_Failed = Callable[[Exception], None]
_RETRY_SECS = 30.0              # before a model that could not be loaded is tried again
_MOST_FAILURES = 10_000         # that are remembered
_LISTING_SECS = 2.0             # for which a name that was not in the repository is not looked for there again


class OnDemand:
    """Belongs to the event loop."""

    def __init__(self, repository: Repository, limit_bytes: int) -> None:
        """limit_bytes: what the loaded models may hold together, by their own estimate."""
        self._repository, self._limit_bytes = repository, limit_bytes
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, list[tuple[_Then, _Failed]]] = {}      # for a model, in the order that they came
        self._claimed = Counter[str]()                  # by those who wait in load()
        self._tasks = set[asyncio.Task[None]]()
        self._one_at_a_time = asyncio.Lock()            # makes room
        self._retry_at: dict[str, float] = {}           # of models that failed
        self._listing: asyncio.Task[list[str]] | None = None
        self._listed_until = 0.0
        self._known: list[str] = []                     # what was in the repository when it could last be read
        repository.watch(self._look)

    async def load(self, name: str) -> None:
        """Loads a model unless it is there. Raises nothing: why there is none, Repository.find() says."""
        if self._is_settled(name):
            return
        settled = asyncio.get_running_loop().create_future()
        self._wait(name, lambda: settled.set_result(None), lambda error: None)      # it is cancelled, maybe
        self._claimed[name] += 1                        # until who waits goes on, which is a turn of the loop later
        try:
            await settled
        finally:
            self._claimed -= Counter([name])            # which drops it where nobody is left

    def when_loaded(self, name: str, then: _Then, failed: _Failed) -> None:
        """Calls `then` when a version of a model is ready, or none will be, which may be now; `failed` with what it
        raises later. Nobody overtakes who waits for the same model."""
        if self._is_settled(name):
            then()
        else:
            self._wait(name, then, failed)

    def _is_settled(self, name: str) -> bool:
        return name not in self._waiting and bool(
            self._repository.versions(name) or time.monotonic() < self._retry_at.get(name, 0))

    def _wait(self, name: str, then: _Then, failed: _Failed) -> None:
        self._waiting.setdefault(name, []).append((then, failed))
        if name not in self._loading:
            self._loading[name] = asyncio.create_task(self._load(name))

    def _look(self) -> None:
        """Lets those go on whose model is there, and makes room for it, whoever has asked for that."""
        for name in list(self._waiting):
            if self._repository.versions(name):
                self._go_on(name)
        models = self._repository.models()
        for model in models:
            self._retry_at.pop(model.name, None)
        if self._held() > self._limit_bytes and not self._one_at_a_time.locked():       # else that looks again
            self._start(self._make_room(max(models, key=lambda model: model.loaded_ns).name))

    def _go_on(self, name: str) -> None:
        for then, failed in self._waiting.pop(name, ()):
            try:
                then()
            except Exception as error:
                failed(error)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)                           # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)

    async def _load(self, name: str) -> None:
        try:
            if name not in await self._names():
                raise UnknownModelError(f"model '{name}' is not in the repository")
            await self._repository.load(name)
        except Exception as error:
            if isinstance(error, ServeError):
                log.debug("%s is not loaded on demand: %s", name, error)
            else:                                       # our bug, which nobody shall wait for
                log.exception("%s is not loaded on demand", name)
            if len(self._retry_at) >= _MOST_FAILURES:
                self._retry_at.clear()
            is_unknown = isinstance(error, UnknownModelError)
            self._retry_at[name] = self._listed_until if is_unknown else time.monotonic() + _RETRY_SECS
        finally:
            del self._loading[name]
            self._go_on(name)
        self._start(self._make_room(name))      # nobody waits for others to be drained. Where it has failed, too: other
                                                # versions of it may be there, or the models of its steps

    async def _names(self) -> list[str]:
        """The models of the repository a short while ago: names that are none cost no look at it each. Raises
        RepositoryError: it cannot be read, and never could."""
        if self._listing is None or (self._listing.done() and time.monotonic() >= self._listed_until):
            self._listing = asyncio.create_task(self._repository.names())
            self._listing.add_done_callback(self._listed)
        try:
            return await asyncio.shield(self._listing)
        except RepositoryError:
            if self._known:
                return self._known                      # to load one of them fails, and says why
            raise

    def _listed(self, listing: asyncio.Task[list[str]]) -> None:
        failed = listing.cancelled() or listing.exception() is not None
        self._listed_until = 0.0 if failed else time.monotonic() + _LISTING_SECS
        self._known = self._known if failed else listing.result()

    def _held(self) -> int:
        return sum(model.memory_bytes for model in self._repository.models())

    async def _make_room(self, kept: str) -> None:
        """Unloads what was used least recently, and nothing that `kept` needs, until the others fit."""
        async with self._one_at_a_time:
            while (held := self._held()) > self._limit_bytes:
                victim = self._least_used(kept)
                if victim is None:
                    log.warning("the loaded models hold about %d MiB, and none of them can be unloaded now: "
                                "--model-memory-limit-mib %d is exceeded", held >> 20, self._limit_bytes >> 20)
                    return
                first = self._outermost(victim)         # one at a time: what is asked for meanwhile may need the others
                log.info("'%s' is unloaded to make room for '%s'", first, kept)
                await self._repository.unload(first)

    def _least_used(self, kept: str) -> str | None:
        models = self._repository.models()
        busy = {kept, *self._repository.needed(), *self._loading, *self._claimed,
                *(model.name for model in models if model.is_busy)}
        while more := {step for model in models if model.name in busy for step in _steps(model)} - busy:
            busy |= more
        used = {model.name: max(model.loaded_ns, model.statistics.snapshot().used_ns)
                for model in models if model.memory_bytes}
        return min(used.keys() - busy, key=lambda name: used[name], default=None)

    def _outermost(self, name: str) -> str:
        """The model, or the loaded ensemble that calls it, or calls one that does, and is called by none itself."""
        models, seen = self._repository.models(), {name}
        while callers := [model.name for model in models if name in _steps(model) and model.name not in seen]:
            name = callers[0]
            seen.add(name)
        return name


def _steps(model: Model) -> set[str]:
    return {step.model for step in model.config.steps} if model.config.kind is Kind.ENSEMBLE else set()
