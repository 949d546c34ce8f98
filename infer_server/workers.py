"""Threads and the event loop: run work on threads, post to the loop, run generators in steps."""
from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any, Generic, TypeVar

from infer_server.errors import RepositoryError

log = logging.getLogger(__name__)
T = TypeVar("T")
_POLL_SECS = 0.02               # interval of checks in wait_until


class NoThreadError(RepositoryError):
    """Raised if the system gives this process no more threads."""


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises NoThreadError."""
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError("the system gives this process no more threads (ulimit -u, pids.max of its cgroup, "
                            "kernel.pid_max): serve fewer models, or fewer instances of each (--cores)") from error


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function on the event loop, from any thread; do nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
        log.debug("%s was posted after the end of the event loop", function)


class AdjustableSemaphore(asyncio.Semaphore):
    """Semaphore whose value can be increased temporarily."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._acquiring = set[asyncio.Task[bool]]()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Increase the value by one: a holder waits for other tasks, which may themselves wait for the semaphore."""
        self.release()
        try:
            yield
        finally:
            task = asyncio.create_task(self.acquire())      # in the background, once a slot is free
            self._acquiring.add(task)
            task.add_done_callback(self._acquiring.discard)


class WaitGraph:
    """Wait-for graph of models that wait for others to be loaded."""

    def __init__(self) -> None:
        self._awaited = defaultdict[str, Counter[str]](Counter)

    @contextmanager
    def waiting(self, name: str, other: str) -> Iterator[None]:
        """Record that a model waits for another one until the context exits. Raises RepositoryError for a deadlock."""
        seen, left = set[str](), [other]
        while left:
            one = left.pop()
            if one == name:
                raise RepositoryError(f"model '{name}' cannot load '{other}', which is loading it: each would wait for "
                                      "the other")
            seen.add(one)
            left += self._awaited[one].keys() - seen if one in self._awaited else ()
        self._awaited[name][other] += 1
        try:
            yield
        finally:
            self._awaited[name] -= Counter([other])
            if not self._awaited[name]:
                del self._awaited[name]


def run_steps(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end without pauses and return or raise what it does; for small inputs."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


class StepRunner:
    """Runner of generators on the event loop, one step in each iteration of the loop.

    A step takes a millisecond or two, so that the loop answers other requests meanwhile. A thread would not help: a
    parser written in C holds the interpreter lock until it returns. Generators that run at the same time take turns.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()             # FIFO

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Run a generator to its end and return or raise what it does."""
        with closing(steps):
            while True:
                async with self._turn:
                    try:
                        next(steps)
                    except StopIteration as stop:
                        result: T = stop.value
                        return result
                    await asyncio.sleep(0)


async def run_off_loop(function: Callable[[], T]) -> T:
    """Run a function on a thread so that the loop stays responsive; on the loop if there are no more threads."""
    try:
        return await in_daemon_thread(function)
    except NoThreadError:
        return function()


class PeriodicValue(Generic[T]):
    """Value that is computed at most once in a period, however many callers there are. Belongs to the event loop."""

    def __init__(self, compute: Callable[[], Awaitable[T]], secs: float) -> None:
        """Reuse a value of `compute` for `secs` seconds; an error is raised to the current callers only."""
        self._compute, self._secs = compute, secs
        self._value: asyncio.Future[T] | None = None
        self._until = 0.0

    async def get(self) -> T:
        if self._value is None or self._value.done() and time.monotonic() >= self._until:
            self._value = asyncio.ensure_future(self._computed())
            self._value.add_done_callback(lambda done: done.cancelled() or done.exception())    # avoids asyncio's log
        return await asyncio.shield(self._value)        # a cancelled caller does not affect the others

    async def _computed(self) -> T:
        self._until = 0.0
        value = await self._compute()
        self._until = time.monotonic() + self._secs
        return value


async def wait_until(is_so: Callable[[], bool], timeout_secs: float) -> None:
    """Wait on the loop until a predicate is true, at most `timeout_secs`."""
    end = time.monotonic() + timeout_secs
    while not is_so() and time.monotonic() < end:
        await asyncio.sleep(_POLL_SECS)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run a function on a new thread and return or raise what it does. Raises NoThreadError.

    Unlike an executor's threads it is not joined at exit: a load that hangs in native code, which cannot be cancelled,
    must not keep the process alive after all accepted requests are answered.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()      # from here on, cancelling the await does not stop the function

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:          # raised by the await
            outcome.set_exception(error)

    start(threading.Thread(target=run, name=f"worker {getattr(function, '__qualname__', '')}", daemon=True))
    return await asyncio.wrap_future(outcome)
