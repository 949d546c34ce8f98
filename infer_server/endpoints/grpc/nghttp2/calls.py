"""Calls on a connection: ModelInfer as an object without a coroutine, all others as a coroutine each."""
from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from infer_server.endpoints.grpc.compression import plain
from infer_server.endpoints.grpc.context import Serve
from infer_server.endpoints.grpc.errors import described
from infer_server.endpoints.grpc.infer_reply import InferReply
from infer_server.endpoints.grpc.methods import TakesInfer
from infer_server.endpoints.grpc.nghttp2.head import INTERNAL, RequestHead
from infer_server.endpoints.inflight import Inflight, OpenCall
from infer_server.errors import DeadlineExceededError, MemoryLimitError
from infer_server.protos.grpc_framing import PREFIX_BYTES, MessageReader, MessageTooLargeError


class Carrier(Protocol):
    """Interface of the connection of a call: GrpcConnection."""
    loop: asyncio.AbstractEventLoop
    inflight: Inflight
    max_message_bytes: int
    peer: str

    def acknowledge(self, stream: int, size: int) -> None:
        """Let the client send `size` more bytes."""

    def count_soon(self, call: InferCall) -> None:
        """Have `call.count` called after the events of this iteration of the event loop."""

    def watch_partial(self) -> None:
        """Check the minimum rate while a message arrives in pieces."""

    def answer(self, stream: int, response: bytes, head: RequestHead) -> None:
        """Send the only response of a call and the status OK."""

    def start(self, stream: int, head: RequestHead) -> None:
        """Send the headers of a streamed response."""

    def write_message(self, stream: int, message: bytes, head: RequestHead, call: CoroutineCall) -> bool:
        """Send a message; return False if it was only buffered, so that `call.sent` is called when it is sent."""

    def finish(self, stream: int, code: int, details: str, ended: bool) -> None:
        """Send the status of a call whose headers have been sent."""

    def refuse(self, stream: int, code: int, details: str, ended: bool) -> None:
        """Send the status of a call without a response."""

    def reset_when_sent(self, stream: int) -> None:
        """Reset a stream whose client has not sent everything, after its trailers have been sent."""

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...

    def flush_soon(self) -> None:
        """Send at the end of this iteration of the event loop."""

    def abort(self) -> None:
        """Abort the connection at once."""


