"""Tests of gRPC by libnghttp2: valid frames, and the errors for invalid ones."""
from __future__ import annotations

import gzip
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from infer_server.endpoints.http2 import connection, limits
from infer_server.endpoints.http2.settings import settings_of
from infer_server.grpc_ports import NGHTTP2
from infer_server.protos import http2, inference
from infer_server.protos.grpc_framing import prefix_of
from infer_server.protos.http2 import ResponseReceived
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.http2_client import INFER, LIVE, Http2Client, headers
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, serving

pytestmark = pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
OK, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = b"0", b"4", b"8", b"12", b"13"
MAX_BYTES = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "m")
    write_model(folder, "large", shape=[1 << 16], max_batch=1)
    write_model(folder, "gated", gate="nghttp2")
    with serving(folder, grpc_front=NGHTTP2, max_message_bytes=MAX_BYTES) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Http2Client]:
    with Http2Client(server.ports.grpc) as connected:
        yield connected


def infer_request(model: str = "m", values: int = 4) -> bytes:
    request = inference.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, values])
    request.raw_input_contents.append(struct.pack(f"<{values}f", *range(values)))
    data: bytes = request.SerializeToString()
    return data


def is_served(server: RunningServer) -> bool:
    with Http2Client(server.ports.grpc) as other:
        return other.answer(other.call(INFER, infer_request()))[0][b"grpc-status"] == OK


def test_a_call_is_answered_with_headers_a_message_and_trailers(client: Http2Client) -> None:
    fields, data = client.answer(client.call(INFER, infer_request()))
    assert fields[b":status"] == b"200" and fields[b"content-type"] == b"application/grpc"
    assert fields[b"grpc-status"] == OK and data[:1] == b"\0" and int.from_bytes(data[1:5]) == len(data) - 5
    response = inference.ModelInferResponse.FromString(data[5:])
    assert struct.unpack("<4f", response.raw_output_contents[0]) == (1, 3, 5, 7)


@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_a_message_may_come_in_pieces_of_any_size(client: Http2Client, pieces: int) -> None:
    for path, message in ((INFER, infer_request()), (LIVE, b"")):
        assert client.answer(client.call(path, message, pieces=pieces))[0][b"grpc-status"] == OK


def test_a_large_message_comes_in_many_frames(client: Http2Client) -> None:
    fields, data = client.answer(client.call(INFER, infer_request("large", 1 << 16)))
    assert fields[b"grpc-status"] == OK and len(data) > 4 << 16


@pytest.mark.parametrize(("sent", "status"), [
    ({"method": b"GET"}, b"405"), ({"content_type": b"application/json"}, b"415"),
    ({"content_type": b"application/grpcish"}, b"415")])
def test_what_is_no_grpc_gets_a_status_of_http(client: Http2Client, sent: dict[str, bytes], status: bytes) -> None:
    stream = client.http2.send_request(headers(LIVE, **sent), end_stream=True)        # type: ignore[arg-type]
    client.send()
    assert client.answer(stream)[0][b":status"] == status


@pytest.mark.parametrize("content_type", [b"application/grpc", b"application/grpc+proto", b"application/grpc;v=1"])
def test_content_types_of_grpc_are_served(client: Http2Client, content_type: bytes) -> None:
    stream = client.http2.send_request(headers(LIVE, content_type=content_type))
    client.http2.send_data(stream, prefix_of(0), end_stream=True)
    client.send()
    assert client.answer(stream)[0][b"grpc-status"] == OK


def test_an_unknown_method_is_unimplemented(client: Http2Client) -> None:
    fields, _ = client.answer(client.call("/inference.GRPCInferenceService/Nothing"))
    assert fields[b"grpc-status"] == UNIMPLEMENTED and fields[b"grpc-message"] == b"Method not found!"


@pytest.mark.parametrize("path", [INFER, LIVE])
def test_a_message_over_the_limit_is_refused_before_it_comes(client: Http2Client, path: str) -> None:
    stream = client.http2.send_request(headers(path))
    client.http2.send_data(stream, prefix_of(MAX_BYTES + 1))
    client.send()
    fields, _ = client.answer(stream)
    assert fields[b"grpc-status"] == RESOURCE_EXHAUSTED
    assert b"larger than max (%d vs. %d)" % (MAX_BYTES + 1, MAX_BYTES) in fields[b"grpc-message"]
    assert client.answer(client.call(LIVE))[0][b"grpc-status"] == OK


