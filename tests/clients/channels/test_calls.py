"""Tests of calls of both clients over both transports, against real and scripted servers."""
from __future__ import annotations

import asyncio
import gzip
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.clients import AsyncInferenceClient, InferenceClient, Tls, channels
from infer_server.clients.channels.call import CallRequest, PendingCall
from infer_server.clients.channels.connection import ClientConnection, Keepalive
from infer_server.clients.errors import (
    ClientError,
    DeadlineExceededError,
    InvalidRequestError,
    ServerError,
    ServerUnavailableError,
    UnsupportedError,
)
from infer_server.protos import http2
from infer_server.protos import inference as pb
from infer_server.protos.grpc_framing import prefix_of
from scripts.testing.numpy_engine import write_model
from tests.clients.channels.peers import KINDS, LIVE, Peer, client_of, listening, proxy_to, scripted
from tests.clients.server import TIMEOUT_SECS, Doubler
from tests.clients.server import serving as serving_doubler
from tests.infer_server.serving import FRONTS, RunningServer, serving

pytestmark = pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
TRANSPORTS = ("nghttp2", "grpcio")
WIDE = 1 << 16                  # values: 256 KiB, four times HTTP/2's first window


@pytest.fixture(scope="module", params=FRONTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "affine")
    write_model(folder, "wide", shape=[WIDE], max_batch=4)
    with serving(folder, grpc_front=request.param, grpc_channel={"grpc.default_compression_algorithm": 2}) as running:
        yield running


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_answers_are_those_of_tritonclient(server: RunningServer, kind: str, transport: str, compression: Any) -> None:
    with (client_of(kind, server.address, transport=transport, compression=compression) as client,
          triton.InferenceServerClient(server.address) as other):
        for model, width in (("affine", 4), ("wide", WIDE)):
            x = np.arange(2 * width, dtype=np.float32).reshape(2, width)
            given = triton.InferInput("x", x.shape, "FP32")
            given.set_data_from_numpy(x)
            np.testing.assert_array_equal(client.infer(model, {"x": x})["y"],
                                          other.infer(model, [given]).as_numpy("y"))


@pytest.mark.parametrize("kind", KINDS)
def test_many_calls_at_once_get_their_own_answers(server: RunningServer, kind: str) -> None:
    with client_of(kind, server.address) as client, ThreadPoolExecutor(16) as pool:
        inputs = [np.full((1, 4), n, np.float32) for n in range(200)]
        for x, answer in zip(inputs, pool.map(lambda x: client.infer("affine", {"x": x}), inputs), strict=True):
            np.testing.assert_array_equal(answer["y"], 2 * x + 1)


def test_the_asyncio_client_shares_a_connection_and_the_other_keeps_those_it_made() -> None:
    async def together(url: str) -> None:
        async with AsyncInferenceClient(url) as client:
            await asyncio.gather(*(client.is_server_live() for _ in range(50)))

    with serving_doubler(Doubler()) as upstream, proxy_to(upstream) as (url, proxy):
        asyncio.run(together(url))
        assert proxy.count == 1
        with InferenceClient(url) as client:
            assert all(client.is_server_live() for _ in range(50))
        assert proxy.count == 2


