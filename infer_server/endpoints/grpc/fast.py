"""The call ModelInfer on pygrpc-native, whose HTTP/2 runs in Rust beside the interpreter; the others on grpc.aio.

Calls arrive in batches, as plain values: one hand-over to the event loop for all of them, and neither a coroutine nor a
future for each. TLS and limits on the age of connections are for the server on grpc.aio alone.
"""
from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import protos
from infer_server.endpoints.grpc.errors import described
from infer_server.endpoints.grpc.outbox import Outbox
from infer_server.endpoints.inflight import Inflight
from infer_server.errors import MemoryLimitError
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


def why_not(channel: Mapping[str, int], option_of: Callable[[str], str]) -> str:
    """What is in the way of this front; nothing if it can serve. channel: see GrpcSettings. option_of: the option that
    says a setting."""
    if importlib.util.find_spec("pygrpc_native") is None:
        return "--grpc-front fast needs pygrpc-native: pip install 'infer-server[fast]'"
    if unserved := sorted(map(option_of, channel.keys() - _SETTINGS.keys())):
        return f"--grpc-front fast has no {', '.join(unserved)}: leave out one or the other"
    return ""


class Calls(Protocol):
    """What becomes of the calls: calls.InferCalls."""

    def take(self, number: int, data: bytes, metadata: Any, peer: str, remaining_secs: float | None,
             received_ns: int) -> None: ...

    def leave(self, number: int) -> None:
        """The client of a call has gone, or its deadline has passed."""


class Fallback(Protocol):
    """What serves all other calls: aio.Behind."""

    async def start(self) -> str:
        """The path of its socket."""

    async def stop(self, grace: float | None) -> None: ...


class FastServer:
    """As a grpc.aio.Server: one port, start() once, then stop() once. Belongs to the event loop."""

    def __init__(self, behind: Fallback, calls: Callable[[Outbox], Calls], max_message_bytes: int,
                 channel: Mapping[str, int], inflight: Inflight, disconnect: Callable[[str], None],
                 shares_port: bool = False) -> None:
        """calls: takes calls that are answered by what it is given. inflight, disconnect: see Outbox. shares_port: see
        aio_server."""
        self._behind, self._calls_of = behind, calls
        self._max_message_bytes = max_message_bytes
        self._settings = {_SETTINGS[name][0]: _SETTINGS[name][1](value) for name, value in channel.items()}
        self._shares_port = shares_port
        self._loop = asyncio.get_running_loop()
        self._inflight, self._disconnect = inflight, disconnect
        self._is_looking = inflight.is_looking          # the event loop, for calls, before it sleeps
        self._loop_sleeps = threading.Semaphore(0)
        self.native: NativeGrpcFront
        self._outbox: Outbox
        self._calls: Calls

    def add_insecure_port(self, address: str) -> int:
        from pygrpc_native import NativeGrpcFront
        try:
            self.native = NativeGrpcFront(address, [(_PATH, False)], io_threads=_IO_THREADS, call_details=True,
                                          metrics=True, reuse_port=self._shares_port, **self._settings)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"cannot bind {address}: {error}") from error
        self._outbox = Outbox(self.native, _PATH, self._inflight, self._disconnect)
        self._calls = self._calls_of(self._outbox)
        return self.native.bound_port

    async def start(self) -> None:
        self.native.set_fallback(await self._behind.start())
        self.native.start()
        threading.Thread(target=self._receive, name="gRPC calls", daemon=True).start()

    async def wait_sent(self, timeout_secs: float) -> None:
        """Waits until clients have what was answered, at most `timeout_secs`."""
        await wait_until(lambda: not self._outbox.open_calls(), timeout_secs)

    async def stop(self, grace: float | None) -> None:
        await self._behind.stop(grace)
        await self._loop.run_in_executor(None, self.native.close)

    def _receive(self) -> None:
        """Hands calls over to the event loop, until the front is closed."""
        while self._hand_over():
            pass

    def _hand_over(self) -> bool:
        """Waits for calls, and keeps no reference to what they brought while it waits for the next."""
        events = self.native.recv_batch_details(_AT_A_TIME)
        if events is None:
            return False
        if len(events) == 1 and self._is_looking():
            post(self._loop, self._take_and_look, events)
            del events
            self._loop_sleeps.acquire()
        else:
            post(self._loop, self._take_all, events)
        return True

    def _take_and_look(self, events: list[Any]) -> None:
        """Takes calls, and goes on to receive those that follow soon: a switch between threads costs as much as all the
        rest. Meanwhile the thread waits."""
        try:
            self._take_all(events)
        finally:
            self._loop.call_soon(self._look)        # when they are answered, if that takes no more than the next turn

    def _look(self) -> None:
        events = self.native.recv_batch_details(_AT_A_TIME, 0) if self._is_looking() else None
        if events:
            self._take_and_look(events)
        elif events is None:
            self._loop_sleeps.release()
        else:
            self._loop.call_soon(self._look)

    def _take_all(self, events: list[Any]) -> None:
        self._outbox.keep_looking()
        for _, number, _, data, _, details in events:
            if data is None:
                self._calls.leave(number)
            elif len(data) <= self._max_message_bytes:
                metadata, peer, remaining_secs = details
                self._calls.take(number, data, metadata, peer, remaining_secs, time.monotonic_ns())
            else:
                self._refuse(number, len(data), details[1])

    def _refuse(self, number: int, size: int, peer: str) -> None:
        code, details = described(MemoryLimitError(
            f"Received message larger than max ({size} vs. {self._max_message_bytes})"), peer)
        self.native.fail(number, code.value[0], details)
