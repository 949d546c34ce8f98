"""Limits what calls in flight may hold: the bytes of requests and answers, and the time that a client may take to read.

An answer is kept in memory until its client has taken it, and requests are taken meanwhile: clients that ask and do not
read would fill the memory of the machine.

Bytes of a request count when they have arrived, never when a client announces them. Requests of which a part has
arrived may hold three quarters of the limit together. Nothing waits for memory: a request whose next bytes do not fit
is refused, which frees what it holds, so partial requests cannot block each other, nor those that arrive whole.
"""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from infer_server.errors import MemoryLimitError
from infer_server.lookout import BusyPoller
from infer_server.process import resident_bytes, trim
from infer_server.protocol.json_values import Steps
from infer_server.workers import StepRunner, in_daemon_thread, wait_until

log = logging.getLogger(__name__)

_ANSWER_COPIES = 2              # ours, and the one that gRPC sends from
_MUCH_BYTES = 64 << 20          # worth being given back to the system ...
LITTLE_BYTES = 1 << 20         # ... once no more than this is held, ...
_QUIET_SECS = 1.0               # ... for so long
_LOOKING_SECS = 20.0            # between two looks at what is left by messages that no call came of
_SPENT_SHARE = 15 / 16          # of the limit: a server that holds more is not ready