class InferCall(InferReply):
    """ModelInfer call of a connection."""
    __slots__ = ("_connection", "_stream", "_head", "_calls", "_reader", "_uncounted", "_is_received", "_timer",
                 "_deadline", "_ended", "answered_at", "is_partial", "partial_bytes")

    def __init__(self, connection: Carrier, stream: int, head: RequestHead, calls: TakesInfer) -> None:
        self.open_call = self.submitted = None      # as InferReply's
        self.gone = False
        self._connection, self._stream, self._head, self._calls = connection, stream, head, calls
        self._reader: MessageReader | None = None       # while a message arrives in pieces
        self._uncounted = 0                             # bytes of it that are not counted yet
        self._is_received = False                       # the message is complete
        self._timer: asyncio.Handle | None = None       # uvloop returns no TimerHandle for less than 1 ms
        self._deadline = 0.0                            # time of the loop at which the timer fires
        self._ended = False                             # the client has sent everything
        self.answered_at, self.is_partial, self.partial_bytes = 0.0, False, 0
        if head.remaining_secs is not None:
            self._deadline = connection.loop.time() + head.remaining_secs
            self._timer = connection.loop.call_later(head.remaining_secs, self._expire)

    def receive(self, data: bytes, is_last: bool) -> None:
        # Another piece of this iteration.
        if self._uncounted and not is_last and self._reader and self._reader.append(data):
            self._uncounted += len(data)
            return
        self._ended = is_last
        size = len(data) - PREFIX_BYTES
        if self._is_received or self.gone:
            self._connection.acknowledge(self._stream, len(data))
        elif self._reader is None and size > 0 and (
                int.from_bytes(data[1:PREFIX_BYTES]) == size <= self._connection.max_message_bytes):
            self._connection.acknowledge(self._stream, len(data))
            if data[0] or self._timer:
                self._take(data[PREFIX_BYTES:], data[0] != 0)
            else:
                self._is_received = True
                self._calls.take(self, data[PREFIX_BYTES:], time.monotonic_ns(), None)
        else:
            self._receive_piece(data)
            if is_last and not (self._is_received or self.gone):
                self.refuse(INTERNAL, "the call ended before its message was complete")

    def _receive_piece(self, data: bytes) -> None:
        if self._reader is None:
            self._reader = MessageReader(self._connection.max_message_bytes)
            self.is_partial = True
            self._connection.watch_partial()
        if not self._uncounted:
            self._connection.count_soon(self)
        self._uncounted += len(data)
        try:
            messages = self._reader.feed(data)
        except MessageTooLargeError as error:
            self.fail(MemoryLimitError(str(error)))
            return
        if messages and self.count(is_complete=True):
            self._reader, self.is_partial = None, False
            self._connection.inflight.complete(self._open_call())
            self._take(*messages[0])

    def count(self, is_complete: bool = False) -> bool:
        """Count the bytes that have arrived, and let the client send as many more. False: the call has failed."""
        size, self._uncounted = self._uncounted, 0
        if size:
            self.partial_bytes += size
            self._connection.acknowledge(self._stream, size)
            inflight = self._connection.inflight
            try:
                if not self.gone:
                    if self.open_call is None:
                        self.open_call = inflight.begin(self, 0)
                    inflight.receive(self.open_call, size, is_complete)
            except MemoryLimitError as error:
                self.fail(error)
        return not self.gone

    def _open_call(self) -> OpenCall:
        assert self.open_call is not None
        return self.open_call

    def _take(self, data: bytes | bytearray, is_compressed: bool) -> None:
        self._is_received = True
        if is_compressed:
            self._connection.run(self._inflate(bytes(data)))
            return
        remaining_secs = None
        if self._timer:                     # the time that the message took to arrive is part of the deadline
            remaining_secs = max(0.0, self._deadline - self._connection.loop.time())
        # A bytearray that is not modified any more serves as bytes.
        self._calls.take(self, data, time.monotonic_ns(), remaining_secs)       # type: ignore[arg-type]

    async def _inflate(self, data: bytes) -> None:
        connection = self._connection
        if not self._head.is_encoded:
            self.refuse(INTERNAL, "a compressed message without grpc-encoding")
            return
        try:
            if self.open_call is None:
                self.open_call = connection.inflight.begin(self, len(data))
            message = await plain(data, connection.max_message_bytes, connection.inflight, self.open_call)
        except Exception as error:
            self.fail(error)
        else:
            if not self.gone:
                self._take(message, False)

    def _expire(self) -> None:
        if not self.gone:
            self.leave()
            self._refuse(*_late(self.peer()))

    def metadata(self) -> Iterable[tuple[str, Any]]:
        return self._head.metadata

    @property
    def needs_load_report(self) -> bool:
        return self._head.needs_load_report

    def peer(self) -> str:
        return self._connection.peer

    def disconnect(self) -> None:
        self._connection.abort()

    def respond(self, response: bytes) -> None:
        connection = self._connection
        if self.open_call:
            connection.inflight.keep(self.open_call, len(response))
        self.answered_at = connection.loop.time()
        connection.answer(self._stream, response, self._head)
        if not self._ended:
            connection.reset_when_sent(self._stream)

    def refuse(self, code: int, details: str) -> None:
        self.gone = True
        self._refuse(code, details)

    def _refuse(self, code: int, details: str) -> None:
        self.answered_at = self._connection.loop.time()
        if self.open_call and self.is_partial:      # the client need not close the stream to free the message
            self._connection.inflight.end(self.open_call)
        self._reader, self.is_partial = None, False
        self._connection.refuse(self._stream, code, details, self._ended)

    def close(self) -> None:
        if not self.gone:
            self.leave()
        if self._timer:
            self._timer.cancel()
        if self.open_call:
            self._connection.inflight.end(self.open_call)


