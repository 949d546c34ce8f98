"""Load models when they are first requested, and unload the least recently used ones to stay within a memory limit."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine

from infer_server.config.kinds import ModelKind
from infer_server.errors import RepositoryError, ServeError, UnknownModelError
from infer_server.repository.model import Model
from infer_server.repository.repository import Repository

log = logging.getLogger(__name__)

_Then = Callable[[], None]
_Failed = Callable[[Exception], None]
_RETRY_SECS = 30.0              # delay before a model that failed to load is tried again
_MAX_FAILURES = 10_000          # failures that are remembered
_LISTING_SECS = 2.0             # time for which a listing of the repository is reused


class OnDemand:
    """Loader of models on first use. Belongs to the event loop."""

    def __init__(self, repository: Repository, limit_bytes: int) -> None:
        """Load models of `repository` while the sum of their `memory_bytes` is at most `limit_bytes`."""
        self._repository, self._limit_bytes = repository, limit_bytes
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, list[tuple[_Then, _Failed]]] = {}      # callbacks by model, in order of arrival
        self._claimed = Counter[str]()                  # number of callers in load(), by model
        self._tasks = set[asyncio.Task[None]]()
        self._evicting = asyncio.Lock()
        self._retry_at: dict[str, float] = {}           # earliest time of the next load, by failed model
        self._listing: asyncio.Task[list[str]] | None = None
        self._listed_until = 0.0
        self._last_names: list[str] = []                # models of the last successful listing
        repository.watch(self._update)

    async def load(self, name: str) -> None:
        """Load a model unless it is ready. Errors are not raised here but by the following `Repository.find`."""
        if self._is_settled(name):
            return
        settled = asyncio.get_running_loop().create_future()
        self._wait(name, lambda: settled.set_result(None), lambda error: None)      # the future may be cancelled
        self._claimed[name] += 1                        # protects the model until the waiting task resumes
        try:
            await settled
        finally:
            self._claimed -= Counter([name])            # drops the key at zero

    def when_loaded(self, name: str, then: _Then, failed: _Failed) -> None:
        """Call `then` once a version of a model is ready or loading has failed, possibly at once.

        An exception of a later call of `then` is passed to `failed`. Callbacks of one model run in order of arrival.
        """
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

    def _update(self) -> None:
        """Resume the callbacks whose model is ready, and evict models if the memory limit is exceeded."""
        for name in list(self._waiting):
            if self._repository.versions(name):
                self._go_on(name)
        models = self._repository.models()
        for model in models:
            self._retry_at.pop(model.name, None)
        if self._loaded_bytes() > self._limit_bytes and not self._evicting.locked():  # else it checks the limit again
            self._start(self._evict_for(max(models, key=lambda model: model.loaded_ns).name))

    def _go_on(self, name: str) -> None:
        for then, failed in self._waiting.pop(name, ()):
            try:
                then()
            except Exception as error:
                failed(error)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)                           # the event loop holds only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    async def _load(self, name: str) -> None:
        try:
            if name not in await self._names():
                raise UnknownModelError(f"model '{name}' is not in the repository")
            await self._repository.load(name)
        except Exception as error:
            if isinstance(error, ServeError):
                log.debug("%s is not loaded on demand: %s", name, error)
            else:                                       # an internal error: the callbacks still have to run
                log.exception("%s is not loaded on demand", name)
            if len(self._retry_at) >= _MAX_FAILURES:
                self._retry_at.clear()
            is_unknown = isinstance(error, UnknownModelError)
            self._retry_at[name] = self._listed_until if is_unknown else time.monotonic() + _RETRY_SECS
        finally:
            del self._loading[name]
            self._go_on(name)
        # Callbacks do not wait for eviction, which a failed load needs, too: its steps may be loaded.
        self._start(self._evict_for(name))

    async def _names(self) -> list[str]:
        """Return the models of the repository, from a listing that is reused for a short time.

        If the repository cannot be read, return the last successful listing, or raise RepositoryError if there is none.
        """
        if self._listing is None or (self._listing.done() and time.monotonic() >= self._listed_until):
            self._listing = asyncio.create_task(self._repository.names())
            self._listing.add_done_callback(self._listed)
        try:
            return await asyncio.shield(self._listing)
        except RepositoryError:
            if self._last_names:
                return self._last_names                 # loading one of them raises the reason
            raise

    def _listed(self, listing: asyncio.Task[list[str]]) -> None:
        failed = listing.cancelled() or listing.exception() is not None
        self._listed_until = 0.0 if failed else time.monotonic() + _LISTING_SECS
        self._last_names = self._last_names if failed else listing.result()

    def _loaded_bytes(self) -> int:
        return sum(model.memory_bytes for model in self._repository.models())

    async def _evict_for(self, protected: str) -> None:
        """Unload least recently used models that `protected` does not need until the memory limit holds."""
        async with self._evicting:
            while (loaded_bytes := self._loaded_bytes()) > self._limit_bytes:
                victim = self._least_used(protected)
                if victim is None:
                    log.warning("the loaded models hold about %d MiB, and none of them can be unloaded now: "
                                "--model-memory-limit-mib %d is exceeded", loaded_bytes >> 20, self._limit_bytes >> 20)
                    return
                first = self._outermost(victim)         # one per iteration: new requests may need the others
                log.info("'%s' is unloaded to make room for '%s'", first, protected)
                await self._repository.unload(first)

    def _least_used(self, protected: str) -> str | None:
        models = self._repository.models()
        busy = {protected, *self._repository.needed(), *self._loading, *self._claimed,
                *(model.name for model in models if model.is_busy)}
        while more := {step for model in models if model.name in busy for step in _steps(model)} - busy:
            busy |= more
        used = {model.name: max(model.loaded_ns, model.statistics.snapshot().used_ns)
                for model in models if model.memory_bytes}
        return min(used.keys() - busy, key=lambda name: used[name], default=None)

    def _outermost(self, name: str) -> str:
        """Return the model, or a loaded ensemble that calls it, directly or not, and that no other calls."""
        models, seen = self._repository.models(), {name}
        while callers := [model.name for model in models if name in _steps(model) and model.name not in seen]:
            name = callers[0]
            seen.add(name)
        return name


def _steps(model: Model) -> set[str]:
    return {step.model for step in model.config.steps} if model.config.kind is ModelKind.ENSEMBLE else set()
