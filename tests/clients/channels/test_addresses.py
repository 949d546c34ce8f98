"""Tests of channels to several servers: rotation, servers that are down or unhealthy, and silent peers."""
from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer_server.clients.channels import addresses
from infer_server.clients.channels import health as health_checks
from infer_server.clients.channels.addresses import Address, parse_url
from infer_server.clients.errors import ServerUnavailableError
from infer_server.protos import health, http2
from scripts.testing.numpy_engine import write_model
from tests.clients.channels.peers import KINDS, Peer, client_of, keepalive_secs, listening, proxy_to, scripted
from tests.clients.server import TIMEOUT_SECS, Doubler, serving
from tests.infer_server.serving import FRONTS
from tests.infer_server.serving import serving as infer_serving

pytestmark = pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
RETRIES = {"methodConfig": [{"name": [{}], "retryPolicy": {"initialBackoff": "0.01s"}}]}
HEALTH = {"healthCheckConfig": {"serviceName": "models"}}


def answering(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
    peer.answer(stream)


@pytest.mark.parametrize("transport", ["nghttp2", "grpcio"])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_go_to_the_servers_in_turn(kind: str, transport: str) -> None:
    with (scripted(answering) as (a, one), scripted(answering) as (b, other),
          client_of(kind, f"{a},{b}", transport=transport, service_config={}) as client):
        for _ in range(20):
            assert client.is_server_live(timeout=TIMEOUT_SECS)
        deadline = time.monotonic() + TIMEOUT_SECS          # grpcio connects to the second while it uses the first
        while transport == "grpcio" and not (one.requests and other.requests) and time.monotonic() < deadline:
            assert client.is_server_live(timeout=TIMEOUT_SECS)
        served = [len(one.requests), len(other.requests)]
        assert served == [10, 10] if transport == "nghttp2" else min(served) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_gone_is_left_out_until_its_backoff_is_over(
        kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(answering) as (a, server), serving(Doubler()) as b, proxy_to(b) as (c, proxy):
        proxy.upstream = None                               # connections are accepted, and closed
        with client_of(kind, f"{a},{c}", service_config={}) as client:
            assert all(client.is_server_live(timeout=TIMEOUT_SECS) for _ in range(10))
            assert len(server.requests) == 10 and proxy.count == 1
        proxy.upstream = b
        monkeypatch.setattr(addresses, "_FIRST_BACKOFF_SECS", 1e-6)
        with client_of(kind, f"127.0.0.1:1,{c}", service_config={}) as client:
            assert all(client.is_server_live(timeout=TIMEOUT_SECS) for _ in range(4))
            assert proxy.count == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_comes_back_is_connected_to_again(kind: str) -> None:
    with serving(Doubler()) as upstream, proxy_to(upstream) as (url, proxy), client_of(kind, url) as client:
        assert client.is_server_live(timeout=TIMEOUT_SECS)
        proxy.upstream = None
        proxy.cut()
        with pytest.raises(ServerUnavailableError):
            client.is_server_live(timeout=TIMEOUT_SECS)
        proxy.upstream = upstream
        deadline = time.monotonic() + TIMEOUT_SECS
        while True:                                         # the proxy may still be cutting
            try:
                assert client.is_server_live(timeout=TIMEOUT_SECS)
                break
            except ServerUnavailableError:
                assert time.monotonic() < deadline


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_call_fails_while_one_of_two_servers_is_stopped(tmp_path: Path, kind: str, front: str) -> None:
    write_model(tmp_path, "m")
    x = np.ones((1, 4), np.float32)
    with (infer_serving(tmp_path, grpc_front=front) as stopped, infer_serving(tmp_path, grpc_front=front) as stays,
          client_of(kind, f"{stopped.address},{stays.address}", service_config=RETRIES) as client,
          ThreadPoolExecutor(4) as pool):
        def repeat(_: int) -> int:
            count = 0
            while not is_over.is_set():
                client.infer("m", {"x": x}, timeout=TIMEOUT_SECS)
                count += 1
            return count

        is_over = threading.Event()
        users = [pool.submit(repeat, number) for number in range(4)]
        try:
            time.sleep(0.1)
            assert stopped.stop()
            time.sleep(0.1)
        finally:
            is_over.set()
        assert all(user.result(TIMEOUT_SECS) > 0 for user in users)


@pytest.mark.parametrize("kind", KINDS)
def test_a_retry_goes_to_another_server(kind: str) -> None:
    def fails(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
        peer.fail(stream, 14)

    with (scripted(fails) as (a, bad), scripted(answering) as (b, good),
          client_of(kind, f"{a},{b}", service_config=RETRIES) as client, ThreadPoolExecutor(4) as pool):
        assert all(pool.map(lambda _: client.is_server_live(timeout=TIMEOUT_SECS), range(40)))
        assert len(good.requests) == 40 and bad.requests
        assert not any(b"grpc-previous-rpc-attempts" in request for request in bad.requests)


@pytest.mark.parametrize("kind", KINDS)
def test_every_address_is_named_when_none_answers(kind: str) -> None:
    with client_of(kind, "127.0.0.1:1,127.0.0.1:2") as client, pytest.raises(
            ServerUnavailableError, match=r"127.0.0.1:1: .Errno 111.*; 127.0.0.1:2: .Errno 111"):
        client.is_server_live(timeout=TIMEOUT_SECS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_silent_when_connected_to_is_given_up(kind: str) -> None:
    def silent(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            pass

    with listening(silent) as url, scripted(answering) as (good, _), client_of(
            kind, f"{url},{good}", connect_secs=0.05) as client:
        assert client.is_server_live(timeout=TIMEOUT_SECS)
    with listening(silent) as url, client_of(kind, url, connect_secs=0.05) as client, pytest.raises(
            ServerUnavailableError):
        client.is_server_live(timeout=TIMEOUT_SECS)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_go_to_servers_that_say_that_they_serve(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[str, Any] = {}

    def handler(name: str) -> Any:
        def handle(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
            if headers[b":path"] != b"/grpc.health.v1.Health/Check":
                calls.append(name)
                peer.answer(stream)
            elif states[name] is None:
                peer.fail(stream, 12)
            else:
                peer.answer(stream, health.HealthCheckResponse(status=states[name]).SerializeToString())

        return handle

    calls: list[str] = []
    monkeypatch.setattr(health_checks, "CHECK_SECS", 0.0)
    monkeypatch.setattr(addresses, "_FIRST_BACKOFF_SECS", 1e-6)
    with (scripted(handler("a")) as (a, _), scripted(handler("b")) as (b, _),
          client_of(kind, f"{a},{b}", service_config=HEALTH) as client):
        for states["a"], states["b"], expected in ((1, 1, {"a", "b"}), (2, 1, {"b"}), (1, 2, {"a"}),
                                                   (None, 1, {"a", "b"}), (3, None, {"b"})):
            calls.clear()
            assert all(client.is_server_live(timeout=TIMEOUT_SECS) for _ in range(4))
            assert set(calls) == expected
        states["a"] = states["b"] = 2
        with pytest.raises(ServerUnavailableError, match="is NOT_SERVING.*is NOT_SERVING"):
            client.is_server_live(timeout=TIMEOUT_SECS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_answers_no_ping_is_lost_and_one_that_does_is_waited_for(kind: str) -> None:
    def stops_reading(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
        peer.socket.sendall(peer.http2.data_to_send())
        assert is_lost.wait(TIMEOUT_SECS)

    is_lost = threading.Event()
    pings = {"keepalive_secs": 0.02, "keepalive_timeout_secs": 0.05}
    with scripted(stops_reading) as (url, server), client_of(kind, url, **pings) as client:
        with pytest.raises(ServerUnavailableError, match="did not answer a keepalive ping"):
            client.is_server_live(timeout=TIMEOUT_SECS)
        is_lost.set()
        assert server.requests
    with scripted(answering_behind_a_ping) as (url, server), client_of(
            kind, url, keepalive_secs=0.02, keepalive_timeout_secs=TIMEOUT_SECS) as client:
        assert client.is_server_live(timeout=TIMEOUT_SECS)
        assert is_pinged(server.peers[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_pinged_too_often_is_pinged_half_as_often(kind: str) -> None:
    def handle(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
        if peer.number < 2:
            peer.http2.send_goaway(11, last_stream_id=0, debug_data=b"too_many_pings")
        else:
            peer.answer(stream)

    with scripted(handle) as (url, _), client_of(kind, url, keepalive_secs=40.0) as client:
        assert client.is_server_live(timeout=TIMEOUT_SECS)
        assert keepalive_secs(client) == 160.0


def answering_behind_a_ping(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
    """Answer the call once the client has sent a ping."""
    def answer() -> None:
        if not is_pinged(peer):
            threading.Timer(0.01, answer).start()
            return
        peer.answer(stream)
        peer.socket.sendall(peer.http2.data_to_send())

    answer()


def is_pinged(peer: Peer) -> bool:
    return any(isinstance(event, http2.PingReceived) for event in peer.events)


@pytest.mark.parametrize(("url", "expected"), [
    ("localhost:8001", ["localhost:8001"]), ("a:1, b:2", ["a:1", "b:2"]), ("[::1]:8001", ["[::1]:8001"]),
    ("dns:///a:1", ["a:1"]), ("ipv4:1.2.3.4:5,6.7.8.9:10", ["1.2.3.4:5", "6.7.8.9:10"]),
    ("unix:/run/s", ["unix:/run/s"]), ("unix:///run/s", ["unix:/run/s"]),
    ("unix:s", ["unix:s"]), ("unix-abstract:s", ["unix:\0s"])])
def test_a_url_is_one_address_or_several(url: str, expected: list[str]) -> None:
    assert [address.name for address in parse_url(url)] == expected


def test_backoff_grows_with_failures_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(addresses.time, "monotonic", lambda: now)
    address = Address("a", 1)
    for secs in (1.0, 1.6, 2.56):
        address.failed()
        assert address.is_ejected
        now += 0.79 * secs
        assert address.is_ejected
        now += 0.42 * secs
        assert not address.is_ejected
    address.failed()
    address.succeeded()
    assert not address.is_ejected