@pytest.mark.parametrize("path", [INFER, LIVE])
@pytest.mark.parametrize("data", [b"", b"\0\0\0", prefix_of(9) + b"part"])
def test_a_call_that_ends_within_its_message_is_refused(client: Http2Client, path: str, data: bytes) -> None:
    stream = client.http2.send_request(headers(path), end_stream=not data)
    if data:
        client.http2.send_data(stream, data, end_stream=True)
    client.send()
    assert client.answer(stream)[0][b"grpc-status"] in (INTERNAL, b"3")


def test_a_message_that_is_compressed_is_taken_if_its_coding_is_known(client: Http2Client) -> None:
    message = infer_request()
    for coding, packed, status in ((b"gzip", gzip.compress(message), OK), (b"deflate", zlib.compress(message), OK),
                                   (b"snappy", message, UNIMPLEMENTED), (b"identity", message, INTERNAL),
                                   (None, message, INTERNAL)):
        stream = client.http2.send_request(headers(INFER, *([(b"grpc-encoding", coding)] if coding else [])))
        client.http2.send_data(stream, prefix_of(len(packed), True) + packed, end_stream=True)
        client.send()
        assert client.answer(stream)[0][b"grpc-status"] == status, coding


def test_answers_are_compressed_if_that_is_asked_for_and_the_client_takes_it(tmp_path: Path) -> None:
    write_model(tmp_path, "large", shape=[1 << 12], max_batch=1)
    with (serving(tmp_path, grpc_front=NGHTTP2, grpc_channel={"grpc.default_compression_algorithm": 2}) as running,
          Http2Client(running.ports.grpc) as client):
        message = infer_request("large", 1 << 12)
        for accepts, flag in ((b"identity, gzip", 1), (b"identity", 0)):
            fields, data = client.answer(client.call(INFER, message, (b"grpc-accept-encoding", accepts)))
            assert fields[b"grpc-status"] == OK and data[0] == flag
            assert (fields.get(b"grpc-encoding") == b"gzip") == bool(flag)
            body = gzip.decompress(data[5:]) if flag else data[5:]
            assert len(inference.ModelInferResponse.FromString(body).raw_output_contents[0]) == 4 << 12


@pytest.mark.parametrize("timeout", [b"50m", b"50000u", b"50000000n"])
def test_a_deadline_that_passes_ends_the_call(client: Http2Client, timeout: bytes) -> None:
    with GATES["nghttp2"].closed():
        fields, _ = client.answer(client.call(INFER, infer_request("gated"), (b"grpc-timeout", timeout)))
        assert fields[b"grpc-status"] == DEADLINE_EXCEEDED


@pytest.mark.parametrize("timeout", [b"0m", b"1n", b"100u", b"499u"])
@pytest.mark.parametrize("path", [INFER, LIVE])
def test_a_deadline_below_a_millisecond_leaves_the_connection_usable(
        client: Http2Client, path: bytes, timeout: bytes) -> None:
    request = infer_request() if path == INFER else b""
    fields, _ = client.answer(client.call(path, request, (b"grpc-timeout", timeout)))
    assert fields[b"grpc-status"] in (OK, DEADLINE_EXCEEDED)
    assert client.answer(client.call(INFER, infer_request()))[0][b"grpc-status"] == OK


def test_a_deadline_counts_while_the_message_arrives(client: Http2Client) -> None:
    for path in (INFER, LIVE):
        stream = client.http2.send_request(headers(path, (b"grpc-timeout", b"50m")))
        client.http2.send_data(stream, b"\0\0")
        client.send()
        assert client.answer(stream)[0][b"grpc-status"] == DEADLINE_EXCEEDED


def test_a_malformed_timeout_is_refused(client: Http2Client) -> None:
    assert client.answer(client.call(INFER, infer_request(), (b"grpc-timeout", b"1 s")))[0][b"grpc-status"] == INTERNAL


def test_a_call_that_its_client_resets_is_cancelled(server: RunningServer, client: Http2Client) -> None:
    with GATES["nghttp2"].closed():
        first = client.call(INFER, infer_request("gated"))
        assert GATES["nghttp2"].holds(1)
        queued = client.call(INFER, infer_request("gated"))
        model = server.server.repository.find("gated")
        assert eventually(lambda: model.pending == 1)
        client.http2.reset_stream(queued)
        client.send()
        assert eventually(lambda: model.pending == 0)
    assert client.answer(first)[0][b"grpc-status"] == OK


