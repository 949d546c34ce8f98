"""Who receives what pygrpc-native has read: a thread that waits, or the event loop while it looks for the next call."""
from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from infer_server.endpoints.grpc.fast import FastServer
from infer_server.endpoints.grpc.outbox import Outbox
from infer_server.endpoints.inflight import Inflight
from tests.infer_server.endpoints.test_grpc import request_of
from tests.infer_server.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.serving import serving as running

pytest.importorskip("pygrpc_native")
PATH = "/inference.GRPCInferenceService/ModelInfer"


class NoOther:
    """There are no other calls than inference."""

    async def start(self) -> str:
        return "/nowhere"

    async def stop(self, grace: float | None) -> None: ...


class Echo:
    """Calls that are answered with what they brought, where they are received: as short batches are."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def take(self, number: int, data: bytes, *_: Any) -> None:
        self._outbox.respond(number, data, "")

    def leave(self, number: int) -> None: ...


class LaterEcho(Echo):
    """Answers in the event loop's next turn, after which it looks: as batches are gathered, and as it is in service."""

    def __init__(self, outbox: Outbox, served: Served) -> None:
        super().__init__(outbox)
        self._served = served

    def take(self, number: int, data: bytes, *_: Any) -> None:
        self._served.is_looking = False
        asyncio.get_running_loop().call_soon(self._answer, number, data)

    def _answer(self, number: int, data: bytes) -> None:
        self._served.is_looking = True
        super().take(number, data)


class Observed:
    """The front of pygrpc-native, and how many calls each thread has received."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.by_thread: dict[int, int] = {}

    def recv_batch_details(self, *given: Any) -> Any:
        events = self._native.recv_batch_details(*given)
        ident = threading.get_ident()
        self.by_thread[ident] = self.by_thread.get(ident, 0) + len(events or ())
        return events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


class Served:
    def __init__(self, answers_later: bool = False) -> None:
        self.is_looking = False
        inflight = Inflight(1 << 30, TIMEOUT_SECS)
        inflight.is_looking = lambda: self.is_looking          # type: ignore[method-assign]
        self.server = FastServer(NoOther(), partial(LaterEcho, served=self) if answers_later else Echo, 1 << 20, {},
                                 inflight, lambda peer: None)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.native = self.server.native = Observed(self.server.native)     # type: ignore[assignment]
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._ask: Any = self._channel.unary_unary(PATH)

    async def ask(self, count: int) -> None:
        """One after the other."""
        for number in range(count):
            assert await self._ask(b"%d" % number, timeout=TIMEOUT_SECS) == b"%d" % number

    async def ask_at_once(self, count: int) -> None:
        payloads = [b"%d" % number for number in range(count)]
        assert await asyncio.gather(*[self._ask(payload, timeout=TIMEOUT_SECS) for payload in payloads]) == payloads

    def received_by_the_loop(self) -> int:
        return self.native.by_thread.get(threading.get_ident(), 0)

    async def stop(self) -> None:
        await self._channel.close()
        await self.server.stop(None)


def serving(work: Callable[[Served], Awaitable[None]], answers_later: bool = False) -> None:
    async def run() -> None:
        served = Served(answers_later)
        await served.server.start()
        await work(served)
        await served.stop()
        thread = next((thread for thread in threading.enumerate() if thread.name == "gRPC calls"), None)
        if thread:
            await asyncio.get_running_loop().run_in_executor(None, thread.join, TIMEOUT_SECS)
            assert not thread.is_alive()

    asyncio.run(run())


def test_the_loop_receives_what_comes_while_it_looks_and_the_thread_all_else() -> None:
    async def work(served: Served) -> None:
        await served.ask(5)
        assert served.received_by_the_loop() == 0
        served.is_looking = True
        await served.ask(20)
        assert served.received_by_the_loop() == 19          # the thread was waiting for the first
        served.is_looking = False
        await served.ask(20)
        assert served.received_by_the_loop() == 19

    serving(work)


def test_the_loop_looks_when_it_has_answered() -> None:
    async def work(served: Served) -> None:
        await served.ask(20)
        assert served.received_by_the_loop() == 18          # the first told it to look, the second had its thread wait

    serving(work, answers_later=True)


def test_no_call_is_lost_between_the_two() -> None:
    async def work(served: Served) -> None:
        for _ in range(20):
            for served.is_looking in (True, False):
                await served.ask(2)
                await served.ask_at_once(40)

    serving(work)


def test_it_stops_while_it_looks() -> None:
    async def work(served: Served) -> None:
        served.is_looking = True
        await served.ask(3)

    serving(work)


class Counts:
    """The front of pygrpc-native, as far as an Outbox asks it; every call was started long ago."""
    bound_port = 0

    def __init__(self, calls: int) -> None:
        self.started, self.ended = calls, 0

    def respond(self, number: int, response: bytes) -> bool:
        """The call ends at this moment: its client cancels it, and what was taken is not counted as sent."""
        self.ended += 1
        return True

    def metrics(self) -> Any:
        return {"methods": {PATH: {"started": self.started,
                                   "status": {1: {"count": self.ended, "sent": {"sum": 0}}}}}}


def test_answers_whose_clients_cancel_at_that_moment_are_not_unread_for_ever() -> None:
    """Also if there is always another call open."""
    async def run() -> int:
        inflight = Inflight(1 << 30, TIMEOUT_SECS)
        outbox = Outbox(Counts(calls=101), PATH, inflight, lambda peer: None)       # type: ignore[arg-type]
        for number in range(100):
            outbox.respond(number, bytes(1000), "")
            outbox.look()
        return inflight.held_bytes

    assert asyncio.run(run()) <= 1000


class Unread(Counts):
    """Its clients read when the test says so."""

    def __init__(self) -> None:
        super().__init__(calls=1)
        self.read_bytes = 0

    def respond(self, number: int, response: bytes) -> bool:
        return True

    def metrics(self) -> Any:
        sent = {"count": int(self.read_bytes > 0), "sent": {"sum": self.read_bytes}}
        return {"methods": {PATH: {"started": self.started, "status": {0: sent}}}}


def test_an_answer_to_a_call_of_long_ago_is_unread_until_it_is_read() -> None:
    """The looks at what is unread that began with the call are over."""
    async def run() -> None:
        native, inflight = Unread(), Inflight(1 << 30, 10 * TIMEOUT_SECS)
        outbox = Outbox(native, PATH, inflight, lambda peer: None)      # type: ignore[arg-type]
        outbox.respond(0, bytes(1000), "")
        outbox.look()
        assert inflight.held_bytes == 1000
        native.read_bytes = 1000
        async with asyncio.timeout(TIMEOUT_SECS):
            while inflight.held_bytes:
                await asyncio.sleep(0.01)

    asyncio.run(run())


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing. The limit is as many as it has, and not 0, for poll() takes no more than it says:
    other threads would fail that wait on what they have open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_large_answers_are_given_also_where_there_are_no_descriptors_to_look_at_connections(tmp_path: Path) -> None:
    write_model(tmp_path, "large", kind="echo", shape=[1 << 19], max_batch=1)
    large = request_of("large", shape=(1, 1 << 19), raw=bytes(4 << 19)).SerializeToString()
    with running(tmp_path, grpc_front="fast") as server, grpc.insecure_channel(server.address) as channel:
        ask: Any = channel.unary_unary(PATH)
        ask(large, timeout=TIMEOUT_SECS)
        with no_descriptors():
            assert len(ask(large, timeout=TIMEOUT_SECS)) > 4 << 19
