"""Tests of several requests on one connection: paths, methods, their order, and invalid HTTP."""
from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer_server.listeners import Listeners
from scripts.testing.numpy_engine import TIMEOUT_SECS
from tests.infer_server.endpoints.http.plain import CLOSE, ask, body_of, post
from tests.infer_server.endpoints.test_serving import statistics
from tests.infer_server.serving import RunningServer, serving


@pytest.mark.usefixtures("version")
def test_probes_say_in_their_body_what_clients_of_kserve_read_there(server: RunningServer) -> None:
    def said(path: str) -> tuple[bytes, Any]:
        answer = ask(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())
        return answer[9:12], json.loads(answer.partition(b"\r\n\r\n")[2])
    assert said("/v2/health/live") == (b"200", {"live": True})
    assert said("/v2/models/affine/ready") == (b"200", {"name": "affine", "ready": True})
    status, body = said("/v2/health/ready")
    assert body == {"ready": status == b"200"}


def test_methods_and_paths_that_are_none_are_told_apart(server: RunningServer, version: str) -> None:
    def status(line: str) -> bytes:
        return ask(server, f"{line} HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode())
    assert status("GET /nothing").startswith(b"HTTP/1.1 404")
    wrong = status("DELETE /v2/models/affine")
    assert wrong.startswith(b"HTTP/1.1 405") and b"Allow: GET" in wrong
    assert status("GET /v2/models/affine/infer").startswith(b"HTTP/1.1 405")
    assert status("GET /v2/systemsharedmemory/status").startswith(b"HTTP/1.1 200")
    head = status("HEAD /v2")
    assert head.startswith(b"HTTP/1.1 200") and head.endswith(b"\r\n\r\n")
    assert status("GET /v2/models/%61ffine/ready").startswith(b"HTTP/1.1 200")
    if version == "HTTP/1.1":
        assert status("GET http://here:80/v2/models/affine/ready").startswith(b"HTTP/1.1 200")
    for version in ("9" * 5000, "%D9%A1"):              # the latter a digit, too
        assert status(f"GET /v2/models/affine/versions/{version}/ready").startswith(b"HTTP/1.1 400")


def test_requests_sent_together_are_answered_in_their_order(server: RunningServer) -> None:
    bodies = [body_of(data=[i, 0, 0, 0]) for i in range(20)]
    together = b"".join(post("/v2/models/affine/infer", body) for body in bodies)
    answers = ask(server, together + post("/v2/models/affine/infer", body_of(data=[20, 0, 0, 0]), CLOSE))
    actual = [json.loads(part.partition(b"\r\n\r\n")[2])["outputs"][0]["data"][0]
              for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert actual == [2.0 * i + 1 for i in range(21)]


def test_what_comes_behind_a_request_is_answered_behind_it_whatever_it_is(server: RunningServer) -> None:
    first, body = post("/v2/models/affine/infer", body_of()), body_of()
    refused = ask(server, first + first + b"no request\r\n\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", refused) == [b"200", b"200", b"400"]
    upgrade = b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert re.findall(rb"HTTP/1.1 (\d+)", ask(server, first + upgrade * 2 + b"no request\r\n\r\n")) == [
        b"200", b"200", b"200", b"400"]
    expects = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\nExpect: 100-continue\r\n".encode()
    answers = ask(server, first + expects + f"Content-Length: {len(body)}\r\n\r\n".encode(), body)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) in ([b"200", b"100", b"200"], [b"200", b"200"])


@pytest.mark.parametrize("model", ["affine", "large"])
def test_what_comes_behind_the_last_request_of_a_connection_does_not_reset_its_answer(
        server: RunningServer, model: str) -> None:
    values = np.ones((1, 4 if model == "affine" else 1 << 18), np.float32)
    head = json.dumps({"inputs": [{"name": "x", "shape": values.shape, "datatype": "FP32",
                                   "parameters": {"binary_data_size": values.nbytes}}],
                       "parameters": {"binary_data_output": True}}).encode()
    last = post(f"/v2/models/{model}/infer", head + values.tobytes(), CLOSE,
                f"Inference-Header-Content-Length: {len(head)}")
    for behind in (bytes(1 << 20), last, post("/v2/models/large/infer", bytes(1 << 20))[:1 << 19]):
        before = statistics(server, model).success.count
        with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as connection:
            connection.sendall(last + behind)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))      # ConnectionResetError: it was
        assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 ") == 1
        assert answer.endswith((values * 2 + 1).tobytes())
        assert statistics(server, model).success.count == before + 1


def test_nothing_is_said_behind_an_answer_at_once_that_was_the_last(
        server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    last = f"GET /nothing HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n\r\n".encode()
    for behind in (b"no request\r\n\r\n", last):
        answer = ask(server, last + behind)
        assert answer.startswith(b"HTTP/1.1 404") and answer.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.name == "asyncio"], "it tells of what it catches"


def test_what_is_no_http_and_headers_without_end_are_refused(server: RunningServer) -> None:
    assert ask(server, b"\x16\x03\x01\x02\x00 hello\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert ask(server, b"GET /v2 HTTP/1.1\r\n", b"X: " + b"y" * (1 << 20)).startswith(b"HTTP/1.1 431")
    many = b"".join(f"X{i}: yyyyyyyy\r\n".encode() for i in range(10_000))
    assert ask(server, b"GET /v2 HTTP/1.1\r\n" + many + b"\r\n").startswith(b"HTTP/1.1 431")


def test_a_client_of_http_1_0_is_told_that_its_connection_stays(server: RunningServer) -> None:
    """A client that requests keep-alive and gets no such header waits for the end of the connection."""
    def said(sent: bytes) -> list[bytes]:
        return re.findall(rb"Connection: ([a-z-]+)", ask(server, sent))
    old = post("/v2/models/affine/infer", body_of(), "Connection: Keep-Alive").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert said(old + old + old.replace(b"Keep-Alive", b"close")) == [b"keep-alive", b"keep-alive", b"close"]
    new = post("/v2/models/affine/infer", body_of())
    assert said(new + new.replace(b"Host: x", CLOSE.encode())) == [b"close"]


def test_who_connects_while_the_loop_is_busy_ending_is_refused_and_not_cut_off(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[socket.socket] = []
    refuse = Listeners._refuse

    async def meanwhile(stopping: Listeners) -> None:
        late.append(socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS))
        late[0].sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: here\r\n\r\n")
        await refuse(stopping)
    monkeypatch.setattr(Listeners, "_refuse", meanwhile)
    with serving(tmp_path, closed=frozenset({"grpc"})) as server:
        server.stop()
    with late[0]:
        assert late[0].recv(12) == b"HTTP/1.1 503"