class CoroutineCall:
    """Call that a coroutine serves; implements CallContext."""

    def __init__(self, connection: Carrier, stream: int, head: RequestHead, serve: Serve) -> None:
        self._connection, self._stream, self._head = connection, stream, head
        self._inflight = connection.inflight
        self._reader = MessageReader(connection.max_message_bytes)
        # Complete messages, the bytes that they close the window by, and what ends their being counted.
        self._messages: deque[tuple[bytes, int, Callable[[], None]]] = deque()
        self._partial = OpenCall(self)                  # counts a message that arrives in pieces
        self._ended = self._started = self._finished = False    # the client has sent all; headers, trailers are sent
        self._changed: asyncio.Future[None] | None = None       # set while read() waits for a message
        self._sent: asyncio.Future[None] | None = None          # set while write() waits until a message is sent
        self._done: list[Callable[[], None]] = []
        self._closed = False
        self.answered_at, self.is_partial, self.partial_bytes = 0.0, False, 0
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if head.remaining_secs is not None:
            self._deadline = connection.loop.time() + head.remaining_secs
            self._timer = connection.loop.call_later(head.remaining_secs, self._expire)
        self._task: asyncio.Task[None] | None = connection.run(self._run(serve))

    async def _run(self, serve: Serve) -> None:
        try:
            await serve(self)
        except asyncio.CancelledError:
            return
        except Exception as error:
            self.fail(error)
        else:
            self._finish(0, "")
        finally:
            self._task = None

    # ---- the connection
    def receive(self, data: bytes, is_last: bool) -> None:
        if self._finished or self._closed:
            self._connection.acknowledge(self._stream, len(data))
            return
        self._ended = self._ended or is_last
        try:
            messages = self._reader.feed(data)
            self._count(len(data), messages)
        except MessageTooLargeError as error:
            self.fail(MemoryLimitError(str(error)))
            return
        except MemoryLimitError as error:
            self.fail(error)
            return
        if is_last and not self._reader.is_between:
            self._refuse(INTERNAL, "the call ended before its message was complete")
        elif self._changed and (messages or is_last) and not self._changed.done():
            self._changed.set_result(None)

    def _count(self, size: int, messages: Sequence[tuple[bytes | bytearray, bool]]) -> None:
        """Count what has arrived. Bytes of a message in pieces open the window at once: it may exceed the window."""
        self.is_partial = not self._reader.is_between
        if messages:
            self._inflight.end(self._partial)
        complete = 0
        for message, is_compressed in messages:
            if is_compressed and not self._head.is_encoded:
                self._refuse(INTERNAL, "a compressed message without grpc-encoding")
                return
            window = min(size - complete, len(message) + PREFIX_BYTES)
            complete += window
            self._messages.append((bytes(message), window, self._inflight.hold_separately(len(message))))
        if rest := size - complete:
            self._connection.acknowledge(self._stream, rest)
            self.partial_bytes += rest
        if self.is_partial:
            self._inflight.receive(self._partial, rest)
            self._connection.watch_partial()

    def _expire(self) -> None:
        self._cancel()
        if not self._finished:
            self._refuse(*_late(self.peer()))

    def close(self) -> None:
        self._closed = True
        self._cancel()
        if self._timer:
            self._timer.cancel()
        self._inflight.end(self._partial)
        self._drop_messages()
        if self._sent and not self._sent.done():
            self._sent.set_result(None)
        for callback in self._done:
            callback()
        self._done.clear()

    def sent(self) -> None:
        """Wake the writer: all that was written has been sent."""
        if self._sent and not self._sent.done():
            self._sent.set_result(None)

    def _cancel(self) -> None:
        if self._task:
            self._task.cancel()
            self._task = None

    def _drop_messages(self) -> None:
        for _, window, free in self._messages:
            free()
            self._connection.acknowledge(self._stream, window)
        self._messages.clear()

    def fail(self, error: Exception) -> None:
        code, details = described(error, self.peer())
        self._refuse(code.value[0], details)

    def _refuse(self, code: int, details: str) -> None:
        self._finish(code, details)
        if self._task and asyncio.current_task() is not self._task:
            self._cancel()

    def _finish(self, code: int, details: str) -> None:
        if self._finished or self._closed:
            return
        self._finished, self.is_partial = True, False
        self.answered_at = self._connection.loop.time()
        self._inflight.end(self._partial)
        self._drop_messages()
        if self._started:
            self._connection.finish(self._stream, code, details, self._ended)
        else:
            self._connection.refuse(self._stream, code, details, self._ended)

    # ---- CallContext
    async def read(self) -> bytes | None:
        while not self._messages:
            if self._ended:
                return None
            self._changed = self._connection.loop.create_future()
            try:
                await self._changed
            finally:
                self._changed = None
        message, window, free = self._messages.popleft()
        free()
        self._connection.acknowledge(self._stream, window)
        self._connection.flush_soon()
        return message

    async def write(self, message: bytes) -> None:
        if self._finished or self._closed:
            return
        if not self._started:
            self._started = True
            self._connection.start(self._stream, self._head)
        if not self._connection.write_message(self._stream, message, self._head, self):
            self._sent = self._connection.loop.create_future()
            try:
                await self._sent
            finally:
                self._sent = None

    def peer(self) -> str:
        return self._connection.peer

    def metadata(self) -> Iterable[tuple[str, Any]]:
        return self._head.metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._connection.loop.time())

    def disconnect(self) -> None:
        self._connection.abort()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._done.append(callback)


def _late(peer: str) -> tuple[int, str]:
    code, details = described(DeadlineExceededError("Deadline Exceeded"), peer)
    return code.value[0], details
