"""Server side of a Python model's process: start it, send batches, and serve its calls."""
from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from numpy.typing import NDArray

from infer_server.batching.request import NO_MORE, RESCHEDULE, Outcome, Outputs, Request, StreamReply
from infer_server.batching.statistics import BatchExecution
from infer_server.errors import ExecutionError, RepositoryError
from infer_server.observing.traces import RequestTrace
from infer_server.python_backend.channel import ChannelMessage, ClosedError, MessageChannel, Tensors, Typed
from infer_server.python_backend.failures import error_head, error_of, escape_surrogates
from infer_server.python_backend.launch import LaunchParameters

log = logging.getLogger(__name__)

_FINALIZE_SECS = 10.0
_POLL_SECS = 0.01               # poll interval while senders have yet to send responses
_ENDING_SECS = 10.0             # time for a process that has closed its connection to end
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Answer = Callable[[Mapping[str, Any], Tensors], None]   # sends a response, from its head and tensors
# Handlers of the model's calls to the server, by message kind; called on any thread.
Handlers = Mapping[str, Callable[[ChannelMessage, Answer], object]]


class ModelProcess:
    """Process of one instance. execute() and close() belong to the instance's thread."""

    def __init__(self, launch: LaunchParameters, handlers: Handlers,
                 deliver: Callable[[list[Outcome], BatchExecution | None], None],
                 post: Callable[..., None], ended: Callable[[], None]) -> None:
        """Start the process.

        `deliver` takes outcomes that come after their execution, `post` calls a function on the event loop, and `ended`
        is called after the process has ended and all its calls were handled.
        """
        self.launch = launch                            # replaced once, after auto-completion
        self._handlers, self._deliver, self._post, self._on_end = handlers, deliver, post, ended
        self._numbers = itertools.count()
        self._responded_secs = 0.0                      # time of the last response
        self._lock = threading.Lock()
        self._open: dict[int, Request] = {}             # without the last response; code that pops one must end it
        self._executing: tuple[int, ...] = ()           # open ones that execute() ends; the reader ends the others
        self._between: dict[Request, int] = {}          # rescheduled ones, which keep their numbers
        self._last: dict[int, Any] = {}                 # results of rescheduled ones that have ended meanwhile
        self._ended = ""                                # how the process ended; "" while it runs
        self._first_responses: dict[int, Any] = {}                 # first responses of open requests that take only one
        self._has_is_ready = False                      # True if the model has an is_ready()
        self._checking: Future[bool] | None = None      # result of the is_ready() call in progress
        self._replies: queue.SimpleQueue[ChannelMessage | None] = queue.SimpleQueue()      # None: the process has ended
        self._outbox: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()     # None: it has ended
        server_socket, model_socket = socket.socketpair()
        with model_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "infer_server.python_backend", str(model_socket.fileno())],
                pass_fds=[model_socket.fileno()], stdin=subprocess.DEVNULL)
        self._channel = MessageChannel(server_socket)
        for work, name in ((self._read, "reader"), (self._watch, "watcher"), (self._write, "writer")):
            threading.Thread(target=work, name=f"{launch.name} {name}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def initialize(self, complete: bool) -> str:
        """Return the configuration as JSON, completed by the model if `complete`. Raises RepositoryError."""
        try:
            self._channel.send({"kind": "initialize", "path": str(self.launch.file),
                                "arguments": dict(self.launch.arguments), "complete": complete})
            message = self._reply(self.launch.start_secs, "initialize")
        except (ClosedError, ExecutionError) as error:
            raise RepositoryError(f"{self.launch.file}: {error}") from error
        config: str = message.head["config"]
        self._has_is_ready = message.head["has_is_ready"]
        return config

    def check(self) -> Future[bool]:
        """Call the model's is_ready(), one call at a time; callers meanwhile share its result."""
        with self._lock:
            if self._checking:
                return self._checking
            checking = Future[bool]()
            if not self._has_is_ready or self._ended:   # an ended process is restarted for the next request
                checking.set_result(True)
                return checking
            self._checking = checking
        self._send_later({"kind": "check"})
        return checking

    def _checked(self, ready: bool) -> None:
        with self._lock:
            checking, self._checking = self._checking, None
        if checking:
            checking.set_result(ready)

    def execute(self, batch: list[Request]) -> tuple[list[Outcome], BatchExecution | None]:
        """Execute a batch; the execution is None if nothing was executed or the process ended or was killed."""
        started_ns = time.monotonic_ns()
        with self._lock:
            numbers, batch, outcomes = self._begin(batch)
            self._executing = numbers
        if not batch:
            return outcomes, None
        try:
            self._channel.send({"kind": "execute", "batch": numbers[0], "requests": [
                _described(number, request) for number, request in zip(numbers, batch, strict=True)]},
                [self._typed(request.inputs) for request in batch])
            sent_ns = time.monotonic_ns()
            if self.launch.is_decoupled and not self.launch.is_iterative:
                for request in batch:
                    request.inputs = {}         # free memory: its last response may come much later
            for number, request in zip(numbers, batch, strict=True):
                # It may have been cancelled before cancel() could find it here. Warm-up requests were never queued.
                if request.reply.gone and request.enqueued_ns:
                    self._send_cancelled(number)
            message = self._reply(self.launch.execute_secs, "execute")
        except (ClosedError, ExecutionError, OSError) as error:
            return outcomes + self._failed(numbers, error), None
        computed_ns = time.monotonic_ns()
        results = [(number, request, self._result(request, head, tensors)) for number, request, head, tensors
                   in zip(numbers, batch, message.head["responses"], message.tensors, strict=True)
                   if head is not None and number in self._open]    # otherwise its sender sends the last response
        with self._lock:                        # requests that stay open are ended by the reader
            for number, request, result in results:
                if number not in self._open:
                    continue
                if result is RESCHEDULE:
                    self._between[request] = number
                else:
                    result = self._first_responses.get(number, result)     # only the first response counts
                    self._end(number)
                outcomes.append((request, result))
            self._executing = ()
            if self._ended:
                outcomes += self._unanswered()
        items, here = sum(request.items for request in batch), {request for request, _ in outcomes}
        return outcomes, BatchExecution(items, batch[0].enqueued_ns, started_ns, sent_ns, computed_ns,
                                        time.monotonic_ns(), apart_ns=tuple(
                                            request.enqueued_ns for request in batch if request not in here))

    def _failed(self, numbers: Sequence[int], error: Exception) -> list[Outcome]:
        """End the executing requests with an error; an OSError means that their inputs could not be sent."""
        if isinstance(error, OSError):
            reason = f"{self.launch.name}: its inputs cannot be sent: {error}"
        else:
            reason = f"{self._ended_in('execute') if isinstance(error, ClosedError) else error}; it is restarted"
            self.kill()
        log.error("failed on a batch of %d requests: %s", len(numbers), reason)
        with self._lock:
            self._executing = ()
            return [(self._end(number), ExecutionError(reason)) for number in numbers if number in self._open]

    def _begin(self, batch: list[Request]) -> tuple[tuple[int, ...], list[Request], list[Outcome]]:
        """Return numbers and requests to execute, and outcomes of rescheduled ones that have ended meanwhile."""
        begun: dict[int, Request] = {}
        ended: list[Outcome] = []
        for request in batch:
            number = self._between.pop(request, None)
            if number in self._last:
                ended.append((self._end(number), self._last.pop(number)))
            elif number is None and self.launch.is_iterative and request.sequence and not request.sequence.start:
                ended.append((request, ExecutionError(
                    f"{self.launch.name}: its process ended between two executions of the request")))
            else:
                number = next(self._numbers) if number is None else number
                begun[number] = request
                if request.window:
                    request.on_consumed = partial(self._send_later, {"kind": "consumed", "request": number})
        self._open.update(begun)
        return tuple(begun), [*begun.values()], ended

    def _end(self, number: int) -> Request:
        self._first_responses.pop(number, None)
        return self._open.pop(number)

    def cancel(self, request: Request) -> None:
        """Notify the model that a request was cancelled, if it is open. Thread-safe."""
        for number, other in list(self._open.items()):
            if other is request:
                self._send_cancelled(number)

    def trace_of(self, number: int) -> RequestTrace | None:
        """Return the trace of the open request with this number. From any thread."""
        return request.trace if (request := self._open.get(number)) else None

    def forget(self, request: Request) -> None:
        """Remove a rescheduled request that has ended and notify its response sender. Thread-safe."""
        with self._lock:
            number = self._between.pop(request, None)
            if number is None:
                return
            self._end(number)
            self._last.pop(number, None)
        self._send_later({"kind": "forget", "request": number})

    def _send_cancelled(self, number: int) -> None:
        self._send_later({"kind": "cancel", "request": number})

    def _send_later(self, head: Mapping[str, Any]) -> None:
        """Queue a message without waiting, since the process may not read; dropped if the process ends."""
        self._outbox.put(head)

    def _write(self) -> None:
        try:
            while (head := self._outbox.get()) is not None:
                self._channel.send(head)
        except ClosedError:
            log.debug("%s ended before it received %s", self.launch.name, head)

    def close(self) -> None:
        """Wait for awaited responses, finalize the model, and end the process."""
        end = time.monotonic() + self.launch.execute_secs
        while self.is_alive and self._is_awaited() and time.monotonic() < end:
            time.sleep(_POLL_SECS)
        if self.is_alive:
            try:
                self._channel.send({"kind": "finalize"})
                self._reply(_FINALIZE_SECS, "finalize")
                self._process.wait(_FINALIZE_SECS)
            except (ClosedError, ExecutionError, subprocess.TimeoutExpired) as error:
                log.warning("%s did not end by itself: %s", self.launch.name, error)
        self.kill()

    def _is_awaited(self) -> bool:
        with self._lock:
            return any(not request.reply.gone for request in self._open.values())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _reply(self, seconds: float, operation: str) -> ChannelMessage:
        self._responded_secs = time.monotonic()
        while True:
            try:
                message = self._replies.get(timeout=seconds)
                break
            except queue.Empty:                 # responses that were sent meanwhile restart the timeout
                if time.monotonic() - self._responded_secs >= seconds:
                    raise ExecutionError(f"{self.launch.name}: {operation} took more than {seconds:g} s, and its "
                                         "process was killed") from None
        if message is None:
            raise self._ended_in(operation)
        if message.head["kind"] == "failed":
            raise ExecutionError(f"{self.launch.name}: {operation} failed: {escape_surrogates(message.head['error'])}")
        return message

    def _ended_in(self, operation: str) -> ExecutionError:
        return ExecutionError(f"{self.launch.name}: its process ended in {operation}: {self._how_it_ended()}")

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_ENDING_SECS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                kind = message.head["kind"]
                if kind == "response":
                    self._respond(message)
                elif kind in self._handlers:
                    self._serve(message)
                elif kind == "checked":
                    self._checked(message.head["ready"])
                elif kind == "log":
                    log.log(_LEVELS[message.head["level"]], "%s: %s", self.launch.name, message.head["text"])
                else:
                    self._replies.put(message)
                del message                     # free its tensors now
        except ClosedError:
            how = self._how_it_ended()
        except Exception as error:      # waiting requests fail below
            log.exception("%s: its process sent an invalid message and is killed", self.launch.name)
            self._process.kill()
            self._process.wait()
            how = f"it sent an invalid message: {type(error).__name__}: {error}"
        self._channel.dispose()
        with self._lock:
            self._ended = how
            late = self._unanswered()
        self._replies.put(None)
        self._outbox.put(None)
        self._checked(False)
        self._on_end()
        if late:
            self._deliver(late, None)

    def _watch(self) -> None:
        """Close the channel when the process ends: processes that it forked may keep the connection open."""
        with suppress(ChildProcessError):       # its status was already collected
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self._channel.close()                   # data already sent can still be received

    def _unanswered(self) -> list[Outcome]:
        """Fail the requests that were open when the process ended."""
        reason = f"{self.launch.name}: its process ended before all responses were there: {self._ended}"
        others = {*self._executing, *self._between.values()}
        return [(self._end(number), ExecutionError(reason)) for number in list(self._open) if number not in others]

    def _serve(self, message: ChannelMessage) -> None:
        number = message.head["number"]

        def answer(head: Mapping[str, Any], tensors: Tensors) -> None:
            reply = {"kind": "answered", "number": number, **head}
            if not tensors:
                return self._send_later(reply)
            try:
                self._channel.send(reply, [tensors])
            except ClosedError:
                log.debug("%s ended before its call was answered", self.launch.name)

        try:
            self._handlers[message.head["kind"]](message, answer)
        except Exception as error:      # the model may pass anything, and waits for an answer
            answer(error_head(error), {})

    def _respond(self, message: ChannelMessage) -> None:
        """Handle a response of a response sender."""
        number, final = message.head["request"], message.head["final"]
        self._responded_secs = time.monotonic()
        request = self._open.get(number)
        if request is None:
            return                              # the request has already failed
        result: Any = NO_MORE
        streams = self.launch.is_decoupled and isinstance(request.reply, StreamReply)
        dropped = streams and request.reply.gone            # cancelled, which the model may not know yet
        if "error" in message.head or (message.tensors and not dropped):
            result = self._result(request, message.head, message.tensors[0] if message.tensors else {})
        if streams and result is not NO_MORE and not isinstance(result, Exception):
            self._post(request.part, result, bool(final))
            result = NO_MORE
        elif not streams and result is not NO_MORE:
            with self._lock:
                if number in self._open:
                    self._first_responses[number] = result
        if final or (streams and isinstance(result, Exception)):
            with self._lock:
                if number not in self._open:
                    return                      # the request has ended meanwhile
                if not streams:
                    missing = ExecutionError(f"{self.launch.name}: it gave no response")
                    result = self._first_responses.pop(number, missing)
                if request in self._between:
                    self._last[number] = result     # the request is queued and ends when it is taken
                    return
                self._end(number)
            self._deliver([(request, result)], None)

    def _result(self, request: Request, head: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Any:
        """Return the encoded response, an exception, or RESCHEDULE."""
        if "again" in head:
            return RESCHEDULE if self.launch.is_iterative else ExecutionError(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured "
                f"to handle such a flag. {self.launch.name}: write sequence_batching {{ iterative_sequence: true }}")
        if "error" in head:
            return error_of(head)
        try:
            tensors = {**tensors, **{name: self.launch.as_declared(name, tensors[name])
                                     for name in tensors.keys() & set(request.outputs)}}
            is_plain = not head.get("parameters") and tensors.keys() >= set(request.outputs)
            return request.encode(tensors if is_plain else Outputs(tensors, head.get("parameters", {})))
        except ExecutionError as error:
            return error
        except Exception as error:      # depends on the protocol and on the model's output
            log.exception("%s: a response cannot be sent", self.launch.name)
            return ExecutionError(f"{self.launch.name}: its response cannot be sent: {escape_surrogates(error)}")

    def _typed(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Typed]:
        return {name: Typed(self.launch.inputs[name].name, array) for name, array in arrays.items()}


def _described(number: int, request: Request) -> dict[str, Any]:
    sequence = request.sequence
    return {"number": number, "request_id": request.id, "requested_output_names": request.outputs,
            "correlation_id": sequence.id if sequence else 0,
            "flags": (sequence.start | sequence.end << 1) if sequence else 0,
            "timeout": request.timeout_us, "priority": request.priority, "parameters": dict(request.parameters),
            "window": request.window}
