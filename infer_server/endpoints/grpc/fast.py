"""The call ModelInfer on pygrpc-native, whose HTTP/2 runs in Rust beside the interpreter; the others on grpc.aio.

Calls arrive in batches, as plain values: one hand-over to the event loop for all of them, and neither a coroutine nor a
future for each. TLS and limits on the age of connections are for the server on grpc.aio alone. An answer counts as read
once it is handed over, for pygrpc-native does not tell when a client has taken which.
"""
from __future__ import annotations

import asyncio
import importlib.util
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

import protos
from infer_server.endpoints.grpc.errors import described
from infer_server.endpoints.grpc.infer import GrpcCall, GrpcFront
from infer_server.endpoints.inflight import OpenCall
from infer_server.endpoints.restrictions import OF_CALL, Restrictions
from infer_server.errors import MemoryLimitError
from infer_server.protocol.wire import split_request
from infer_server.serving import Submitted
from infer_server.workers import post, wait_until

if TYPE_CHECKING:
    from pygrpc_native import NativeGrpcFront

_CALL = "ModelInfer"
_PATH = f"/{protos.INFERENCE_SERVICE}/{_CALL}"
_AT_A_TIME = 64                     # calls that one hand-over takes
_IO_THREADS = 1
# Settings of a channel, as gRPC's C core calls them, and what they are called here.
_SETTINGS: dict[str, tuple[str, type]] = {
    "grpc.keepalive_time_ms": ("keepalive_time_ms", int), "grpc.keepalive_timeout_ms": ("keepalive_timeout_ms", int),
    "grpc.keepalive_permit_without_calls": ("keepalive_permit_without_calls", bool)}


def why_not(channel: Mapping[str, int]) -> str:
    """What is in the way of this front; nothing if it can serve. channel: see GrpcSettings."""
    if importlib.util.find_spec("pygrpc_native") is None:
        return "--grpc-front fast needs pygrpc-native: pip install 'infer-server[fast]'"
    if unserved := sorted(name.removeprefix("grpc.") for name in channel.keys() - _SETTINGS.keys()):
        return f"--grpc-front fast has no {', '.join(unserved)}: leave out the option, or the front"
    return ""


