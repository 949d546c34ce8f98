"""ModelStreamInfer: a bidirectional stream of requests and responses, with several requests in flight.

Responses are sent in the order of the requests. Those of a decoupled model, which has any number for each request, are
sent as they are made. An error of a request is a message of the stream, and the stream continues; a client that prefers
the stream to end with a status sends the metadata triton_grpc_error: true, as with Triton.
"""
from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from infer_server.endpoints.grpc.compression import plain
from infer_server.endpoints.grpc.context import CallClient, CallContext, Check
from infer_server.endpoints.grpc.service.infer import GrpcCall
from infer_server.endpoints.inflight import OpenCall
from infer_server.endpoints.services import InferenceServices
from infer_server.errors import ServeError, UnavailableError
from infer_server.protocol.redaction import public_text
from infer_server.protocol.wire import length_delimited, split_request
from infer_server.protos import inference
from infer_server.serving import Submitted

log = logging.getLogger(__name__)

_MAX_CONCURRENT = 1024          # limit of a stream's unanswered requests and unsent responses
_RESPONSE = inference.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2
_EMPTY_FINAL = "triton_enable_empty_final_response"


def _final(final: bool) -> bytes:
    """Return the serialised parameter triton_final_response, which is appended to a response."""
    response = inference.ModelInferResponse()
    response.parameters["triton_final_response"].bool_param = final
    return response.SerializeToString()


_FINAL = {final: _final(final) for final in (True, False)}


async def infer_stream(services: InferenceServices, check: Check, context: CallContext) -> None:
    """Serve a stream until its client has sent all requests and received all responses, or has disconnected."""
    check(context)
    await _InferStream(context, services).serve()


class _InferStream:
    """State of one stream. Belongs to the event loop."""

    def __init__(self, context: CallContext, services: InferenceServices) -> None:
        self.context, self.services = context, services
        self.client = _StreamClient(context, self.fail)
        self.over = False                               # True once the client reads no more
        self._unanswered: deque[_Answer] = deque()      # in the order of their requests
        self._unsent: deque[tuple[bytes | Exception, OpenCall | None]] = deque()       # an exception ends the stream
        self._all_read = False
        self._changed = asyncio.Event()                 # set if there is something to send, or the end was reached
        self._has_capacity = asyncio.Event()
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
            work.add_done_callback(_retrieve_exception)
            for part in parts:          # not `work`: it is done if one part has failed, while the other still runs
                part.cancel()
            self._failure.cancel()
            self._drop()
            # Break reference cycles, which would keep the memory until the cycle collector runs.
            self.client.forget_stream()
            done.clear()
            task = None

    async def _read_all(self) -> None:
        while (data := await self.context.read()) is not None:
            answer = _Answer(self)
            self._unanswered.append(answer)
            await answer.take(data)
            while len(self._unanswered) + len(self._unsent) >= _MAX_CONCURRENT:
                self._has_capacity.clear()
                await self._has_capacity.wait()
        self._all_read = True
        self._changed.set()

    async def _send_all(self) -> None:
        while self._unanswered or self._unsent or not self._all_read:
            self._changed.clear()
            while self._unsent:
                message, open_call = self._unsent.popleft()
                try:
                    if isinstance(message, Exception):
                        raise message
                    async with asyncio.timeout(self.services.inflight.send_timeout_secs):
                        await self.context.write(message)
                except TimeoutError:
                    log.warning("%s did not read its stream within --send-timeout-secs and is disconnected",
                                self.client.peer())
                    self.client.disconnect()
                    return
                finally:
                    if open_call:
                        self.services.inflight.end(open_call)
                self._has_capacity.set()
            if self._unanswered or not self._all_read:
                await self._changed.wait()

    def send(self, message: Sequence[bytes], open_call: OpenCall | None) -> None:
        """Queue the pieces of a ModelInferResponse; `open_call` is released once it is sent."""
        length = sum(map(len, message))
        self._unsent.append((b"".join((length_delimited(_RESPONSE, length), *message)), open_call))
        self._changed.set()

    def send_error(self, message: inference.ModelStreamInferResponse, open_call: OpenCall | None) -> None:
        self._unsent.append((message.SerializeToString(), open_call))
        self._changed.set()

    def settled(self) -> None:
        """Send the answers that are complete, up to the first incomplete one."""
        while self._unanswered and self._unanswered[0].complete:
            self._unanswered.popleft().send_result()
        self._changed.set()
        self._has_capacity.set()                # even if nothing is sent: an answer may have no response

    def leave(self, answer: _Answer) -> None:
        """Remove an answer whose responses were all sent."""
        self._unanswered.remove(answer)
        self.settled()

    def fails_with(self, error: Exception, open_call: OpenCall | None) -> bool:
        """End the stream with a request's error if the client requested that; return False if not."""
        if self._ends_with_status:
            self._unsent.append((error, open_call))
            self._changed.set()
        return self._ends_with_status

    def fail(self, error: Exception) -> None:
        """End the stream with an error at once."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def _drop(self) -> None:
        """Cancel unanswered requests and drop unsent responses."""
        for answer in self._unanswered:
            answer.cancel()
        for _, open_call in self._unsent:
            if open_call:
                self.services.inflight.end(open_call)
        self._unanswered.clear()
        self._unsent.clear()


def _retrieve_exception(work: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a future, so that asyncio does not log it."""
    if not work.cancelled():
        work.exception()


