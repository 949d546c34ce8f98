"""Between the event loop and threads: what runs beside it, what it is given to do, what it waits for."""
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
_LOOKING_SECS = 0.02            # between two looks at what nobody tells of


class NoThreadError(RepositoryError):
    """The system gives this process no more threads."""


def start(thread: threading.Thread) -> None:
    """Raises NoThreadError."""
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError("the system gives this process no more threads (ulimit -u, pids.max of its cgroup, "
                            "kernel.pid_max): serve fewer models, or fewer instances of each (--cores)") from error


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function on the loop, from any thread; does nothing if the loop is closed, for nobody waits any more."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
        log.debug("%s came after the end of the event loop", function)


class Turns(asyncio.Semaphore):
    """So many at a time."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._taken_back = set[asyncio.Task[bool]]()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """While somebody who may have a turn waits for others, who may wait for theirs."""
        self.release()
        try:
            yield
        finally:
            task = asyncio.create_task(self.acquire())      # when there is one: nobody waits for that
            self._taken_back.add(task)
            task.add_done_callback(self._taken_back.discard)


class Waits:
    """Which models wait for others to be loaded."""

    def __init__(self) -> None:
        self._awaited = defaultdict[str, Counter[str]](Counter)

    @contextmanager
    def waiting(self, name: str, other: str) -> Iterator[None]:
        """While a model waits for another one to be loaded. Raises RepositoryError: that waits for it."""
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


def at_once(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end, where its input is small. Returns or raises what it does."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


class StepRunner:
    """Runs generators on the event loop, one step in each iteration of the loop.

    A step takes a millisecond or two, so the loop answers other requests meanwhile. A thread would not do: a parser
    written in C keeps the interpreter's lock until it returns. Generators that run at the same time take turns.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()             # FIFO

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Run a generator to its end, and return or raise what it does."""
        with closing(steps):
            while True:
                async with self._turn:
                    try:
                        next(steps)
                    except StopIteration as stop:
                        result: T = stop.value
                        return result
                    await asyncio.sleep(0)


async def beside_loop(function: Callable[[], T]) -> T:
    """Runs a function of Python code on a thread, so that the loop answers others meanwhile; on the loop where the
    system gives no more threads."""
    try:
        return await in_daemon_thread(function)
    except NoThreadError:
        return function()


class Cached(Generic[T]):
    """A value that is computed at most once in a while, however many ask for it. Belongs to the event loop."""

    def __init__(self, compute: Callable[[], Awaitable[T]], secs: float) -> None:
        """secs: how long a value is given out. An error is raised to those who waited for it, and not kept."""
        self._compute, self._secs = compute, secs
        self._value: asyncio.Future[T] | None = None
        self._until = 0.0

    async def get(self) -> T:
        if self._value is None or self._value.done() and time.monotonic() >= self._until:
            self._value = asyncio.ensure_future(self._computed())
            self._value.add_done_callback(lambda done: done.cancelled() or done.exception())    # logs no lost error
        return await asyncio.shield(self._value)        # who asks may leave, and the others have their answer

    async def _computed(self) -> T:
        self._until = 0.0
        value = await self._compute()
        self._until = time.monotonic() + self._secs
        return value


async def wait_until(is_so: Callable[[], bool], timeout_secs: float) -> None:
    """Waits on the loop until something is so, at most `timeout_secs`."""
    end = time.monotonic() + timeout_secs
    while not is_so() and time.monotonic() < end:
        await asyncio.sleep(_LOOKING_SECS)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Runs a function on a thread of its own and returns (or raises) what it did.

    Unlike an executor's threads it is not joined at exit: a load that hangs in native code, which nothing can cancel,
    must not keep the process alive after everything accepted is answered. Raises RepositoryError: there are no more.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()      # from here on, who gives up waiting does not stop it

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:          # raised where it is awaited
            outcome.set_exception(error)

    start(threading.Thread(target=run, name=f"worker {getattr(function, '__qualname__', '')}", daemon=True))
    return await asyncio.wrap_future(outcome)