class FastServer:
    """As a grpc.aio.Server: one port, start() once, then stop() once. Belongs to the event loop."""

    def __init__(self, behind: grpc.aio.Server, front: GrpcFront, restrictions: Restrictions, max_message_bytes: int,
                 channel: Mapping[str, int]) -> None:
        """behind: serves the other calls; not started, without ports."""
        self._behind, self._front, self._restrictions = behind, front, restrictions
        self._max_message_bytes = max_message_bytes
        self._settings = {_SETTINGS[name][0]: _SETTINGS[name][1](value) for name, value in channel.items()}
        self._folder = ""                                   # of the socket between the two
        self._answers: dict[int, _Answer] = {}              # that are awaited, by the numbers of their calls
        self._loop = asyncio.get_running_loop()
        self.native: NativeGrpcFront

    def add_insecure_port(self, address: str) -> int:
        from pygrpc_native import NativeGrpcFront
        try:
            self.native = NativeGrpcFront(address, [(_PATH, False)], io_threads=_IO_THREADS, call_details=True,
                                          metrics=True, **self._settings)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"cannot bind {address}: {error}") from error
        return self.native.bound_port

    async def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="infer-server-")
        path = f"{self._folder}/grpc"
        self._behind.add_insecure_port(f"unix:{path}")
        await self._behind.start()
        self.native.set_fallback(path)
        self.native.start()
        threading.Thread(target=self._receive, name="gRPC calls", daemon=True).start()

    async def wait_sent(self, timeout_secs: float) -> None:
        """Waits until clients have what was answered, at most `timeout_secs`."""
        await wait_until(lambda: not self._unsent(), timeout_secs)

    async def stop(self, grace: float | None) -> None:
        await self._behind.stop(grace)
        await self._loop.run_in_executor(None, self.native.close)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _unsent(self) -> int:
        metrics: Any = self.native.metrics()
        calls = metrics["methods"][_PATH]
        ended: int = sum(status["count"] for status in calls["status"].values())
        return int(calls["started"]) - ended

    def _receive(self) -> None:
        """Hands calls over to the event loop, until the front is closed."""
        while self._hand_over():
            pass

    def _hand_over(self) -> bool:
        """Waits for calls, and keeps no reference to what they brought while it waits for the next."""
        events = self.native.recv_batch_details(_AT_A_TIME)
        if events is None:
            return False
        post(self._loop, self._take_all, events)
        return True

    def _take_all(self, events: list[Any]) -> None:
        for _, number, _, data, _, details in events:
            if data is not None:
                self._take(number, data, *details)
            elif answer := self._answers.get(number):
                answer.leave()

    def _take(self, number: int, data: bytes, metadata: Any, peer: str, remaining_secs: float | None) -> None:
        """Submits a serialised ModelInferRequest."""
        received_ns = time.monotonic_ns()
        answer = self._answers[number] = _Answer(self, number, peer)
        try:
            category = OF_CALL[_CALL]
            if category in self._restrictions.secrets:
                self._restrictions.check(category, dict(metadata).get)
            if len(data) > self._max_message_bytes:
                raise MemoryLimitError(f"Received message larger than max ({len(data)} vs. {self._max_message_bytes})")
            held = answer.held = self._front.inflight.begin(answer, len(data))
            call = _FastCall(split_request(data), received_ns, remaining_secs, self._front, held)
            call.metadata, call.early = metadata, answer.send_early
            if self._front.on_demand:
                self._front.on_demand.when_loaded(call.model, partial(self._submit, call, answer), answer.fail)
            else:
                self._submit(call, answer)
        except Exception as error:
            answer.fail(error)

    def _submit(self, call: GrpcCall, answer: _Answer) -> None:
        if not answer.gone:
            answer.submitted = self._front.inferences.submit(call, answer)

    def forget(self, answer: _Answer) -> None:
        """To be called when an answer is given, or nobody waits for it any more."""
        del self._answers[answer.number]
        if answer.held:
            self._front.inflight.end(answer.held)

    def disconnect(self, peer: str) -> None:
        self._front.disconnect(peer)


class _FastCall(GrpcCall):
    metadata: Sequence[tuple[str, str]] = ()

    def header(self, name: str) -> str:
        return dict(self.metadata).get(name, "")


class _Answer:
    """The reply to a call, and its client."""
    __slots__ = ("_server", "number", "_peer", "held", "submitted", "gone", "_sent")

    def __init__(self, server: FastServer, number: int, peer: str) -> None:
        self._server, self.number, self._peer = server, number, peer
        self.held: OpenCall | None = None
        self.submitted: Submitted | None = None
        self.gone = self._sent = False

    def send_early(self, response: bytes) -> None:
        """On an instance's thread, which spares the client the way over the event loop. If the loop comes first, both
        respond, and pygrpc-native takes one."""
        if not self.gone:
            self._sent = True
            self._server.native.respond(self.number, response)

    def send(self, response: bytes) -> None:
        self._end()
        if not self._sent:
            self._server.native.respond(self.number, response)

    def fail(self, error: Exception) -> None:
        if not self.gone:
            self._end()
            code, details = described(error, self._peer)
            self._server.native.fail(self.number, code.value[0], details)

    def leave(self) -> None:
        """Its client has gone, or its deadline has passed."""
        submitted = self.submitted
        self._end()
        if submitted:
            submitted.cancel()

    def _end(self) -> None:
        self.gone, self.submitted = True, None
        self._server.forget(self)

    # ---- inflight.Client
    def peer(self) -> str:
        return self._peer

    def disconnect(self) -> None:
        self._server.disconnect(self._peer)
