"""Tests of the default policy for several servers: retries with a budget, health checks, names with many addresses."""
from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.clients import default_service_config
from infer_server.clients.channels import addresses, health
from infer_server.clients.channels.addresses import Address
from infer_server.clients.errors import DeadlineExceededError, ServerUnavailableError
from infer_server.protos import health as health_protos
from infer_server.protos import http2
from scripts.testing.numpy_engine import write_model
from tests.clients.channels.peers import KINDS, Peer, Scripted, client_of, listening, scripted
from tests.clients.server import TIMEOUT_SECS
from tests.infer_server.serving import serving as infer_serving

pytestmark = pytest.mark.skipif(not http2.is_installed, reason="ngh2 is not installed")
SERVING = health_protos.HealthCheckResponse(status=1).SerializeToString()
CHECK = b"/grpc.health.v1.Health/Check"


def answering(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
    if headers[b":path"] == CHECK:
        peer.answer(stream, SERVING)
    else:
        peer.answer(stream)


def failing(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
    if headers[b":path"] == CHECK:
        peer.answer(stream, SERVING)
    else:
        peer.fail(stream, 14)


def calls(server: Any) -> list[dict[bytes, bytes]]:
    return [headers for headers in server.requests if headers[b":path"] != CHECK]


@pytest.mark.parametrize("kind", KINDS)
def test_calls_to_a_list_of_servers_are_retried_and_servers_checked(kind: str) -> None:
    with (scripted(failing) as (a, bad), scripted(answering) as (b, good),
          client_of(kind, [a, b, "127.0.0.1:1"]) as client):
        assert all(client.is_server_live(timeout=TIMEOUT_SECS) for _ in range(20))
        assert calls(bad) and len(calls(good)) == 20
        assert any(headers[b":path"] == CHECK for headers in good.requests)


@pytest.mark.parametrize("kind", KINDS)
def test_retries_stop_when_the_budget_is_used_up(kind: str) -> None:
    config = default_service_config()
    config["methodConfig"][0]["retryPolicy"]["initialBackoff"] = "0.001s"
    with (scripted(failing) as (a, one), scripted(failing) as (b, other),
          client_of(kind, [a, b], service_config=config) as client):
        for _ in range(20):
            with pytest.raises(ServerUnavailableError):
                client.is_server_live(timeout=TIMEOUT_SECS)
        # 50 of the 100 tokens are used up by the failures of 12 or 13 calls of 4 attempts each.
        assert 50 <= len(calls(one)) + len(calls(other)) <= 62


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_hangs_makes_one_call_late(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(peer: Peer, stream: int, headers: dict[bytes, bytes]) -> None:
        if headers[b":path"] == CHECK and not calls(hanging):
            peer.answer(stream, SERVING)

    monkeypatch.setattr("infer_server.clients.channels.blocking.MAX_SECS", 0.3)
    monkeypatch.setattr("infer_server.clients.channels.aio.MAX_SECS", 0.3)
    assert health.MAX_SECS < health.CHECK_SECS
    with scripted(hangs) as (a, hanging), scripted(answering) as (b, good), client_of(kind, [a, b]) as client:
        late = 0
        for _ in range(10):
            try:
                assert client.is_server_live(timeout=1.0)
            except DeadlineExceededError:
                late += 1
        assert late == 1 and len(calls(good)) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_does_not_wait_for_a_connection_while_another_server_may_be_tried(
        kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            pass

    monkeypatch.setattr(addresses, "_TRY_SECS", 0.05)
    with (listening(silent) as url, scripted(answering) as (good, _),
          client_of(kind, [url, good], connect_secs=2 * TIMEOUT_SECS) as client):
        assert all(client.is_server_live(timeout=TIMEOUT_SECS) for _ in range(3))


@pytest.mark.parametrize("kind", KINDS)
def test_calls_go_to_all_addresses_of_a_name_and_follow_its_changes(
        kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def same_port() -> tuple[int, list[socket.socket]]:
        """Listen on one port of three addresses of this machine, as pods behind a headless Service do."""
        first = socket.create_server(("127.0.0.1", 0))
        port = first.getsockname()[1]
        return port, [first, *(socket.create_server((f"127.0.0.{n}", port)) for n in (2, 3))]

    def serve(listener: socket.socket) -> None:
        server = servers[listener.getsockname()[0]]
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=server.converse, args=(connection,), daemon=True).start()

    def look_up(host: str, port: int) -> Sequence[str]:
        assert host == "pods.test"
        looked_up.set()
        return names

    names, looked_up = ["127.0.0.1", "127.0.0.2"], threading.Event()
    monkeypatch.setattr(addresses, "addresses_of", look_up)
    port, listeners = same_port()
    servers = {listener.getsockname()[0]: Scripted(answering) for listener in listeners}
    threads = [threading.Thread(target=serve, args=(listener,)) for listener in listeners]
    for thread in threads:
        thread.start()
    with ExitStack() as stack:
        for listener in listeners:
            stack.callback(listener.close)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
        client = stack.enter_context(client_of(kind, f"dns:///pods.test:{port}"))
        assert all(client.is_server_live(timeout=TIMEOUT_SECS) for _ in range(10))
        assert [len(calls(server)) for server in servers.values()] == [5, 5, 0]
        looked_up.clear()
        names[:] = ["127.0.0.2", "127.0.0.3"]
        monkeypatch.setattr(addresses, "LOOK_UP_SECS", 0.0)
        channel = (client if kind == "blocking" else client._client)._channel
        channel._dns._due = 0.0
        assert client.is_server_live(timeout=TIMEOUT_SECS) and looked_up.wait(TIMEOUT_SECS)
        for _ in range(1000):                               # the thread of the look-up stores its result
            assert client.is_server_live(timeout=TIMEOUT_SECS)
            if calls(servers["127.0.0.3"]):
                break
        before = len(calls(servers["127.0.0.1"]))
        assert all(client.is_server_live(timeout=TIMEOUT_SECS) for _ in range(4))
        assert calls(servers["127.0.0.3"]) and len(calls(servers["127.0.0.1"])) == before
    for thread in threads:
        thread.join(TIMEOUT_SECS)


@pytest.mark.parametrize("transport", ["nghttp2", "grpcio"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_looked_up_by_the_machines_resolver(kind: str, transport: str) -> None:
    with scripted(answering) as (url, server):
        name = f"dns:///localhost:{url.rpartition(':')[2]}"
        # grpcio asks for health by Watch, which the scripted server does not have.
        config = None if transport == "nghttp2" else {"loadBalancingConfig": [{"round_robin": {}}]}
        with client_of(kind, name, transport=transport, service_config=config) as client:
            assert client.is_server_live(timeout=TIMEOUT_SECS) and calls(server)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_without_addresses_is_unavailable(kind: str) -> None:
    with client_of(kind, "dns:///no-such-host.invalid:8001") as client, pytest.raises(
            ServerUnavailableError, match="no-such-host.invalid:8001"):
        client.is_server_live(timeout=TIMEOUT_SECS)


@pytest.mark.parametrize("kind", KINDS)
def test_several_names_behind_dns_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="several names"), client_of(kind, "dns:///a:1,b:1"):
        pass


def test_an_address_may_fail_any_number_of_times() -> None:
    address = Address("a", 1)
    for _ in range(3000):
        address.failed()
    assert address.is_ejected


@pytest.mark.parametrize("name", ["ours", "tritonclient"])
def test_no_call_is_lost_by_clients_with_the_default_policy_while_a_server_stops(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "m")
    x = np.ones((1, 4), np.float32)

    def open_infer() -> Any:
        urls = [stopped.address, stays.address]
        if name == "ours":
            ours = stack.enter_context(client_of("blocking", urls, transport="grpcio"))
            return lambda: ours.infer("m", {"x": x}, timeout=TIMEOUT_SECS)
        client = triton.InferenceServerClient("ipv4:" + ",".join(urls), channel_args=[
            ("grpc.service_config", json.dumps(default_service_config()))])
        stack.callback(client.close)
        tensor = triton.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(x)
        return lambda: client.infer("m", [tensor], client_timeout=TIMEOUT_SECS)

    with (infer_serving(tmp_path) as stopped, infer_serving(tmp_path) as stays, ExitStack() as stack,
          ThreadPoolExecutor(4) as pool):
        infer = open_infer()

        def repeat(_: int) -> int:
            count = 0
            while not is_over.is_set():
                infer()
                count += 1
            return count

        is_over = threading.Event()
        users = [pool.submit(repeat, number) for number in range(4)]
        try:
            is_over.wait(0.1)
            assert stopped.stop()
            is_over.wait(0.1)
        finally:
            is_over.set()
        assert all(user.result(TIMEOUT_SECS) > 0 for user in users)