def test_a_stream_is_answered_before_its_client_has_sent_everything(client: Http2Client) -> None:
    stream = client.http2.send_request(headers("/inference.GRPCInferenceService/ModelStreamInfer"))
    message = infer_request()
    client.http2.send_data(stream, prefix_of(len(message)) + message)
    client.send()
    assert client.until(http2.DataReceived) is not None
    client.http2.end_stream(stream)
    client.send()
    assert client.answer(stream)[0][b"grpc-status"] == OK


def test_pings_too_often_end_the_connection(client: Http2Client) -> None:
    for _ in range(4):
        client.http2.ping(bytes(8))
    client.send()
    assert client.went_away() == (http2.ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")
    assert client.waits_for_close()


def test_pings_between_answers_are_allowed(client: Http2Client) -> None:
    for _ in range(6):
        client.http2.ping(bytes(8))
        assert client.answer(client.call(LIVE))[0][b"grpc-status"] == OK


def test_a_connection_of_some_age_is_drained(tmp_path: Path) -> None:
    write_model(tmp_path, "gated", gate="age")
    with (serving(tmp_path, grpc_front=NGHTTP2, grpc_channel={"grpc.max_connection_age_ms": 200}) as running,
          Http2Client(running.ports.grpc) as client):
        with GATES["age"].closed():
            stream = client.call(INFER, infer_request("gated"))
            assert client.went_away() == (0, b"")
        assert client.answer(stream)[0][b"grpc-status"] == OK           # which was open
        assert client.waits_for_close()


def test_a_server_that_stops_serves_calls_until_the_client_knows_of_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "m")
    monkeypatch.setattr(connection, "_GOAWAY_SECS", TIMEOUT_SECS)       # else a client that is slow is not waited for
    monkeypatch.setattr(connection, "_LEAVING_SECS", TIMEOUT_SECS)
    with (serving(tmp_path, grpc_front=NGHTTP2) as running, Http2Client(running.ports.grpc) as client,
          ThreadPoolExecutor(1) as stopping):
        assert client.answer(client.call(LIVE))[0][b"grpc-status"] == OK
        stopped = stopping.submit(running.stop)
        assert eventually(lambda: _refuses_connections(running.ports.grpc))
        late = client.call(INFER, infer_request("m"))       # the client has not read the notice yet
        assert client.went_away() == (0, b"")
        assert client.answer(late)[0][b"grpc-status"] == OK
        assert client.waits_for_close() and stopped.result()


def test_what_a_client_sends_behind_the_end_of_a_connection_does_not_reset_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LINGER_SECS", TIMEOUT_SECS)       # the client may be kept from running meanwhile
    write_model(tmp_path, "m")
    with serving(tmp_path, grpc_front=NGHTTP2, grpc_channel={"grpc.max_connection_age_ms": 10}) as running, Http2Client(
            running.ports.grpc) as client:
        assert client.went_away() and client.waits_for_close()
        for _ in range(3):
            client.socket.sendall(struct.pack(">IBI", 8 << 8 | 6, 0, 0) + bytes(8))        # PING
            time.sleep(0.05)                    # for a reset to come back
        assert client.socket.recv(1) == b""


def _refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:        # accepted by the system alone
        return False
    return False


@pytest.mark.parametrize("front", [*FRONTS, *WORKERS])
def test_a_server_that_stops_under_load_costs_clients_of_two_servers_no_call(tmp_path: Path, front: str) -> None:
    write_model(tmp_path, "m")
    message, codes, ended = infer_request("m"), Counter[str](), threading.Event()
    with (serving(tmp_path, grpc_front=front) as first, serving(tmp_path) as second,
          grpc.insecure_channel(f"ipv4:{first.address},{second.address}",
                                [("grpc.lb_policy_name", "round_robin")]) as channel):
        def ask() -> None:
            call = channel.unary_unary(INFER)
            while not ended.is_set():
                try:
                    call(message, timeout=TIMEOUT_SECS)
                    codes["OK"] += 1
                except grpc.RpcError as error:
                    codes[f"{error.code().name}: {error.details()}"] += 1

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            assert eventually(lambda: codes.total() > 100)
            assert first.stop()
            before = codes.total()
            assert eventually(lambda: codes.total() > before + 100)
        finally:
            ended.set()
            for client in clients:
                client.join(TIMEOUT_SECS)
    assert codes.keys() == {"OK"}