class Client(Protocol):
    """The other end of a call."""

    def peer(self) -> str:
        """Its address, for the log."""

    def disconnect(self) -> None:
        """Ends its connection, and with that its calls."""


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call in flight: the bytes that it holds until its client has read the answer, or has gone."""
    client: Client | None           # None: it has ended
    held_bytes: int = 0
    expected_bytes: int = 0         # of them: of its answer
    partial_bytes: int = 0          # of them: of a request that has not arrived completely
    timer: asyncio.TimerHandle | None = None


class Inflight:
    """Belongs to the event loop."""

    def __init__(self, max_bytes: int, send_timeout_secs: float) -> None:
        self.max_bytes = max_bytes
        self._ample_bytes = int(_SPENT_SHARE * max_bytes)
        self.max_partial_bytes = max_bytes - max_bytes // 4
        self.steps = StepRunner()               # decodes large requests without blocking the event loop
        self._inflating = asyncio.Lock()
        self.send_timeout_secs = send_timeout_secs
        self._loop = asyncio.get_running_loop()
        self._lookout = BusyPoller(self._loop)
        self._calls: dict[OpenCall, None] = {}
        self._peak_bytes = 0                    # since memory was last given back
        self._trimming: asyncio.TimerHandle | None = None
        self._least_bytes = resident_bytes()    # of the process, since then
        self._loop.call_later(_LOOKING_SECS, self._look)
        self.held_bytes = 0
        self.partial_bytes = 0                  # of them: of requests that have not arrived completely
        self.on_message: Callable[[Client, int], None] | None = None        # told of what begin() is given
        self._is_spent = False
        self._spent_changed: Callable[[], None] = lambda: None

    @property
    def is_spent(self) -> bool:
        """True if so much is held that the next requests will be refused."""
        return self.held_bytes > self._ample_bytes

    def watch_spent(self, changed: Callable[[], None]) -> None:
        """Have `changed` called whenever `is_spent` changes."""
        self._spent_changed = changed

    async def wait_sent(self, timeout_secs: float) -> None:
        """Waits until the calls that are open now have ended and their answers are sent, at most `timeout_secs`."""
        calls = list(self._calls)
        await wait_until(lambda: not any(call in self._calls for call in calls), timeout_secs)

    def begin(self, client: Client, request_bytes: int, answer_bytes: int = 0) -> OpenCall:
        """Open a call whose request has been received, or is arriving; end() closes it.

        answer_bytes : the size of its answer, where that is known: as expect() counts it.
        Raises MemoryLimitError.
        """
        if self.on_message:
            self.on_message(client, request_bytes)
        expected = _ANSWER_COPIES * answer_bytes
        count = request_bytes + expected
        held = self.held_bytes + count
        if held > self.max_bytes:
            raise self._no_room(count)
        call = OpenCall(client, count, expected)
        self.held_bytes = held
        if held > self._peak_bytes:
            self._peak_bytes = held
        if held > self._ample_bytes and not self._is_spent:
            self._tell_spent()
        if not self._calls:
            self._lookout.opened()
        self._calls[call] = None
        return call

    def begin_uncounted(self, client: Client) -> OpenCall:
        """The same for what is counted elsewhere, or not at all: wait_sent() waits for its end()."""
        call = OpenCall(client)
        self._open(call)
        return call

    async def inflate(self, steps: Steps[bytearray]) -> bytearray:
        """Run a decompression, one at a time: of those that exceed a limit, only one holds memory then."""
        async with self._inflating:
            return await self.steps.run(steps)

    def check_room(self, count: int) -> None:
        """Raise MemoryLimitError if a request of `count` bytes that is about to arrive would be refused now."""
        if self.held_bytes + count > self.max_bytes:
            raise self._no_room(count)

    def receive(self, call: OpenCall, count: int) -> None:
        """Count bytes that have arrived of a request that is not complete. Raises MemoryLimitError."""
        if self.partial_bytes + count > self.max_partial_bytes:
            raise MemoryLimitError(
                f"requests that have not arrived completely hold {self.partial_bytes >> 20} MiB of the "
                f"{self.max_partial_bytes >> 20} MiB that they may hold; retry later, or raise --max-inflight-mib")
        self.hold(call, count)
        call.partial_bytes += count
        self.partial_bytes += count

    def complete(self, call: OpenCall) -> None:
        """To be called when a request counted by receive() has arrived completely."""
        self.partial_bytes -= call.partial_bytes
        call.partial_bytes = 0

    def _open(self, call: OpenCall) -> None:
        if not self._calls:
            self._lookout.opened()
        self._calls[call] = None

    def lend(self, size: int) -> Callable[[], None]:
        """Count bytes that belong to no call, until the function that is returned is called. Raises
        MemoryLimitError."""
        lent = OpenCall(None)
        self.hold(lent, size)
        return partial(self.end, lent)

    def expect(self, call: OpenCall, answer_bytes: int, decoded_bytes: int) -> None:
        """Reserves the bytes of a call's answer and of what its files become, before the call is executed. Raises
        MemoryLimitError."""
        call.expected_bytes = expected = _ANSWER_COPIES * answer_bytes
        if count := expected + decoded_bytes:
            self.hold(call, count)

    def answered(self, call: OpenCall, answer_bytes: int) -> None:
        """To be called when an answer of so many bytes is handed to the transport: its client must read it in
        time."""
        self.keep(call, answer_bytes)
        if call.held_bytes > LITTLE_BYTES:     # what is smaller is sent whether it is read or not
            call.timer = self._loop.call_later(self.send_timeout_secs, self._give_up, call)

    def keep(self, call: OpenCall, answer_bytes: int) -> None:
        """Counts an answer of so many bytes, which is not handed to the transport yet."""
        if (more := _ANSWER_COPIES * answer_bytes - call.expected_bytes) > 0:
            self._count(call, more)

    def hold(self, call: OpenCall, count: int) -> None:
        """Counts bytes that will be held until the end of a call. Raises MemoryLimitError."""
        if self.held_bytes + count > self.max_bytes:
            raise self._no_room(count)
        self._count(call, count)

    def _no_room(self, count: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"the server holds {self.held_bytes >> 20} MiB of requests and answers, and {count / 2**20:.3g} MiB "
            f"more would exceed its {self.max_bytes >> 20} MiB; retry later, or raise --max-inflight-mib")

    def _count(self, call: OpenCall, count: int) -> None:
        """Counts bytes that are held already."""
        call.held_bytes += count
        self.held_bytes = held = self.held_bytes + count
        if held > self._peak_bytes:
            self._peak_bytes = held
        if held > self._ample_bytes and not self._is_spent:
            self._tell_spent()

    def _tell_spent(self) -> None:
        self._is_spent = self.is_spent
        self._spent_changed()

    def end(self, call: OpenCall) -> None:
        """To be called when a call has ended, answered or not, and when its answer has left this process."""
        calls = self._calls
        if calls.pop(call, self) is None and not calls:
            self._lookout.idle()
        if call.partial_bytes:
            self.complete(call)
        self.held_bytes -= call.held_bytes
        call.held_bytes = 0
        if self._is_spent and self.held_bytes <= self._ample_bytes:
            self._tell_spent()
        call.client = None                      # which refers to the call: memory would wait for the cycle collector
        if call.timer:
            call.timer.cancel()
        if self._peak_bytes >= _MUCH_BYTES:
            self._trim_soon()

    def _trim_soon(self) -> None:
        if self._peak_bytes >= _MUCH_BYTES and self.held_bytes <= LITTLE_BYTES and not self._trimming:
            self._trimming = self._loop.call_later(_QUIET_SECS, self._trim)

    def _give_up(self, call: OpenCall) -> None:
        if call.client:
            self.warn_of(call.client.peer())
            call.client.disconnect()

    def warn_of(self, peer: str) -> None:
        """Says why the connection of a client is about to be closed."""
        log.warning("%s has not read its answer in %g s: its connection is closed", peer, self.send_timeout_secs)

    def _trim(self) -> None:
        self._trimming = None
        if self.held_bytes <= LITTLE_BYTES:
            self._peak_bytes = self.held_bytes
            self._giving_back = self._loop.create_task(self._give_back())

    def _look(self) -> None:
        """Gives back what transports have freed of messages that were cancelled, cut off, or none when decompressed: of
        them nobody tells, and the allocator keeps it."""
        self._loop.call_later(_LOOKING_SECS, self._look)
        resident = resident_bytes()
        self._least_bytes = min(self._least_bytes, resident)
        if resident - self._least_bytes >= _MUCH_BYTES:
            self._trim()

    async def _give_back(self) -> None:
        await in_daemon_thread(trim)
        self._least_bytes = resident_bytes()
