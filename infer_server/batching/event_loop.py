"""Event-loop side of a request queue: submit requests, wake instances, execute short batches, expire requests."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:       # frontend workers import this module without NumPy
    from infer_server.batching.batcher import Batcher
    from infer_server.batching.request import Request

_QUIET_TURNS = 8            # most iterations of the loop without a new request; about 20 us if the loop is idle
_SURE = 4                   # waits for the requests of one read each, after which waits may end with their reads
_ENDED = 7                  # waits that end so before one goes on again
_LIMIT_NS = 5_000_000       # limit of the wait while requests keep coming; reached only by a busy loop
_LONGEST_NS = 1_000_000_000     # longest timer: due times change with the measured times of batches


class Reads:
    """Reads of the event loop's connections: calls functions when all that one read returned has been processed.

    Connections call begin() and end() for each read. Belongs to the event loop.
    """
    _of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Reads] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.count = 0                  # reads so far
        self.is_reading = False         # between begin() and end()
        self._at_end: list[Callable[[], None]] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Reads:
        """Return the only object of a loop."""
        return cls._of_loops.setdefault(loop, cls())

    def begin(self) -> None:
        self.count += 1
        self.is_reading = True

    def end(self) -> None:
        self.is_reading = False
        if self._at_end:
            functions, self._at_end = self._at_end, []
            for function in functions:
                function()

    def at_end(self, function: Callable[[], None]) -> None:
        """Call a function at the end of the current read."""
        self._at_end.append(function)


class Waker:
    """Wake instances once the event loop has no more requests at hand. Belongs to the event loop.

    Requests that arrive together are read one after the other, each over several iterations of the loop. Waking an
    instance for the first one would execute it alone, and its thread would compete with the loop for the interpreter
    lock. There is no timer: an idle loop completes its quiet iterations at once. Their number falls to one while
    requests arrive one by one, or together without a quiet iteration between them. While all that arrive together come
    with one read, most waits end with that read; the others go on, to find out whether this still holds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher, max_batch_size: int,
                 execute_short: Callable[[], bool]) -> None:
        """Watch a batcher.

        `execute_short` executes a short batch on the event loop and returns False if there is none.
        """
        self._loop = loop
        self._reads = Reads.of(loop)
        self._batcher = batcher
        self._max_batch_size = max_batch_size
        self._execute_short = execute_short
        self._watching = False
        self._quiet_turns = 0
        self._required_turns = _QUIET_TURNS
        self._together = 0              # requests since the first one of this wait
        self._widest_gap = 0            # most quiet iterations between two of them
        self._was_alone = False         # the last wait was for one request
        self._read = 0                  # number of the read that the last request came with
        self._from_one_read = False     # all requests of this wait came with it
        self._single_reads = 0          # consecutive waits that went on, but were for the requests of one read
        self._may_end = 0               # further waits that may end with their reads
        self._limit_ns = 0

    def submitted(self) -> None:
        """Note that a request was queued; an instance is woken a few iterations of the loop later."""
        if self._watching:
            self._together += 1
            if self._quiet_turns > self._widest_gap:
                self._widest_gap = self._quiet_turns
            self._quiet_turns = 0
            if self._read != self._reads.count:
                self._from_one_read = False
        else:
            self._quiet_turns = 0
            self._watch()

    def _watch(self) -> None:
        reads = self._reads
        self._watching = True
        self._together, self._widest_gap = 1, 0
        self._read, self._from_one_read = reads.count, reads.is_reading
        if reads.is_reading and self._may_end and self._required_turns == 1:
            self._may_end -= 1
            reads.at_end(self._end)
            return
        self._limit_ns = time.monotonic_ns() + _LIMIT_NS
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._quiet_turns += 1
        gathering = 0 < len(self._batcher) < self._max_batch_size       # 0: an instance took them meanwhile
        if gathering and self._quiet_turns < self._required_turns and time.monotonic_ns() < self._limit_ns:
            self._loop.call_soon(self._turn)
        else:
            self._adapt()
            self._end()

    def _end(self) -> None:
        """End the wait: execute what waits, or wake an instance."""
        self._watching = False
        if not self._execute_short():
            self._batcher.wake()
        elif len(self._batcher) and not self._watching:
            self._quiet_turns, from_one_read = self._required_turns, self._from_one_read
            self._watch()
            self._from_one_read = from_one_read

    def _adapt(self) -> None:
        """Choose the number of quiet iterations of the next wait, and whether waits end with their reads."""
        self._single_reads = self._single_reads + 1 if self._from_one_read else 0
        self._may_end = _ENDED if self._single_reads >= _SURE else 0
        was_alone, self._was_alone = self._was_alone, self._together == 1
        if self._was_alone:
            self._required_turns = max(1, self._required_turns // 2)
        elif was_alone:
            self._required_turns = _QUIET_TURNS
        else:
            self._required_turns = min(_QUIET_TURNS, max(2 * self._widest_gap + 1, self._required_turns - 1))


class ExpiryTimer:
    """Timer that refuses expired requests promptly even while every instance is busy. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher) -> None:
        self._loop = loop
        self._batcher = batcher
        self._timer: asyncio.TimerHandle | None = None
        self._fires_ns = 0              # time at which the timer fires

    def submitted(self, request: Request) -> None:
        """Note that a request was queued, which may expire before the timer fires."""
        due_ns = min(request.deadline_ns or request.expires_ns, request.expires_ns or request.deadline_ns)
        if due_ns and (self._timer is None or due_ns < self._fires_ns + _LONGEST_NS):
            self._arm()

    def _arm(self) -> None:
        due_ns = self._batcher.next_expiry_ns()
        if due_ns is None or (self._timer is not None and self._fires_ns <= due_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        now_ns = time.monotonic_ns()
        self._fires_ns = min(max(due_ns, now_ns), now_ns + _LONGEST_NS)
        self._timer = self._loop.call_later((self._fires_ns - now_ns) / 1e9, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._batcher.expire()
        self._arm()


class RequestQueue:
    """Batcher with its Waker and ExpiryTimer.

    Instances take batches of `batcher`; everything else belongs to the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, batcher: Batcher, max_batch_size: int,
                 execute_short: Callable[[], bool]) -> None:
        """Attach a Waker and an ExpiryTimer to a batcher; see `Waker` for `execute_short`."""
        self.batcher = batcher
        self._waker = Waker(loop, batcher, max_batch_size, execute_short)
        self.watch_expiry = ExpiryTimer(loop, batcher).submitted    # refuses a queued request when it expires

    def submit(self, request: Request) -> None:
        """Queue a request; raises as `Batcher.submit`."""
        self.batcher.submit(request)
        self._waker.submitted()
        if request.deadline_ns or request.expires_ns:
            self.watch_expiry(request)