class _StreamClient(CallClient):
    """Client of a stream: disconnecting it ends the stream at once."""

    def __init__(self, context: CallContext, end: Callable[[Exception], None]) -> None:
        super().__init__(context)
        self._end: Callable[[Exception], None] | None = end

    def disconnect(self) -> None:
        super().disconnect()
        if self._end:
            self._end(UnavailableError("the client does not read the responses of this stream"))

    def forget_stream(self) -> None:
        """Drop the reference to a stream that has ended."""
        self._end = None


class _Answer:
    """StreamReply of a request of a stream: one send(), or any number of part() and then end(), or fail()."""

    def __init__(self, stream: _InferStream) -> None:
        self._stream = stream
        self._open_call: OpenCall | None = None
        self._call: GrpcCall | None = None
        self._submitted: Submitted | None = None
        self._result: bytes | Exception | None = None     # result that waits for the answers before it
        self.complete = False
        self._sent_final = False                        # True if the last response had the final flag

    async def take(self, data: bytes) -> None:
        """Submit a serialised ModelInferRequest."""
        services, received_ns = self._stream.services, time.monotonic_ns()
        try:
            self._open_call = services.inflight.begin(self._stream.client, len(data))
            data = await plain(data, services.max_message_bytes, services.inflight, self._open_call)
            self._call = GrpcCall(split_request(data), received_ns, self._stream.context.time_remaining(), services,
                                  self._open_call)
            if services.on_demand:
                services.on_demand.when_loaded(self._call.model, self._submit, self.fail)
            else:
                self._submit()
        except ServeError as error:
            self.fail(error)
        except Exception as error:          # an internal error
            log.exception("a request of a stream failed")
            self.fail(error)

    def _submit(self) -> None:
        if self._call and not self.gone:
            self._submitted = self._stream.services.inferences.submit(self._call, self)

    @property
    def gone(self) -> bool:
        return self.complete or self._stream.over

    def send(self, response: bytes) -> None:
        if self._open_call:             # the send timeout begins once the answers before it are sent
            self._stream.services.inflight.keep(self._open_call, len(response))
        self._settle(response)

    def fail(self, error: Exception) -> None:
        self._settle(error)

    def part(self, response: bytes, is_last: bool = False) -> None:
        """Send a response of a decoupled model, independently of the order of other answers."""
        try:
            open_call = self._stream.services.inflight.begin(self._stream.client, len(response))
        except ServeError as error:
            self.cancel()
            self.fail(error)
            return
        self._stream.send((response, _FINAL[is_last]), open_call)
        self._sent_final = is_last

    def end(self) -> None:
        if self._call and not self._sent_final and self._call.parameters().get(_EMPTY_FINAL):
            self._result = self._about().SerializeToString()
        self.complete = True
        self.send_result()
        self._stream.leave(self)

    def cancel(self) -> None:
        submitted, self._submitted = self._submitted, None
        if submitted and not self.complete:
            submitted.cancel()
        self._release()

    def send_result(self) -> None:
        result, open_call = self._result, self._open_call
        self._result = self._open_call = self._submitted = None
        if isinstance(result, Exception):
            if not self._stream.fails_with(result, open_call):
                response = self._about()
                response.parameters["triton_final_response"].bool_param = True
                self._stream.send_error(inference.ModelStreamInferResponse(
                    error_message=_error_text(result), infer_response=response), open_call)
            return
        if result is not None:
            self._stream.send((result, _FINAL[True]), open_call)
            return
        if open_call:
            self._stream.services.inflight.end(open_call)

    def _settle(self, result: bytes | Exception | None) -> None:
        self._result, self.complete = result, True
        self._stream.settled()

    def _about(self) -> inference.ModelInferResponse:
        """Return a response with the names of the model and the request only."""
        return self._call.about() if self._call else inference.ModelInferResponse()

    def _release(self) -> None:
        if self._open_call:
            self._stream.services.inflight.end(self._open_call)
            self._open_call = None


def _error_text(error: Exception) -> str:
    return public_text(error) if isinstance(error, ServeError) else f"internal error: {type(error).__name__}"
