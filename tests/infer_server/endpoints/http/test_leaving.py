"""Tests of clients that disconnect, stop sending or do not read: the server keeps nothing for them."""
from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from infer_server.endpoints.http.exchange import Exchange
from infer_server.endpoints.http.transports import Outlet
from infer_server.endpoints.inflight import Inflight
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.http.plain import CLOSE, ask, body_of, post, post_large
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import WORKERS, RunningServer, serving


def test_a_client_that_sends_no_more_has_its_answers(server: RunningServer) -> None:
    one, interim = post("/v2/models/affine/infer", body_of()), b"HTTP/1.1 102 Processing\r\n\r\n"
    for sent, statuses in ((one, 1), (one * 3, 3), (post("/v2/models/affine/infer", body_of(), CLOSE), 1),
                           (one + b"nonsense\r\n\r\n", 2), (b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n", 1), (one[:-1], 0)):
        with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))      # until the server closes, too
        assert answer.replace(interim, b"").count(b"HTTP/1.1 ") == statuses, sent
    with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
        with GATES["http"].closed():
            connection.sendall(post("/v2/models/gated/infer", body_of()))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(len(interim), socket.MSG_WAITALL) == interim, "whether it has gone is asked"
        assert b"HTTP/1.1 200" in b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_a_client_that_sends_no_more_within_a_body_has_the_answers_to_what_came_before(
        server: RunningServer, size: int) -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
        with GATES["http"].closed():
            behind = post("/v2/models/large/infer", bytes(size))[:-1]
            connection.sendall(post("/v2/models/gated/infer", body_of()) + behind)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(len(interim), socket.MSG_WAITALL) == interim
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b"")).replace(interim, b"")
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 ") == 1
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_an_inference_whose_client_left_is_not_executed(server: RunningServer) -> None:
    def waiting() -> int:
        return server.server.repository.find("gated").pending
    with GATES["http"].closed():
        with socket.create_connection(("127.0.0.1", server.ports.http)) as first, \
                socket.create_connection(("127.0.0.1", server.ports.http)) as second:
            first.sendall(post("/v2/models/gated/infer", body_of()))
            assert GATES["http"].holds(1)
            second.sendall(post("/v2/models/gated/infer", body_of()))
            assert eventually(lambda: waiting() == 1)
        assert eventually(lambda: waiting() == 0)
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_client_that_reads_none_of_many_small_answers_is_disconnected(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each response is below the size from which a client's reading is timed; together they reach the limit."""
    write_model(tmp_path, "large", shape=[1 << 16])
    requested = post_large(np.ones(1 << 16, np.float32))
    with serving(tmp_path, send_timeout_secs=0.2, max_inflight_bytes=32 << 20) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.ports.http))
        with suppress(ConnectionError):             # it may be before all of them are sent
            for _ in range(100):
                client.sendall(requested)
        assert eventually(lambda: "has not read its answer" in caplog.text)
        assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_client_that_reads_is_given_its_time_again_though_there_is_always_more_for_it() -> None:
    class Transport:
        unread = 0

        def set_write_buffer_limits(self, high: int) -> None:
            assert high == 0

        def write(self, data: bytes) -> None:
            self.unread += len(data)

        def get_write_buffer_size(self) -> int:
            return self.unread

    class Client:
        disconnected = False

        def peer(self) -> str:
            return "it"

        def disconnect(self) -> None:
            self.disconnected = True

    async def reads() -> None:
        transport, client, inflight = Transport(), Client(), Inflight(1 << 20, TIMEOUT_SECS)
        outlet = Outlet(transport, inflight, client)        # type: ignore[arg-type]
        due = 0
        for size, read, is_gone in ((100, 0, False), (50, 100, False), (10, 49, True)):
            outlet.write(bytes(size))
            outlet.sent(inflight.begin(client, size), size)
            transport.unread -= read
            outlet._check_unread(due)                       # its time is over for what there was the time before
            assert client.disconnected == is_gone
            due += size
        outlet.taken()
        assert inflight.held_bytes == 0

    asyncio.run(reads())


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
def test_what_was_answered_does_not_wait_for_the_garbage_collector(server: RunningServer, path: str) -> None:
    gc.collect()
    gc.disable()
    try:
        for body in (body_of(), b'{"x": [1, 2, 3, 4]}'):        # one is an error of each of the forms
            assert ask(server, post(f"/v2/models/affine/{path}", body, CLOSE))
        assert eventually(lambda: not any(type(one) is Exchange for one in gc.get_objects()))
    finally:
        gc.enable()


@pytest.mark.parametrize("front", ["grpcio", WORKERS[0]])
def test_who_leaves_while_a_model_is_loaded_for_it_leaves_no_body_behind(tmp_path: Path, front: str) -> None:
    write_model(tmp_path, "slow", gate="on demand", shape=[1 << 18])

    def bodies() -> list[int]:
        """Return the sizes of the bodies that Exchange objects hold; one still under construction has no request."""
        requests = [getattr(one, "request", None) for one in gc.get_objects() if type(one) is Exchange]
        return [len(request.body) for request in requests if request and request.body]

    gc.collect()                # those of tests before
    with serving(tmp_path, model_memory_bytes=1 << 30, grpc_front=front) as server, GATES["on demand"].closed():
        with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
            connection.sendall(post("/v2/models/slow/infer", bytes(1 << 20)))
            assert GATES["on demand"].holds(1) and eventually(lambda: bodies() == [1 << 20])
        assert eventually(lambda: server.server._inflight.held_bytes == 0 and not bodies(), TIMEOUT_SECS / 2)
