"""Tests of ports that open when the initial models are loaded, and of the probes meanwhile."""
from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import pytest
import tritonclient.grpc as triton

from infer_server.cli.serve import _options, _parser
from scripts.testing.numpy_engine import TIMEOUT_SECS, load_numpy_engine, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import FRONTS, WORKERS, RunningServer, options


class Gate:
    """Loader of engines that waits until it is opened."""

    def __init__(self) -> None:
        import threading
        self.opened = threading.Event()

    def __call__(self, *given: object, **named: object) -> object:
        assert self.opened.wait(TIMEOUT_SECS)
        return load_numpy_engine(*given, **named)       # type: ignore[arg-type]


class Loading(RunningServer):
    """Server that is started without waiting for its models."""

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        from infer_server.server import Server
        self.server = Server(self._options, self._load_engine)
        self.ports = await self.server.start()
        self._started.set()
        await self._stop.wait()
        self._answered = await self.server.stop()


@contextmanager
def loading(repository: Path, gate: Gate, **given: object) -> Iterator[Loading]:
    running = Loading(options(repository, listen_when_ready=True, **given), gate)      # type: ignore[arg-type]
    running.start()
    try:
        yield running
    finally:
        gate.opened.set()
        running.stop()


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), TIMEOUT_SECS).close()
    except ConnectionRefusedError:
        return True
    return False


def status(port: int, path: str) -> int:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT_SECS) as response:
            code: int = response.status
            return code
    except HTTPError as error:
        return error.code


@pytest.mark.parametrize("front", [*FRONTS, WORKERS[0]])
def test_ports_refuse_connections_until_the_models_are_loaded(tmp_path: Path, front: str) -> None:
    write_model(tmp_path, "m")
    gate = Gate()
    with loading(tmp_path, gate, grpc_front=front) as running:
        ports = running.ports
        assert ports.grpc and ports.http and refuses(ports.grpc) and refuses(ports.http)
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", ports.grpc))
        assert status(ports.metrics, "/v2/health/live") == 200 and status(ports.metrics, "/v2/health/ready") == 503
        gate.opened.set()
        assert eventually(lambda: status(ports.metrics, "/v2/health/ready") == 200)
        assert status(ports.http, "/v2/health/ready") == 200
        with triton.InferenceServerClient(running.address) as client:
            assert client.is_server_ready() and client.is_model_ready("m")


def test_a_client_goes_to_another_server_while_models_are_loaded(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    late, early = Gate(), Gate()
    early.opened.set()
    with loading(tmp_path, late) as first, loading(tmp_path, early) as second:
        assert eventually(lambda: not refuses(second.ports.grpc))
        with grpc.insecure_channel(f"ipv4:{first.address},{second.address}",
                                   [("grpc.lb_policy_name", "round_robin")]) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
            for _ in range(20):
                assert live(b"\x0a\x01m", timeout=TIMEOUT_SECS) == b"\x08\x01"


def test_a_server_that_is_stopped_while_it_loads_closes_its_ports(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    gate = Gate()
    with loading(tmp_path, gate) as running:
        port = running.ports.grpc
        gate.opened.set()
        assert running.stop()
    socket.create_server(("127.0.0.1", port)).close()


def test_ports_open_where_a_model_has_failed(tmp_path: Path) -> None:
    write_model(tmp_path, "good")
    write_model(tmp_path, "bad", config="max_batch_size: x")
    gate = Gate()
    gate.opened.set()
    with loading(tmp_path, gate) as running:
        assert eventually(lambda: not refuses(running.ports.grpc))
        assert status(running.ports.metrics, "/v2/health/ready") == 503
        with triton.InferenceServerClient(running.address) as client:
            assert client.is_model_ready("good") and not client.is_server_ready()


@pytest.mark.parametrize(("host", "arguments", "waits"), [
    ("10.0.0.1", [], True), ("", [], False), ("10.0.0.1", ["--listen-when-ready=false"], False),
    ("", ["--listen-when-ready"], True)])
def test_a_pod_of_kubernetes_listens_when_it_is_ready(
        monkeypatch: pytest.MonkeyPatch, host: str, arguments: list[str], waits: bool) -> None:
    if host:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    assert _options(_parser().parse_args(["--model-repository", "m", *arguments])).listen_when_ready is waits