def test_a_client_that_does_not_answer_pings_is_disconnected(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    channel = {"grpc.keepalive_time_ms": 100, "grpc.keepalive_timeout_ms": 100,
               "grpc.keepalive_permit_without_calls": 1}
    with (serving(tmp_path, grpc_front=NGHTTP2, grpc_channel=channel) as running,
          socket.create_connection(("127.0.0.1", running.ports.grpc), timeout=30) as silent,
          Http2Client(running.ports.grpc) as lively):
        silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        while silent.recv(1 << 16):
            lively.read(0.01)
        assert lively.answer(lively.call(LIVE))[0][b"grpc-status"] == OK


def test_a_connection_that_says_nothing_is_closed(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_HANDSHAKE_SECS", 0.2)
    with (socket.create_connection(("127.0.0.1", server.ports.grpc), timeout=30) as silent,
          suppress(ConnectionResetError)):
        while silent.recv(1 << 16):
            pass
    assert is_served(server)


def test_a_message_that_arrives_too_slowly_ends_its_call(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    with (serving(tmp_path, grpc_front=NGHTTP2, body_grace_secs=0.2, min_body_rate=1000) as running,
          Http2Client(running.ports.grpc) as client):
        for path in (INFER, LIVE):
            stream = client.http2.send_request(headers(path))
            client.http2.send_data(stream, prefix_of(5000) + bytes(10))
            client.send()
            fields, _ = client.answer(stream)
            assert fields[b"grpc-status"] == DEADLINE_EXCEEDED and b"--min-body-rate" in fields[b"grpc-message"]


def test_answers_that_are_not_read_are_counted_and_end_their_connection(tmp_path: Path) -> None:
    write_model(tmp_path, "large", shape=[1 << 16], max_batch=1)
    message = infer_request("large", 1 << 16)
    with serving(tmp_path, grpc_front=NGHTTP2, max_inflight_bytes=16 << 20, send_timeout_secs=1.0) as running:
        with Http2Client(running.ports.grpc, window_bytes=0) as client:         # which grants no window
            for _ in range(64):
                client.call(INFER, message)
            held = []
            end = time.monotonic() + 20
            while not client.waits_for_close(0.05) and time.monotonic() < end:
                held.append(running.run(_held(running)))
            assert client.is_closed and max(held) <= 16 << 20
        with Http2Client(running.ports.grpc) as client:
            assert client.answer(client.call(INFER, message))[0][b"grpc-status"] == OK
        end = time.monotonic() + 10
        while running.run(_held(running)) and time.monotonic() < end:
            time.sleep(0.01)
        assert running.run(_held(running)) == 0


async def _held(running: RunningServer) -> int:
    return running.server._inflight.held_bytes


def test_messages_that_are_never_finished_are_bounded(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    with serving(tmp_path, grpc_front=NGHTTP2, max_inflight_bytes=32 << 20) as running:
        clients = [Http2Client(running.ports.grpc) for _ in range(4)]
        refused = 0
        for client in clients:
            streams = set()
            for _ in range(20):
                streams.add(stream := client.http2.send_request(headers(INFER)))
                client.http2.send_data(stream, prefix_of(8 << 20) + bytes(900_000))
                client.send()
                client.answer(client.call(LIVE))        # the server has read what was sent before
            refused += sum(isinstance(event, ResponseReceived) and event.stream_id in streams
                           for event in client.events)
        assert refused >= 40 and running.run(_held(running)) <= 24 << 20
        assert is_served(running)
        for client in clients:
            client.socket.close()


def test_settings_are_those_of_grpcs_c_core() -> None:
    settings = settings_of({"grpc.keepalive_time_ms": 1500, "grpc.max_connection_age_ms": (1 << 31) - 1,
                            "grpc.http2.max_ping_strikes": 0}, 7, 500, 10.0)
    assert settings.keepalive_secs == 1.5 and settings.max_age_secs == float("inf") and settings.max_ping_strikes == 0
    assert settings.max_message_bytes == 7 and settings.min_ping_interval_secs == 300.0


def test_grpcio_serves_where_ngh2_is_not_installed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(http2, "is_installed", False)
    write_model(tmp_path, "m")
    with (serving(tmp_path, grpc_front=NGHTTP2) as running, grpc.insecure_channel(running.address) as channel):
        answer = channel.unary_unary(INFER)(infer_request(), timeout=30)
    assert inference.ModelInferResponse.FromString(answer).model_name == "m"
    assert [record.message for record in caplog.records if "ngh2 is not installed" in record.message]