def test_calls_beyond_the_streams_that_a_server_takes_wait_for_them() -> None:
    async def together(url: str) -> None:
        async with AsyncInferenceClient(url) as client:
            assert all(await asyncio.gather(*(client.is_server_live(timeout=TIMEOUT_SECS) for _ in range(300))))

    most: list[int] = []

    def handle(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
        waiting.append(stream)
        most.append(len(waiting))
        if len(waiting) == 100:                             # all that it takes at once
            while waiting:
                peer.answer(waiting.pop())

    waiting: list[int] = []
    with scripted(handle) as (url, server):
        asyncio.run(together(url))
        assert (len(server.peers), max(most)) == (1, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_a_unix_socket_is_an_address(tmp_path: Path, kind: str) -> None:
    async def serve(ready: threading.Event, stop: asyncio.Event) -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {
            "ServerLive": grpc.unary_unary_rpc_method_handler(Doubler().ServerLive, pb.ServerLiveRequest.FromString,
                                                              pb.ServerLiveResponse.SerializeToString)}),))
        server.add_insecure_port(f"unix:{tmp_path}/s")
        await server.start()
        ready.set()
        await stop.wait()
        await server.stop(None)

    ready, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(ready, stop),))
    thread.start()
    assert ready.wait(TIMEOUT_SECS)
    with client_of(kind, f"unix:{tmp_path}/nothing") as client, pytest.raises(
            ServerUnavailableError, match="No such file"):
        client.is_server_live()
    for url in (f"unix:{tmp_path}/s", f"unix://{tmp_path}/s"):
        with client_of(kind, url) as client:
            assert client.is_server_live()
    loop.call_soon_threadsafe(stop.set)
    thread.join(TIMEOUT_SECS)
    loop.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with self-signed certificates for server and client: NAME.pem and NAME.key."""
    folder = tmp_path_factory.mktemp("certificates")
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl to make certificates with")
    for name in ("server", "client"):
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                        "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2",
                        "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"],
                       check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("kind", KINDS)
def test_connections_are_encrypted(tmp_path: Path, certificates: Path, kind: str, front: str) -> None:
    from infer_server.endpoints.tls import ServerTls
    write_model(tmp_path, "wide", shape=[WIDE])
    server, own = certificates / "server", certificates / "client"
    files = Tls(f"{server}.pem", f"{own}.pem", f"{own}.key")
    tls = ServerTls(Path(f"{server}.pem"), Path(f"{server}.key"), Path(f"{own}.pem"))
    x = np.arange(WIDE, dtype=np.float32).reshape(1, WIDE)
    with serving(tmp_path, grpc_tls=tls, grpc_front=front) as running:
        for transport, given in (("nghttp2", files), ("nghttp2", files.context()), ("grpcio", files)):
            with client_of(kind, running.address, tls=given, transport=transport) as client:
                for _ in range(3):
                    np.testing.assert_array_equal(client.infer("wide", {"x": x})["y"], 2 * x + 1)
        for refused in (Tls(f"{own}.pem"), ssl.create_default_context()):       # without the server's authority
            with client_of(kind, running.address, tls=refused) as client:
                with pytest.raises(ServerUnavailableError, match="certificate"):
                    client.is_server_live()
                assert kind == "blocking" or not client._client._channel._open, "close() would wait for its end"
        with client_of(kind, running.address) as client, pytest.raises(ServerUnavailableError):
            client.is_server_live()


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing.pem"):
        InferenceClient("localhost:1", tls=Tls(tmp_path / "nothing.pem"))
    with pytest.raises(ValueError, match="as files"):
        InferenceClient("localhost:1", tls=ssl.create_default_context(), transport="grpcio")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
def test_metadata_reach_the_server(kind: str, transport: str) -> None:
    class Remembering(Doubler):
        async def ModelInfer(self, request: Any, context: Any) -> Any:
            seen.append(dict(context.invocation_metadata()))
            return await super().ModelInfer(request, context)

    seen: list[dict[str, Any]] = []
    with (serving_doubler(Remembering()) as url,
          client_of(kind, url, transport=transport, metadata=[("authorization", "Bearer x"), ("a-bin", b"\0\xff")])
          as client):
        client.infer("doubler", {"x": np.ones((1, 4), np.float32)}, metadata=[("request", "7")])
    assert (seen[0]["authorization"], seen[0]["a-bin"], seen[0]["request"]) == ("Bearer x", b"\0\xff", "7")


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_resets_the_stream_and_spares_the_connection(kind: str) -> None:
    def handle(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
        if peer.calls > 1:
            peer.answer(stream)

    with scripted(handle) as (url, server), client_of(kind, url) as client:
        with pytest.raises(DeadlineExceededError, match="within the timeout"):
            client.is_server_live(timeout=0.05)
        assert server.waits_for_reset() == http2.ErrorCode.CANCEL
        assert client.is_server_live(timeout=TIMEOUT_SECS)
        assert len(server.peers) == 1
        assert server.requests[0][b"grpc-timeout"] == b"50000000n"


def test_a_call_that_is_cancelled_resets_its_stream() -> None:
    async def cancels(url: str) -> None:
        async with AsyncInferenceClient(url) as client:
            call = asyncio.create_task(client.is_server_live())
            while not server.requests:
                await asyncio.sleep(0.001)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(server.waits_for_reset) == http2.ErrorCode.CANCEL

    with scripted(lambda *_: None) as (url, server):
        asyncio.run(cancels(url))


def send_twice(peer: Peer, stream: int) -> None:
    peer.http2.send_response(stream, ((b":status", b"200"), (b"content-type", b"application/grpc")))
    for _ in range(2):
        peer.http2.send_data(stream, prefix_of(len(LIVE)) + LIVE)
        peer.socket.sendall(peer.http2.data_to_send())
    peer.http2.send_trailers(stream, ((b"grpc-status", b"0"),))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("script", "error", "message"), [
    (lambda peer, stream: peer.fail(stream, 5, (b"grpc-message", b"no %c3%a9tage")), ClientError, "no étage"),
    (lambda peer, stream: peer.answer(stream, b"", 13, (b"grpc-message", b"half way")), ServerError, "half way"),
    (lambda peer, stream: peer.fail(stream, 0), ServerError, "OK without a message"),
    (lambda peer, stream: peer.fail(stream, 99), ServerError, "no gRPC status: b'99'"),
    (lambda peer, stream: peer.answer(stream, LIVE + b"\0" * 5 + LIVE), ClientError, "not a ServerLiveResponse"),
    (lambda peer, stream: send_twice(peer, stream), ServerError, "several messages"),
    (lambda peer, stream: peer.http2.reset_stream(stream, 2), ServerError, "reset with HTTP/2 error 2"),
    (lambda peer, stream: peer.http2.reset_stream(stream, 11), InvalidRequestError, "HTTP/2 error 11"),
    (lambda peer, stream: peer.http2.send_response(stream, ((b":status", b"503"),), end_stream=True),
     ServerUnavailableError, "HTTP status 503"),
    (lambda peer, stream: peer.http2.send_response(stream, ((b":status", b"404"),), end_stream=True),
     UnsupportedError, "HTTP status 404"),
    (lambda peer, stream: peer.socket.close(), ServerUnavailableError, "closed the connection|reset by peer"),
    (lambda peer, stream: peer.socket.sendall(bytes(64)), ServerUnavailableError, "error 1: DATA: stream_id == 0"),
    (lambda peer, stream: peer.http2.send_goaway(11, last_stream_id=stream, debug_data=b"calm down")
     or peer.socket.sendall(peer.http2.data_to_send()) or peer.socket.close(), ServerUnavailableError, "calm down"),
    (lambda peer, stream: peer.answer(stream, b"junk", flag=b"\1", coding=b"gzip"), ServerError, "decompressed"),
    (lambda peer, stream: peer.answer(stream, gzip.compress(LIVE)[:-9], flag=b"\1", coding=b"gzip"), ServerError,
     "cut short"),
    (lambda peer, stream: peer.answer(stream, LIVE, flag=b"\1"), ServerError, "compressed by b'identity'"),
    (lambda peer, stream: peer.answer(stream, gzip.compress(bytes(1 << 16)), flag=b"\1", coding=b"gzip"),
     InvalidRequestError, "larger than max .1000. when"),
    (lambda peer, stream: peer.answer(stream, bytes(1001)), InvalidRequestError, r"larger than max \(1001 vs. 1000\)"),
])
def test_an_answer_that_is_none_is_said(kind: str, script: Any, error: type[ClientError], message: str) -> None:
    def handle(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
        script(peer, stream)

    with scripted(handle) as (url, _), client_of(kind, url, max_message_bytes=1000) as client:
        with pytest.raises(error, match=message) as raised:
            client.is_server_live(timeout=TIMEOUT_SECS)
        assert str(raised.value).startswith(f"{url}: ServerLive: ")


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_answers_are_taken(kind: str) -> None:
    with (scripted(lambda peer, stream, _: peer.answer(stream, gzip.compress(LIVE), flag=b"\1", coding=b"gzip"))
          as (url, server), client_of(kind, url) as client):
        assert client.is_server_live()
        assert b"gzip" in server.requests[0][b"grpc-accept-encoding"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_of_another_protocol_is_unavailable(kind: str) -> None:
    with (listening(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n") or connection.close()) as url,
          client_of(kind, url) as client, pytest.raises(ServerUnavailableError, match=url)):
        client.is_server_live(timeout=TIMEOUT_SECS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_is_closed_makes_no_calls(kind: str) -> None:
    with serving_doubler(Doubler()) as url, client_of(kind, url) as client:
        assert client.is_server_live()
        client.close()
        with pytest.raises(ServerError, match="the client is closed"):
            client.is_server_live()


@pytest.mark.parametrize("url", ["localhost", "localhost:http", "http://localhost:8001", "a:1,b", ":1", "a:70000"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        InferenceClient(url)


@pytest.mark.parametrize("options", [{"compression": "br"}, {"transport": "http"}, {"service_config": "{"}])
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="br|http|service config"):
        InferenceClient("localhost:1", **options)


def test_the_clients_do_not_import_grpcio_unless_it_is_asked_for() -> None:
    subprocess.run([sys.executable, "-c", "import sys; from infer_server.clients import InferenceClient; "
                                          "InferenceClient('a:1').close(); "
                                          "assert 'grpc' not in sys.modules"], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_grpcio_is_the_transport_where_ngh2_is_not_installed(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    monkeypatch.setattr(channels.http2, "is_installed", False)
    with serving_doubler(Doubler()) as url, client_of(kind, url) as client:
        assert client.is_server_live()
    assert [record.message for record in caplog.records if "ngh2" in record.message] == [
        "ngh2 is not installed: gRPC goes over grpcio"]


def test_each_answer_is_read_by_its_own_headers_on_a_connection_of_many() -> None:
    """Headers that say only that a response begins are not processed again, but all others are."""
    plain, gzipped = ((b":status", b"200"),), ((b":status", b"200"), (b"grpc-encoding", b"gzip"))
    packed = gzip.compress(b"answer")
    answers = [(plain, prefix_of(6) + b"answer"), (plain, prefix_of(6) + b"answer"),
               (gzipped, prefix_of(len(packed), True) + packed), (gzipped, prefix_of(len(packed), True) + packed),
               (plain, prefix_of(len(packed), True) + packed), (((b":status", b"503"),), b""),
               (plain, prefix_of(6) + b"answer")]
    client, server = ClientConnection(Keepalive(60.0, 60.0)), http2.server_connection(100, 1 << 20)

    def exchange() -> None:
        server.receive_data(client.data_to_send())
        client.receive(memoryview(server.data_to_send()))

    exchange()
    actual = []
    for headers, data in answers:
        call = PendingCall(1 << 20)
        client.open(CallRequest(((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/m"),
                                 (b":authority", b"server")), (b"x",)), call)
        exchange()
        server.events()
        server.send_response(call.stream, headers)
        server.send_data(call.stream, data)
        server.send_trailers(call.stream, ((b"grpc-status", b"0"),))
        exchange()
        assert call.is_ended
        error = call.failure()
        actual.append(error.status if error else bytes(call.result()))
    assert actual == [b"answer"] * 4 + ["INTERNAL", "UNAVAILABLE", b"answer"]
