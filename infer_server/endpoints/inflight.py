"""Limits on calls in flight: the memory of requests and responses, and the time that a client may take to read.

A response stays in memory until its client has read it, while further requests are accepted: without a limit, clients
that send requests and do not read responses would fill the memory of the machine.

Bytes of a request are counted on arrival, not when a client announces them. Partially received requests may hold three
quarters of the limit together. Nothing waits for memory: a request whose next bytes do not fit is rejected, which frees
what it holds. Therefore partial requests can block neither each other nor complete ones.
"""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from infer_server.busy_poller import BusyPoller
from infer_server.errors import MemoryLimitError
from infer_server.process import resident_bytes
from infer_server.protocol.json_values import Steps
from infer_server.workers import StepRunner, in_daemon_thread, wait_until

log = logging.getLogger(__name__)

_ANSWER_COPIES = 2              # our copy of a response, and the one that gRPC sends
_MUCH_BYTES = 64 << 20          # a peak above this is returned to the system (malloc_trim) ...
LITTLE_BYTES = 1 << 20         # ... when at most this is held, ...
_QUIET_SECS = 1.0               # ... after this delay
_CHECK_SECS = 20.0              # interval between checks for memory that messages without a call have left
_NEAR_LIMIT_SHARE = 15 / 16     # share of the limit above which the server is not ready


class Client(Protocol):
    """Interface of the client of a call."""

    def peer(self) -> str:
        """Return the client's address, for the log."""

    def disconnect(self) -> None:
        """Close the client's connection, which ends its calls."""


@dataclass(slots=True, eq=False)
class OpenCall:
    """Call in flight: the bytes that it holds until its client has read the response or disconnected."""
    client: Client | None           # None: the call has ended
    held_bytes: int = 0
    expected_bytes: int = 0         # part of held_bytes reserved for the response
    partial_bytes: int = 0          # part of held_bytes of a request that has not arrived completely
    timer: asyncio.TimerHandle | None = None


