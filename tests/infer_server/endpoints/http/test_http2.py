"""HTTP/2 on the HTTP port: how a connection begins and ends, limits, and clients that leave or do not read.

What requests say and how they are answered is tested over both versions by the tests that use the fixture `version`.
"""
from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import uvloop

from infer_server.endpoints.http import http2 as http2_requests
from infer_server.endpoints.http2 import connection
from infer_server.endpoints.tls import ServerTls
from infer_server.protos import http2
from infer_server.protos.http2 import DataReceived, Header, ResponseReceived, StreamClosed
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.http.plain import body_of
from tests.infer_server.endpoints.test_security import certificates  # noqa: F401
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.http2_client import Http2Client
from tests.infer_server.serving import WORKERS, RunLoop, RunningServer, serving

pytestmark = pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
MIB = 1 << 20
INFER, LIVE = "/v2/models/affine/infer", "/v2/health/live"


@pytest.fixture(scope="module", params=("nghttp2", WORKERS[0]))
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "affine")
    write_model(repository, "large", shape=[1 << 18])
    write_model(repository, "gated", gate="http2")
    with serving(repository, max_body_bytes=6 * MIB, max_inflight_bytes=8 * MIB, max_json_bytes=MIB,
                 body_grace_secs=0.3, grpc_front=request.param) as running:
        yield running


@pytest.fixture
def client(limited: RunningServer) -> Iterator[Http2Client]:
    with Http2Client(limited.ports.http) as connected:
        yield connected


def fields(path: str, method: bytes = b"POST", *more: Header) -> list[Header]:
    return [(b":method", method), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"localhost"),
            *more]


def status_of(client: Http2Client, stream: int) -> bytes:
    return client.answer(stream)[0][b":status"]


def is_served(client: Http2Client) -> bool:
    return status_of(client, client.request(fields(INFER), body_of())) == b"200"


def has_let_go(server: RunningServer) -> bool:
    return eventually(lambda: server.server._inflight.held_bytes == 0)


# ---- how a connection begins
@pytest.mark.parametrize("size", [1, 5, 24, 1 << 20])
def test_a_connection_begins_with_the_preface_in_whatever_pieces(limited: RunningServer, size: int) -> None:
    client = http2.client_connection(1 << 20)
    client.send_request(fields(LIVE, b"GET"), end_stream=True)
    sent = client.data_to_send()
    with socket.create_connection(("127.0.0.1", limited.ports.http), TIMEOUT_SECS) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), size):
            plain.sendall(sent[at:at + size])
        actual: list[http2.Event] = []
        while not any(isinstance(event, ResponseReceived) for event in actual):
            client.receive_data(plain.recv(1 << 16))
            actual += client.events()
    assert any(isinstance(event, ResponseReceived) and dict(event.headers)[b":status"] == b"200" for event in actual)


