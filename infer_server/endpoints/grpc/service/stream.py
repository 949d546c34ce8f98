"""The call ModelStreamInfer: requests one way, responses the other, several in flight.

Responses come in the order of the requests. Those of a decoupled model, which has any number for a request, come when
they are made. What goes wrong with a request is a message of the stream, and the stream goes on; a client that would
rather have it end with a status sends the metadata triton_grpc_error: true, as with Triton.
"""
from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from infer_server.endpoints.front import Front
from infer_server.endpoints.grpc.compression import plain
from infer_server.endpoints.grpc.context import CallContext, Check, Client
from infer_server.endpoints.grpc.service.infer import GrpcCall
from infer_server.endpoints.inflight import OpenCall
from infer_server.errors import ServeError, UnavailableError
from infer_server.protocol.redaction import public_text
from infer_server.protocol.wire import length_delimited, split_request
from infer_server.serving import Submitted
from protos import inference

log = logging.getLogger(__name__)

_MOST_AT_A_TIME = 1024          # requests of a stream that are not answered, and answers that are not read
_RESPONSE = inference.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2
_EMPTY_FINAL = "triton_enable_empty_final_response"


def _final(final: bool) -> bytes:
    """The parameter of a response that says whether it is the last of its request, to be appended to it."""
    response = inference.ModelInferResponse()
    response.parameters["triton_final_response"].bool_param = final
    return response.SerializeToString()


_FINAL = {final: _final(final) for final in (True, False)}


async def infer_stream(front: Front, check: Check, context: CallContext) -> None:
    """Serve a stream until its client has sent all requests and has been answered, or has gone."""
    check(context)
    await _Stream(context, front).serve()