class Inflight:
    """Counter of the memory that calls in flight hold. Not thread-safe: belongs to the event loop."""

    def __init__(self, max_bytes: int, send_timeout_secs: float) -> None:
        self.max_bytes = max_bytes
        self._near_limit_bytes = int(_NEAR_LIMIT_SHARE * max_bytes)
        self.max_partial_bytes = max_bytes - max_bytes // 4
        self.steps = StepRunner()               # decodes large requests without blocking the event loop
        self._inflating = asyncio.Lock()
        self.send_timeout_secs = send_timeout_secs
        self._loop = asyncio.get_running_loop()
        self._busy_poller = BusyPoller(self._loop)
        self._calls: dict[OpenCall, None] = {}
        self._peak_bytes = 0                    # peak since memory was last returned to the system
        self._trimming: asyncio.TimerHandle | None = None
        self._least_bytes = resident_bytes()    # minimum of the process's resident memory since then
        self._loop.call_later(_CHECK_SECS, self._check_memory)
        self.held_bytes = 0
        self.partial_bytes = 0                  # part of held_bytes of requests that have not arrived completely
        self.on_message: Callable[[Client, int], None] | None = None        # called by begin() with its arguments
        self._is_near_limit = False
        self._near_limit_changed: Callable[[], None] = lambda: None

    @property
    def is_near_limit(self) -> bool:
        """True if the memory in use is close to the limit, so that the next requests will be rejected."""
        return self.held_bytes > self._near_limit_bytes

    def watch_limit(self, changed: Callable[[], None]) -> None:
        """Have `changed` called whenever `is_near_limit` changes."""
        self._near_limit_changed = changed

    async def wait_sent(self, timeout_secs: float) -> None:
        """Wait until the responses of all current calls are sent, at most `timeout_secs`."""
        calls = list(self._calls)
        await wait_until(lambda: not any(call in self._calls for call in calls), timeout_secs)

    def begin(self, client: Client, request_bytes: int, answer_bytes: int = 0) -> OpenCall:
        """Open a call whose request has arrived or is arriving; end() closes it.

        answer_bytes: size of the response if known, which is reserved as by expect(). Raises MemoryLimitError.
        """
        if self.on_message:
            self.on_message(client, request_bytes)
        expected = _ANSWER_COPIES * answer_bytes
        count = request_bytes + expected
        held_bytes = self.held_bytes + count
        if held_bytes > self.max_bytes:
            raise self._limit_error(count)
        call = OpenCall(client, count, expected)
        self.held_bytes = held_bytes
        if held_bytes > self._peak_bytes:
            self._peak_bytes = held_bytes
        if held_bytes > self._near_limit_bytes and not self._is_near_limit:
            self._update_near_limit()
        if not self._calls:
            self._busy_poller.opened()
        self._calls[call] = None
        return call

    def begin_uncounted(self, client: Client) -> OpenCall:
        """Open a call whose bytes are not counted here; wait_sent() waits for its end()."""
        call = OpenCall(client)
        self._open(call)
        return call

    async def inflate(self, steps: Steps[bytearray]) -> bytearray:
        """Run a decompression, one at a time, so that at most one that will exceed a limit holds memory."""
        async with self._inflating:
            return await self.steps.run(steps)

    def check_capacity(self, count: int) -> None:
        """Raise MemoryLimitError if a request of `count` bytes that is about to arrive would be refused now."""
        if self.held_bytes + count > self.max_bytes:
            raise self._limit_error(count)

    def receive(self, call: OpenCall, count: int, is_complete: bool = False) -> None:
        """Count bytes of a request that have arrived. Raises MemoryLimitError.

        is_complete: these are the last bytes, which the limit of partial requests does not concern.
        """
        if is_complete:
            self.complete(call)
            self.hold(call, count)
            return
        if self.partial_bytes + count > self.max_partial_bytes:
            raise MemoryLimitError(
                f"requests that have not arrived completely hold {self.partial_bytes >> 20} MiB of the "
                f"{self.max_partial_bytes >> 20} MiB that they may hold; retry later, or raise --max-inflight-mib")
        self.hold(call, count)
        call.partial_bytes += count
        self.partial_bytes += count

    def complete(self, call: OpenCall) -> None:
        """Mark a request counted by receive() as completely received."""
        self.partial_bytes -= call.partial_bytes
        call.partial_bytes = 0

    def _open(self, call: OpenCall) -> None:
        if not self._calls:
            self._busy_poller.opened()
        self._calls[call] = None

    def hold_separately(self, size: int) -> Callable[[], None]:
        """Count bytes that belong to no call; return the function that releases them. Raises MemoryLimitError."""
        call = OpenCall(None)
        self.hold(call, size)
        return partial(self.end, call)

    def expect(self, call: OpenCall, answer_bytes: int, decoded_bytes: int) -> None:
        """Reserve the bytes of a call's response and of its decoded files before execution. Raises MemoryLimitError."""
        call.expected_bytes = expected = _ANSWER_COPIES * answer_bytes
        if count := expected + decoded_bytes:
            self.hold(call, count)

    def answered(self, call: OpenCall, answer_bytes: int) -> None:
        """Start the send timeout of a response that has been passed to the transport."""
        self.keep(call, answer_bytes)
        if call.held_bytes > LITTLE_BYTES:     # smaller responses fit into the buffers of the sockets
            call.timer = self._loop.call_later(self.send_timeout_secs, self._give_up, call)

    def keep(self, call: OpenCall, answer_bytes: int) -> None:
        """Count a response that has not been passed to the transport yet."""
        if (more := _ANSWER_COPIES * answer_bytes - call.expected_bytes) > 0:
            self._count(call, more)

    def hold(self, call: OpenCall, count: int) -> None:
        """Count further bytes that a call holds until its end. Raises MemoryLimitError."""
        if self.held_bytes + count > self.max_bytes:
            raise self._limit_error(count)
        self._count(call, count)

    def _limit_error(self, count: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"the server holds {self.held_bytes >> 20} MiB of requests and answers, and {count / 2**20:.3g} MiB "
            f"more would exceed its {self.max_bytes >> 20} MiB; retry later, or raise --max-inflight-mib")

    def _count(self, call: OpenCall, count: int) -> None:
        """Count bytes without checking the limit: they are allocated already."""
        call.held_bytes += count
        self.held_bytes = held_bytes = self.held_bytes + count
        if held_bytes > self._peak_bytes:
            self._peak_bytes = held_bytes
        if held_bytes > self._near_limit_bytes and not self._is_near_limit:
            self._update_near_limit()

    def _update_near_limit(self) -> None:
        self._is_near_limit = self.is_near_limit
        self._near_limit_changed()

    def end(self, call: OpenCall) -> None:
        """Close a call: it was cancelled, or its response has left this process."""
        calls = self._calls
        if calls.pop(call, self) is None and not calls:
            self._busy_poller.idle()
        if call.partial_bytes:
            self.complete(call)
        self.held_bytes -= call.held_bytes
        call.held_bytes = 0
        if self._is_near_limit and self.held_bytes <= self._near_limit_bytes:
            self._update_near_limit()
        call.client = None                      # breaks a reference cycle, which would delay freeing the memory
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
        """Log that the connection of a client is closed because it does not read."""
        log.warning("%s has not read its answer in %g s: its connection is closed", peer, self.send_timeout_secs)

    def _trim(self) -> None:
        self._trimming = None
        if self.held_bytes <= LITTLE_BYTES:
            self._peak_bytes = self.held_bytes
            self._returning = self._loop.create_task(self._return_memory())

    def _check_memory(self) -> None:
        """Return memory to the system that transports have freed without a call.

        Messages that are cancelled, truncated or fail to decompress never become a call, and the allocator keeps their
        memory.
        """
        self._loop.call_later(_CHECK_SECS, self._check_memory)
        resident = resident_bytes()
        self._least_bytes = min(self._least_bytes, resident)
        if resident - self._least_bytes >= _MUCH_BYTES:
            self._trim()

    async def _return_memory(self) -> None:
        from infer_server.engines.capacity import trim  # here: frontend workers start without the package
        await in_daemon_thread(trim)
        self._least_bytes = resident_bytes()
