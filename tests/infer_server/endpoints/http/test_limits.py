"""Limits hold for bodies that are announced, sent slowly, chunked, compressed or JSON."""
from __future__ import annotations

import gzip
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from infer_server.endpoints.inflight import Inflight
from infer_server.errors import MemoryLimitError
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.http.plain import CLOSE, ask, body_of, post, post_large
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import WORKERS, RunningServer, serving

MIB = 1 << 20
INFER = "/v2/models/affine/infer"


@pytest.fixture(scope="module", params=("grpcio", WORKERS[0]))
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    write_model(repository, "large", shape=[1 << 18])
    write_model(repository, "middle", shape=[1 << 15])
    with serving(repository, max_body_bytes=6 * MIB, max_inflight_bytes=8 * MIB, max_json_bytes=MIB,
                 body_grace_secs=0.3, grpc_front=request.param) as running:
        yield running


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.ports.http), timeout=TIMEOUT_SECS)


def announcing(count: int) -> bytes:
    return (f"POST {INFER} HTTP/1.1\r\nContent-Length: {count}\r\nInference-Header-Content-Length: 9\r\n\r\n").encode()


def is_served(server: RunningServer) -> bool:
    return ask(server, post(INFER, body_of(), CLOSE)).startswith(b"HTTP/1.1 200 ")


def answer_of(client: socket.socket) -> bytes:
    """Return everything received until the server closes or resets the connection."""
    received = b""
    try:
        while data := client.recv(1 << 16):
            received += data
    except ConnectionError:
        pass
    return received


def test_bytes_that_are_announced_take_nothing_from_others(limited: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connect(limited)).sendall(announcing(5 * MIB) + b"{")
        assert is_served(limited) and limited.server.lifecycle.ready
        assert limited.server._inflight.held_bytes < MIB


def test_partial_bodies_leave_room_for_whole_requests(limited: RunningServer) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(limited)) for _ in range(6)]
        for client in clients:
            client.sendall(announcing(5 * MIB))
        refused = 0
        for client in clients:
            try:
                client.sendall(bytes(4 * MIB))
            except ConnectionError:
                refused += 1
        assert is_served(limited)
        if limited.server._options.workers == 1:            # workers count for themselves
            assert limited.server._inflight.partial_bytes <= 6 * MIB
    assert eventually(lambda: limited.server._inflight.held_bytes == 0)


def test_a_body_that_comes_too_slowly_ends(limited: RunningServer) -> None:
    chunked = f"POST {INFER} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1".encode()
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(limited)) for _ in range(5)]      # which are slow at the same time
        for client, sent in zip(clients, (
                announcing(5 * MIB) + b"{", announcing(100), announcing(5 * MIB) + bytes(2 * MIB),
                chunked + b"\r\n{\r\n", chunked + b";" + b"a" * 2000), strict=True):
            client.sendall(sent)
        for client in clients:
            assert answer_of(client).startswith(b"HTTP/1.1 408 ")
    assert eventually(lambda: limited.server._inflight.held_bytes == 0)


def test_a_body_may_come_in_any_time_where_there_is_no_rate(tmp_path: Path) -> None:
    write_model(tmp_path, "affine")
    with serving(tmp_path, body_grace_secs=0.05, min_body_rate=0) as server, connect(server) as client:
        sent = post(INFER, body_of(), CLOSE)
        client.sendall(sent[:-9])
        threading.Event().wait(0.4)
        client.sendall(sent[-9:])
        assert answer_of(client).startswith(b"HTTP/1.1 200 ")


def test_more_than_may_ever_be_held_is_too_large(limited: RunningServer) -> None:
    for sent, status in ((announcing(6 * MIB + 1), 413), (post(INFER, b" " * (MIB + 1), CLOSE), 413)):
        with connect(limited) as client:
            client.sendall(sent[:500])
            assert answer_of(client).startswith(f"HTTP/1.1 {status} ".encode())


def test_headers_are_bounded_in_number(limited: RunningServer) -> None:
    lines = "".join(f"h{i}:\r\n" for i in range(300))
    assert ask(limited, f"GET /v2 HTTP/1.1\r\n{lines}\r\n".encode()).startswith(b"HTTP/1.1 431 ")


def test_blank_lines_and_unfinished_headers_are_counted_no_more_when_they_end(limited: RunningServer) -> None:
    with connect(limited) as client:
        client.sendall(b"\r\n" * 500)
        client.sendall(b"GET /v2 HTTP/1.1\r\na: b")
        client.sendall(f"\r\n{CLOSE}\r\n\r\n".encode())
        assert answer_of(client).startswith(b"HTTP/1.1 200 ")
    with connect(limited) as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\na: b" + b"c" * 9000)
    assert eventually(lambda: limited.server._inflight.held_bytes == 0)


def test_tiny_chunks_are_one_body(limited: RunningServer) -> None:
    body = body_of(data=[1, 2, 3, 4]) + b" " * 30_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = f"POST {INFER} HTTP/1.1\r\n{CLOSE}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert b'"data":[3.0,5.0,7.0,9.0]' in ask(limited, head + chunks)