@pytest.mark.parametrize("method", ["POST", "PRI", "PUT", "P"])
def test_what_begins_as_the_preface_does_is_not_taken_for_it(limited: RunningServer, method: str) -> None:
    with socket.create_connection(("127.0.0.1", limited.ports.http), TIMEOUT_SECS) as plain:
        plain.sendall(method[:1].encode())
        plain.sendall(f"{method[1:]} {LIVE} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        assert plain.recv(1 << 16).startswith((b"HTTP/1.1 405 ", b"HTTP/1.1 400 "))


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize(("offered", "spoken"), [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), ([], None)])
def test_clients_choose_the_version_by_alpn(
        tmp_path: Path, certificates: Path, run: RunLoop, offered: list[str], spoken: str | None  # noqa: F811
        ) -> None:
    write_model(tmp_path, "affine")
    context = ssl.create_default_context(cafile=certificates / "server.pem")
    if offered:
        context.set_alpn_protocols(offered)
    tls = ServerTls(certificates / "server.pem", certificates / "server.key")
    with (serving(tmp_path, http_tls=tls, run=run) as running,
          socket.create_connection(("127.0.0.1", running.ports.http), TIMEOUT_SECS) as plain,
          context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted):
        assert encrypted.selected_alpn_protocol() == spoken
        if spoken == "h2":
            client = Http2Client(0, connected=encrypted)
            assert is_served(client) and is_served(client)
        else:
            encrypted.sendall(f"GET {LIVE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert encrypted.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


# ---- requests
def test_many_requests_of_a_connection_are_answered_in_any_order(client: Http2Client) -> None:
    with GATES["http2"].closed():
        waits = client.request(fields("/v2/models/gated/infer"), body_of())
        streams = [client.request(fields(INFER), body_of(data=[i, 0, 0, 0])) for i in range(50)]
        for i, stream in enumerate(streams):
            assert f'"data":[{2.0 * i + 1}'.encode() in client.answer(stream)[1]
        assert not any(isinstance(event, StreamClosed) and event.stream_id == waits for event in client.events)
    assert status_of(client, waits) == b"200"


def test_the_authority_of_a_request_goes_before_its_host(client: Http2Client) -> None:
    foreign = [(name, b"evil.example" if name == b":authority" else value) for name, value in fields("/v2/logging")]
    assert status_of(client, client.request([*foreign, (b"host", b"localhost")], b"{}")) == b"403"
    assert status_of(client, client.request(fields("/v2/logging"), b"{}")) == b"200"


def test_an_answer_to_head_has_no_body(client: Http2Client) -> None:
    got, head = (client.answer(client.request(fields("/v2", method))) for method in (b"GET", b"HEAD"))
    assert head[0] == got[0] and int(head[0][b"content-length"]) == len(got[1]) and not head[1]


def test_a_large_body_arrives_whole_and_its_answer_too(client: Http2Client, limited: RunningServer) -> None:
    values = np.arange(1 << 18, dtype=np.float32)
    head = (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,262144],"parameters":{"binary_data_size":1048576}}],'
            b'"outputs":[{"name":"y","parameters":{"binary_data":true}}]}')
    answer, body = client.answer(client.request(fields("/v2/models/large/infer", b"POST", (
        b"inference-header-content-length", b"%d" % len(head))), head + values.tobytes()))
    assert answer[b":status"] == b"200"
    np.testing.assert_array_equal(np.frombuffer(body[int(answer[b"inference-header-content-length"]):], np.float32),
                                  values * 2 + 1)
    assert has_let_go(limited)


def test_a_body_that_waits_to_be_asked_for_is_asked_for(client: Http2Client) -> None:
    stream = client.request(fields(INFER, b"POST", (b"expect", b"100-continue")), ended=False)
    client.read()
    while not any(type(event).__name__ == "InformationalResponseReceived" for event in client.events):
        assert client.read()
    client.http2.send_data(stream, body_of(), end_stream=True)
    client.send()
    assert status_of(client, stream) == b"200"


# ---- limits
@pytest.mark.parametrize(("announced", "sent"), [(6 * MIB + 1, b"{"), (0, b" " * (MIB + 1))])
def test_a_body_that_is_too_large_is_refused_before_it_is_complete(
        client: Http2Client, limited: RunningServer, announced: int, sent: bytes) -> None:
    length: tuple[Header, ...] = ((b"content-length", b"%d" % announced),) if announced else ()
    assert status_of(client, client.request(fields(INFER, b"POST", *length), sent, ended=False)) == b"413"
    assert is_served(client) and has_let_go(limited)


def test_a_body_that_comes_too_slowly_ends_and_others_go_on(client: Http2Client, limited: RunningServer) -> None:
    for stream in [client.request(fields(INFER), sent, ended=False) for sent in (b"", b"{")]:
        answer, body = client.answer(stream)
        assert answer[b":status"] == b"408" and b"--min-body-rate" in body
    assert is_served(client) and has_let_go(limited)


def test_partial_bodies_leave_room_for_whole_requests(limited: RunningServer) -> None:
    with Http2Client(limited.ports.http) as greedy, Http2Client(limited.ports.http) as other:
        large = (b"inference-header-content-length", b"9")
        streams = [greedy.request(fields(INFER, b"POST", large), bytes(4 * MIB), ended=False) for _ in range(4)]
        refused = 0
        while not refused:
            assert greedy.read()
            refused = sum(isinstance(event, ResponseReceived) and event.stream_id in streams
                          and dict(event.headers)[b":status"] == b"503" for event in greedy.events)
        assert is_served(other)
        if limited.server._options.workers == 1:            # workers count for themselves
            assert limited.server._inflight.partial_bytes <= 6 * MIB
    assert has_let_go(limited)