class _Stream:
    """Belongs to the event loop."""

    def __init__(self, context: CallContext, front: Front) -> None:
        self.context, self.front = context, front
        self.client = _StreamClient(context, self.fail)
        self.over = False                               # nobody reads any more
        self._unanswered: deque[_Answer] = deque()      # in the order of their requests
        self._unsent: deque[tuple[bytes | Exception, OpenCall | None]] = deque()       # an error ends the stream
        self._all_read = False
        self._changed = asyncio.Event()                 # there is something to send, or no more will be
        self._room = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends_with_status = ("triton_grpc_error", "true") in tuple(context.metadata())

    async def serve(self) -> None:
        parts = [asyncio.ensure_future(part) for part in (self._read_all(), self._send_all())]
        work = asyncio.gather(*parts)
        done: set[asyncio.Future[Any]] = set()
        task: asyncio.Future[Any] | None = None
        try:
            done, _ = await asyncio.wait((work, self._failure), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.over = True
            work.add_done_callback(_taken_note_of)
            for part in parts:          # work, if one has failed, is done, and to cancel it would let the other go on
                part.cancel()
            self._failure.cancel()
            self._drop()
            # What refers to this object in a circle would keep its memory until the cycle collector runs.
            self.client.forget_stream()
            done.clear()
            task = None

    async def _read_all(self) -> None:
        while (data := await self.context.read()) is not None:
            answer = _Answer(self)
            self._unanswered.append(answer)
            await answer.take(data)
            while len(self._unanswered) + len(self._unsent) >= _MOST_AT_A_TIME:
                self._room.clear()
                await self._room.wait()
        self._all_read = True
        self._changed.set()

    async def _send_all(self) -> None:
        while self._unanswered or self._unsent or not self._all_read:
            self._changed.clear()
            while self._unsent:
                message, held = self._unsent.popleft()
                try:
                    if isinstance(message, Exception):
                        raise message
                    async with asyncio.timeout(self.front.inflight.send_timeout_secs):
                        await self.context.write(message)
                except TimeoutError:
                    log.warning("%s does not read its stream, which is ended", self.client.peer())
                    self.client.disconnect()
                    return
                finally:
                    if held:
                        self.front.inflight.end(held)
                self._room.set()
            if self._unanswered or not self._all_read:
                await self._changed.wait()

    def send(self, message: Sequence[bytes], held: OpenCall | None) -> None:
        """Queues pieces of a ModelInferResponse. held: what ends with it."""
        length = sum(map(len, message))
        self._unsent.append((b"".join((length_delimited(_RESPONSE, length), *message)), held))
        self._changed.set()

    def send_error(self, message: inference.ModelStreamInferResponse, held: OpenCall | None) -> None:
        self._unsent.append((message.SerializeToString(), held))
        self._changed.set()

    def settled(self) -> None:
        """To be called when an answer is complete: it is sent when those before it are."""
        while self._unanswered and self._unanswered[0].complete:
            self._unanswered.popleft().send_kept()
        self._changed.set()
        self._room.set()                # also where nothing is sent: an answer may be no response

    def leave(self, answer: _Answer) -> None:
        """Takes an answer out of the order: all of it is sent."""
        self._unanswered.remove(answer)
        self.settled()

    def fails_with(self, error: Exception, held: OpenCall | None) -> bool:
        """Whether the stream ends with an error of a request, behind what was answered before it."""
        if self._ends_with_status:
            self._unsent.append((error, held))
            self._changed.set()
        return self._ends_with_status

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, at once."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def _drop(self) -> None:
        """Withdraws what is not answered, and forgets what is not sent: nobody waits for it."""
        for answer in self._unanswered:
            answer.cancel()
        for _, held in self._unsent:
            if held:
                self.front.inflight.end(held)
        self._unanswered.clear()
        self._unsent.clear()


def _taken_note_of(work: asyncio.Future[Any]) -> None:
    """What cancelled work ends with is no news, which asyncio would log."""
    if not work.cancelled():
        work.exception()


class _StreamClient(Client):
    """The client of a stream: disconnecting it ends the stream at once."""

    def __init__(self, context: CallContext, end: Callable[[Exception], None]) -> None:
        super().__init__(context)
        self._end: Callable[[Exception], None] | None = end

    def disconnect(self) -> None:
        super().disconnect()
        if self._end:
            self._end(UnavailableError("the answers of this stream are not read"))

    def forget_stream(self) -> None:
        """To be called when the stream has ended."""
        self._end = None


class _Answer:
    """The responses to a request of a stream: one by send(), or any number by part() and then end(), or fail()."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._held: OpenCall | None = None
        self._call: GrpcCall | None = None
        self._submitted: Submitted | None = None
        self._kept: bytes | Exception | None = None     # until the answers before it are sent
        self.complete = False
        self._said_last = False                         # the last response did, that it is

    async def take(self, data: bytes) -> None:
        """Submits a serialised ModelInferRequest."""
        front, received_ns = self._stream.front, time.monotonic_ns()
        try:
            self._held = front.inflight.begin(self._stream.client, len(data))
            data = await plain(data, front.max_message_bytes, front.inflight, self._held)
            self._call = GrpcCall(split_request(data), received_ns, self._stream.context.time_remaining(), front,
                                  self._held)
            if front.on_demand:
                front.on_demand.when_loaded(self._call.model, self._submit, self.fail)
            else:
                self._submit()
        except ServeError as error:
            self.fail(error)
        except Exception as error:          # our bug
            log.exception("a request of a stream failed")
            self.fail(error)

    def _submit(self) -> None:
        if self._call and not self.gone:
            self._submitted = self._stream.front.inferences.submit(self._call, self)

    @property
    def gone(self) -> bool:
        return self.complete or self._stream.over

    def send(self, response: bytes) -> None:
        if self._held:                  # its client's time to read begins when those before it are sent
            self._stream.front.inflight.keep(self._held, len(response))
        self._settle(response)

    def fail(self, error: Exception) -> None:
        self._settle(error)

    def part(self, response: bytes, is_last: bool = False) -> None:
        """A response of a decoupled model; those of others go round it."""
        try:
            held = self._stream.front.inflight.begin(self._stream.client, len(response))
        except ServeError as error:
            self.cancel()
            self.fail(error)
            return
        self._stream.send((response, _FINAL[is_last]), held)
        self._said_last = is_last

    def end(self) -> None:
        if self._call and not self._said_last and self._call.parameters().get(_EMPTY_FINAL):
            self._kept = self._about().SerializeToString()
        self.complete = True
        self.send_kept()
        self._stream.leave(self)

    def cancel(self) -> None:
        submitted, self._submitted = self._submitted, None
        if submitted and not self.complete:
            submitted.cancel()
        self._release()

    def send_kept(self) -> None:
        kept, held, self._kept, self._held, self._submitted = self._kept, self._held, None, None, None
        if isinstance(kept, Exception):
            if not self._stream.fails_with(kept, held):
                response = self._about()
                response.parameters["triton_final_response"].bool_param = True
                self._stream.send_error(inference.ModelStreamInferResponse(
                    error_message=_said(kept), infer_response=response), held)
            return
        if kept is not None:
            self._stream.send((kept, _FINAL[True]), held)
            return
        if held:
            self._stream.front.inflight.end(held)

    def _settle(self, kept: bytes | Exception | None) -> None:
        self._kept, self.complete = kept, True
        self._stream.settled()

    def _about(self) -> inference.ModelInferResponse:
        """A response that says whose it is, and no more."""
        return self._call.about() if self._call else inference.ModelInferResponse()

    def _release(self) -> None:
        if self._held:
            self._stream.front.inflight.end(self._held)
            self._held = None


def _said(error: Exception) -> str:
    return public_text(error) if isinstance(error, ServeError) else f"internal error: {type(error).__name__}"