def test_thousands_of_pipelined_requests_are_answered_in_order(limited: RunningServer) -> None:
    values = np.zeros(1 << 18, np.float32)
    sent = [post(INFER, body_of(data=[i, 0, 0, 0])) for i in range(400)]
    sent.insert(300, post_large(values))
    with connect(limited) as client:
        writer = threading.Thread(target=client.sendall, args=(b"".join((*sent, post(INFER, body_of(), CLOSE))),))
        writer.start()
        received = answer_of(client)
        writer.join()
    assert received.count(b"HTTP/1.1 200 ") == 402
    firsts = [float(text.split(b",")[0]) for text in received.split(b'"data":[')[1:]]
    assert firsts == [2.0 * i + 1 for i in range(400)] + [3.0]


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_that_becomes_too_large_is_refused_while_it_does(limited: RunningServer, coding: str) -> None:
    sent = gzip.compress(bytes(16 * MIB)) if coding == "gzip" else zlib.compress(bytes(16 * MIB))
    for also in ((), ("Inference-Header-Content-Length: 9",)):          # as JSON, and as tensors
        answer = ask(limited, post(INFER, sent, CLOSE, f"Content-Encoding: {coding}", *also))
        assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert eventually(lambda: limited.server._inflight.held_bytes == 0)


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize(("data", "status", "says"), [
    ("[" + "1," * 100_000 + "1]", 400, b"expected 4 values"), ("[" + "[]," * 100_000 + "1,2,3,4]", 200, b"[3.0,5.0"),
    ("[" + "{}," * 100_000 + "1]", 400, b"contains a JSON object"), ("[" * 200_000, 400, b"depth"),
    ("[1,2,3," + " " * 20_000 + "4]" + " " * 60_000, 200, b"9.0]"), ("1" * 100_000, 400, b"error"),
    ("[" + "1e999," * 20_000 + "1]", 400, b"expected 4"), ('["' + "a" * 100_000 + '"]', 400, b"a str in 'data'"),
], ids=range(8))
def test_large_json_is_read_or_refused(limited: RunningServer, data: str, status: int, says: bytes) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":' + data.encode() + b"}]}"
    answer = ask(limited, post(INFER, body, CLOSE))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and says in answer, answer[:500]
    assert eventually(lambda: limited.server._inflight.held_bytes == 0)


@pytest.mark.usefixtures("version")
def test_a_large_tensor_as_json_goes_both_ways(limited: RunningServer) -> None:
    values = np.arange(1 << 15, dtype=np.float32) / 8
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, values.size], "data": values.tolist()}]}
    answer = ask(limited, post("/v2/models/middle/infer", json.dumps(body).encode(), CLOSE))
    (output,) = json.loads(answer.partition(b"\r\n\r\n")[2])["outputs"]
    np.testing.assert_array_equal(np.array(output["data"], np.float32), values * 2 + 1)
    assert output["shape"] == [1, values.size]
    answer = ask(limited, post("/v2/models/middle/generate", json.dumps({"x": values.tolist()}).encode(), CLOSE))
    output = json.loads(answer.partition(b"\r\n\r\n")[2])
    np.testing.assert_array_equal(np.array(output["y"], np.float32), values * 2 + 1)


def test_inputs_and_outputs_are_as_many_as_the_model_has(limited: RunningServer) -> None:
    for key, count in (("inputs", 200), ("outputs", 200), ("inputs", 2000), ("outputs", 2000)):
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}], "outputs": []}
        body[key] = [{"name": f"n{i}", "datatype": "FP32", "shape": [1, 4], "data": []} for i in range(count)]
        answer = ask(limited, post(INFER, json.dumps(body).encode()[:MIB], CLOSE))
        assert (f"the request has {count} {key}, and model 'affine' 1".encode() in answer or
                answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))), answer[:500]


def test_the_server_is_not_ready_while_its_memory_is_spent(tmp_path: Path) -> None:
    write_model(tmp_path, "affine")
    with serving(tmp_path, max_inflight_bytes=8 * MIB) as server:
        inflight = server.server._inflight

        async def begin(count: int) -> object:
            return inflight.begin(None, count)              # type: ignore[arg-type]

        async def end(call: object) -> None:
            inflight.end(call)                              # type: ignore[arg-type]

        def status() -> bytes:
            return ask(server, f"GET /v2/health/ready HTTP/1.1\r\n{CLOSE}\r\n\r\n".encode())[:12]

        held = server.run(begin(8 * MIB - 100))
        assert inflight.is_near_limit and status() == b"HTTP/1.1 503"
        assert ask(server, f"GET /v2/health/live HTTP/1.1\r\n{CLOSE}\r\n\r\n".encode()).startswith(b"HTTP/1.1 200")
        server.run(end(held))
        assert not inflight.is_near_limit and status() == b"HTTP/1.1 200"


def test_what_has_not_arrived_completely_may_hold_a_part_of_the_limit(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        async def count() -> tuple[int, int]:
            inflight = Inflight(1000, 1.0)
            call = inflight.begin(None, 0)                  # type: ignore[arg-type]
            inflight.receive(call, 750)
            with pytest.raises(MemoryLimitError, match="not arrived completely"):
                inflight.receive(call, 1)
            whole = inflight.begin(None, 250)               # type: ignore[arg-type]
            inflight.complete(call)
            inflight.end(whole)
            inflight.receive(inflight.begin(None, 0), 250)  # type: ignore[arg-type]
            inflight.end(call)
            return inflight.held_bytes, inflight.partial_bytes
        assert server.run(count()) == (250, 250)