def test_partial_bodies_at_their_limit_leave_room_for_whole_requests(limited: RunningServer) -> None:
    with Http2Client(limited.ports.http) as greedy:
        large = (b"inference-header-content-length", b"9")
        for _ in range(2):
            greedy.request(fields(INFER, b"POST", large), bytes(3 * MIB), ended=False)
        inflight = limited.server._inflight                 # frontend workers count for themselves
        while inflight.partial_bytes < 6 * MIB and not any(isinstance(e, ResponseReceived) for e in greedy.events):
            assert greedy.read()                            # their windows, or at the end that they come too slowly
        with Http2Client(limited.ports.http) as other:
            assert is_served(other)
    assert has_let_go(limited)


def test_streams_are_bounded_in_number(client: Http2Client) -> None:
    client.until(http2.SettingsReceived)
    assert max(client.http2.remote_settings.values()) and http2_requests._MAX_STREAMS in (
        client.http2.remote_settings.values())


# ---- clients that leave, or do not read
@pytest.mark.parametrize("leave", [
    lambda client, stream: (client.http2.reset_stream(stream), client.send()), lambda client, _: client.socket.close()],
    ids=["reset", "close"])
def test_an_inference_whose_client_left_is_not_executed(
        limited: RunningServer, leave: Callable[[Http2Client, int], object]) -> None:
    model = limited.server.repository.find("gated")
    with (Http2Client(limited.ports.http) as first, Http2Client(limited.ports.http) as second):
        with GATES["http2"].closed():
            executing = first.request(fields("/v2/models/gated/infer"), body_of())
            assert GATES["http2"].holds(1)
            waiting = second.request(fields("/v2/models/gated/infer"), body_of())
            assert eventually(lambda: model.pending == 1)
            leave(second, waiting)
            assert eventually(lambda: model.pending == 0)
        assert status_of(first, executing) == b"200"
    assert has_let_go(limited)


def test_a_client_that_does_not_read_its_answers_is_disconnected(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "affine")
    with (serving(tmp_path, send_timeout_secs=0.3) as server,
          Http2Client(server.ports.http, window_bytes=0) as client):
        for _ in range(10):
            client.request(fields(INFER), body_of())
        assert client.waits_for_close()
        assert "has not read its answer" in caplog.text and has_let_go(server)


# ---- how a connection ends
def test_a_connection_on_which_nothing_is_asked_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_requests, "IDLE_SECS", 0.2)
    write_model(tmp_path, "affine")
    with serving(tmp_path) as server, Http2Client(server.ports.http) as client:
        assert client.went_away() == (0, b"") and client.waits_for_close()


def test_a_server_that_stops_sends_clients_away_before_it_refuses(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_GOAWAY_SECS", TIMEOUT_SECS)
    monkeypatch.setattr(connection, "_LEAVING_SECS", TIMEOUT_SECS)
    write_model(tmp_path, "affine")
    with (serving(tmp_path) as server, Http2Client(server.ports.http) as client, ThreadPoolExecutor(1) as stopping):
        assert is_served(client)
        client.events.clear()
        stopped = stopping.submit(server.stop)
        assert eventually(lambda: not server.server.lifecycle.ready)
        late = client.request(fields(INFER), body_of())     # the client has not read the notice yet
        assert client.went_away() == (0, b"") and status_of(client, late) == b"200"
        assert client.waits_for_close() and stopped.result()


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_is_served(limited: RunningServer) -> None:
    version = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
    if "HTTP2" not in version:
        pytest.skip("curl is built without HTTP/2")
    for path, expected in ((LIVE, "2 200"), ("/nothing", "2 404")):
        output = subprocess.run(["curl", "-sS", "--http2-prior-knowledge", "-w", "%{http_version} %{http_code}", "-o",
                                 "-", f"http://127.0.0.1:{limited.ports.http}{path}"], capture_output=True, text=True)
        assert output.stdout.endswith(expected), output.stdout + output.stderr


def test_an_answer_in_parts_is_sent_as_they_come(tmp_path: Path) -> None:
    write_model(tmp_path, "affine")
    with serving(tmp_path) as server, Http2Client(server.ports.http) as client:
        stream = client.request(fields("/v2/models/affine/generate_stream"), b'{"x": [1, 2, 3, 4]}')
        answer, body = client.answer(stream)
        assert answer[b"content-type"].startswith(b"text/event-stream") and body.startswith(b"data: {")
        assert any(isinstance(event, DataReceived) for event in client.events) and has_let_go(server)
