"""Tests of the server under load, with misbehaving clients, and on shutdown."""
from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server import protos
from infer_server.batching.statistics import Counters, Failure
from infer_server.protos import health, inference
from infer_server.server import Server
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, Gate, load_numpy_engine, write_model
from tests.infer_server.serving import DEFAULTS, FRONTS, WORKERS, RunningServer, options, serving

Serve = Callable[..., RunningServer]
ONE = np.ones((1, 4), np.float32)
GROWING_SECS = (0.3, 3.0, 30.0)     # deadlines of requests that must reach a model before: the first that is enough


@pytest.fixture(scope="module", params=FRONTS + WORKERS, autouse=True)
def front(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the gRPC implementation used in this module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEFAULTS, "grpc_front", request.param)
        yield


@pytest.fixture(scope="module")
def shared(front: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("models"), explicit_control=True) as running:
        yield running


@pytest.fixture
def serve(shared: RunningServer) -> Iterator[Serve]:
    """Return a function that serves a model "m" as write_model() describes it, on the server of this module."""
    def load(**model: Any) -> RunningServer:
        write_model(shared.folder, "m", **model)
        client.load_model("m")
        return shared

    with triton.InferenceServerClient(shared.address) as client:
        yield load
        client.unload_model("m")
        assert eventually(lambda: not client.is_model_ready("m"))
        shutil.rmtree(shared.folder / "m")


def infer(client: triton.InferenceServerClient, model: str = "m", **options: object) -> np.ndarray:
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(ONE)
    y: np.ndarray = client.infer(model, [tensor], **options).as_numpy("y")
    return y


def eventually(condition: Callable[[], bool], timeout_secs: float = TIMEOUT_SECS) -> bool:
    """Return True if a condition becomes true within the time that a test may take."""
    end = time.monotonic() + timeout_secs
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def pending(server: RunningServer, model: str = "m") -> int:
    return server.server.repository.find(model).pending


def statistics(server: RunningServer, model: str = "m") -> Counters:
    async def read() -> Counters:       # on the loop, behind what it has still to count
        return server.server.repository.find(model).statistics.snapshot()
    return server.run(read())


def executions(server: RunningServer, model: str = "m") -> int:
    return statistics(server, model).execution_count


def given_up(server: RunningServer) -> int:
    """Return the number of requests that left the queue unexecuted: cancelled by clients or rejected by the queue."""
    failures = statistics(server).failures
    return failures[Failure.CANCELED] + failures[Failure.REJECTED]


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Gate:
    """Return the gate of models written with gate=request.node.name."""
    return GATES[request.node.name]


def test_what_gathers_while_an_instance_is_busy_is_one_batch(
        serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    server = serve(max_batch=32, gate=request.node.name)
    with (triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(32) as clients):
        with gate.closed():
            first = clients.submit(infer, client)
            assert gate.holds(1)
            others = [clients.submit(infer, client) for _ in range(31)]
            assert eventually(lambda: pending(server) == 31)
        assert all((future.result() == 3).all() for future in (first, *others))
        stats = client.get_inference_statistics("m").model_stats[0]
    assert [(batch.batch_size, batch.compute_infer.count) for batch in stats.batch_stats] == [(1, 1), (31, 1)]
    assert (stats.inference_count, stats.execution_count) == (32, 2)


def test_requests_whose_items_would_depend_on_each_other_are_never_merged(
        serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    server = serve(max_batch=32, gate=request.node.name, dependence="it normalises over the items")
    with (triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(4) as clients):
        with gate.closed():
            requested = [clients.submit(infer, client) for _ in range(4)]
            assert gate.holds(1)
            assert eventually(lambda: pending(server) == 3)
        assert all((future.result() == 3).all() for future in requested)
        assert executions(server) == 4


def test_many_clients_that_ask_again_and_again_share_batches(
        serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    """A batch holds all clients that wait when an execution ends, so two consecutive batches serve every client."""
    server = serve(max_batch=32, gate=request.node.name)
    stop = threading.Event()

    def ask(client: triton.InferenceServerClient) -> bool:
        right = True
        while not stop.is_set():
            right &= bool((infer(client) == 3).all())
        return right

    with (triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(8) as clients):
        with gate.closed():
            asking = [clients.submit(ask, client) for _ in range(8)]
            for executed in range(6):
                assert eventually(lambda: gate.waiting_items > 0 and gate.waiting_items + pending(server) == 8)
                if executed == 5:
                    stop.set()
                gate.let_one_through()
                assert eventually(lambda executed=executed: executions(server) > executed)
            assert executions(server) == 6
            assert statistics(server).inference_count >= 24
        assert all(future.result() for future in asking)


def test_each_request_of_a_batch_gets_its_own_rows(serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    server = serve(max_batch=32, gate=request.node.name)

    def ask(client: triton.InferenceServerClient, i: int) -> bool:
        x = np.full((1 + i % 3, 4), i, np.float32)
        tensor = triton.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        y = client.infer("m", [tensor]).as_numpy("y")
        return y.shape == x.shape and bool((y == 2 * i + 1).all())

    with (triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(16) as clients):
        with gate.closed():
            first = clients.submit(ask, client, 0)
            assert gate.holds(1)
            others = [clients.submit(ask, client, i) for i in range(1, 13)]
            assert eventually(lambda: pending(server) == 12)
        assert all(future.result() for future in (first, *others))
        assert executions(server) == 2


def test_two_instances_execute_at_the_same_time(serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    server = serve(config="instance_group { count: 2 } max_batch_size: 1", gate=request.node.name)
    with (triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(3) as clients, gate.closed()):
        for _ in range(3):
            clients.submit(infer, client)
        assert gate.holds(2)
        assert eventually(lambda: pending(server) == 1)


def test_a_full_queue_refuses_at_once_and_the_waiting_are_answered(
        serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    server = serve(gate=request.node.name, config="""
        max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 1 } }""")
    with (triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(2) as clients):
        with gate.closed():
            executing = clients.submit(infer, client)
            assert gate.holds(1)
            waiting = clients.submit(infer, client)
            assert eventually(lambda: pending(server) == 1)
            with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as caught:
                infer(client)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert executing.result().all() and waiting.result().all()
        assert 'reason="REJECTED",version="1"} 1' in scrape(server)


def test_a_request_whose_timeout_passes_in_the_queue_is_refused(
        serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    server = serve(gate=request.node.name, config="""
        max_batch_size: 1 dynamic_batching { default_queue_policy { allow_timeout_override: true } }""")
    with (triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(2) as clients):
        with gate.closed():
            executing = clients.submit(infer, client)
            assert gate.holds(1)
            with pytest.raises(InferenceServerException, match="timeout expired") as caught:
                infer(client, timeout=1)
            assert not executing.done(), "it is refused while every instance is busy"
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert executing.result().all()


def test_a_request_that_its_client_gives_up_is_dropped_from_the_queue(
        serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    server = serve(gate=request.node.name, config="max_batch_size: 1")
    with (triton.InferenceServerClient(server.address) as client,
          ThreadPoolExecutor(1) as clients):
        with gate.closed():
            executing = clients.submit(infer, client)
            assert gate.holds(1)
            for client_timeout in GROWING_SECS:
                with pytest.raises(InferenceServerException) as caught:
                    infer(client, client_timeout=client_timeout)
                assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
                assert eventually(lambda: pending(server) == 0)
                if given_up(server):
                    break
            assert eventually(lambda: given_up(server) > 0), "it is counted behind its leaving the queue"
        assert executing.result().all()
        assert executions(server) == 1


def test_a_deadline_that_no_execution_can_meet_is_refused_and_not_executed(
        serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    server = serve(gate=request.node.name)
    with triton.InferenceServerClient(server.address) as client:
        for items in (1, 8):
            server.server.repository.find("m").record_time(items, 10**12)
        with gate.closed(), pytest.raises(InferenceServerException, match="the request was not executed") as caught:
            infer(client, client_timeout=TIMEOUT_SECS)
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        assert infer(client).all(), "who has no deadline is in no hurry"
        assert (executions(server), statistics(server).failures[Failure.REJECTED]) == (1, 1)


@pytest.mark.parametrize("timeouts", [GROWING_SECS, [None]], ids=["deadline", "cancel"])
def test_an_answer_that_nobody_waits_for_any_more_is_no_success(
        serve: Serve, gate: Gate, request: pytest.FixtureRequest, timeouts: Sequence[float | None]) -> None:
    server = serve(gate=request.node.name)
    with triton.InferenceServerClient(server.address) as client:
        tensor = triton.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(ONE)
        calls = []
        with gate.closed():
            for client_timeout in timeouts:
                ended = threading.Event()
                calls.append(client.async_infer("m", [tensor], lambda ended=ended, **_: ended.set(),
                                                client_timeout=client_timeout))
                assert eventually(lambda ended=ended: gate.waiting_items or ended.is_set())
                if client_timeout is None:
                    calls[-1].cancel()
                assert ended.wait(TIMEOUT_SECS)
                if gate.waiting_items:
                    break
            assert eventually(lambda: server.server._inflight.held_bytes == 0), "the server has noticed, too"
            assert eventually(lambda: pending(server) == 0), "and so has the queue"
        assert eventually(lambda: executions(server) == 1)
        counted = statistics(server)
    assert (counted.success.count, counted.inference_count) == (0, 1)
    assert 1 <= counted.failures[Failure.CANCELED] <= len(calls), "those before may have been given up in the queue"


def test_garbage_on_the_ports_harms_nobody(serve: Serve) -> None:
    server = serve()
    with triton.InferenceServerClient(server.address) as client:
        for port in (server.ports.grpc, server.ports.http, server.ports.metrics):
            for garbage in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"", b"x" * 100_000,
                            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(500)):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(garbage)
        for garbage in (b"\xff" * 100, b"\x3a\xff\xff\xff\xff\x0f", b"\x2a\x7f"):
            with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(garbage, timeout=TIMEOUT_SECS)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert infer(client).all()


def test_a_client_that_is_killed_mid_request_takes_nobody_with_it(
        serve: Serve, gate: Gate, request: pytest.FixtureRequest) -> None:
    server = serve(gate=request.node.name)
    message = inference.ModelInferRequest(model_name="m", raw_input_contents=[ONE.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    script = textwrap.dedent(f"""
        import grpc
        call = grpc.insecure_channel("{server.address}").unary_unary("/inference.GRPCInferenceService/ModelInfer")
        calls = [call.future({message.SerializeToString()}) for _ in range(8)]
        calls[0].result()
    """)
    with triton.InferenceServerClient(server.address) as client:
        with gate.closed(), subprocess.Popen([sys.executable, "-c", script]) as killed:
            assert gate.holds(1)
            killed.kill()
        assert infer(client).all()


def test_stopping_under_load_answers_all_that_was_accepted(tmp_path: Path) -> None:
    write_model(tmp_path, "m", max_batch=4, seconds=0.02)
    answered: list[np.ndarray] = []
    refused: list[InferenceServerException] = []
    lost: list[InferenceServerException] = []
    with serving(tmp_path, drain_grace_secs=0.1) as server:
        def ask_until_refused() -> None:
            with triton.InferenceServerClient(server.address) as client:
                while True:
                    try:
                        answered.append(infer(client))
                    except InferenceServerException as error:
                        (refused if error.status() == "StatusCode.UNAVAILABLE" else lost).append(error)
                        return

        clients = [threading.Thread(target=ask_until_refused) for _ in range(8)]
        for client in clients:
            client.start()
        assert eventually(lambda: len(answered) > 20)
        model = server.server.repository.find("m")
        server.stop()
        for client in clients:
            client.join(TIMEOUT_SECS)
    assert (len(refused), lost) == (8, [])
    assert model.statistics.snapshot().success.count == len(answered), "an answer that was computed did not arrive"


def test_stopping_waits_for_no_model_that_is_still_loading(
        tmp_path: Path, gate: Gate, request: pytest.FixtureRequest) -> None:
    write_model(tmp_path, "m", gate=request.node.name)

    async def start_and_stop() -> bool:
        server = Server(options(tmp_path), load_numpy_engine)
        await server.start()
        await asyncio.to_thread(gate.holds, 1)
        return await server.stop()

    with gate.closed():
        assert asyncio.run(start_and_stop())


def test_an_execution_that_does_not_end_is_given_up_and_reported(
        tmp_path: Path, gate: Gate, request: pytest.FixtureRequest) -> None:
    write_model(tmp_path, "m", gate=request.node.name)
    with serving(tmp_path, exit_timeout_secs=0.1) as server, ThreadPoolExecutor(1) as clients:
        with triton.InferenceServerClient(server.address) as client, gate.closed():
            stuck = clients.submit(infer, client)
            assert gate.holds(1)
            assert server.stop() is False
        with pytest.raises(InferenceServerException):
            stuck.result()


def test_readiness_drops_before_requests_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    with (serving(tmp_path, drain_grace_secs=10 * TIMEOUT_SECS) as server,
          triton.InferenceServerClient(server.address) as client):
        assert client.is_server_ready() and page(server, "/v2/health/ready") == 200
        stopping = asyncio.run_coroutine_threadsafe(server.server.stop(), server.loop)
        assert eventually(lambda: not client.is_server_ready())
        assert page(server, "/v2/health/ready") == 503 and page(server, "/v2/health/live") == 200
        assert infer(client).all(), "it still answers those who have not noticed yet"
        stopping.cancel()               # nobody waits for the end of its grace
        server.server._options = replace(server.server._options, drain_grace_secs=0.0)


def test_a_health_watcher_sees_the_server_go_and_does_not_hold_it_up(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_long = 10 * TIMEOUT_SECS
    monkeypatch.setattr("infer_server.listeners.SENDING_SECS", too_long)
    write_model(tmp_path, "m")
    with (serving(tmp_path, exit_timeout_secs=too_long) as server,
          grpc.insecure_channel(server.address) as channel):
        check = channel.unary_unary(f"/{protos.HEALTH_SERVICE}/Check", health.HealthCheckRequest.SerializeToString,
                                    health.HealthCheckResponse.FromString)
        watch = channel.unary_stream(f"/{protos.HEALTH_SERVICE}/Watch", health.HealthCheckRequest.SerializeToString,
                                     health.HealthCheckResponse.FromString)
        assert check(health.HealthCheckRequest()).status == health.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(health.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        seen = watch(health.HealthCheckRequest(service=protos.INFERENCE_SERVICE), timeout=TIMEOUT_SECS)
        assert next(seen).status == health.HealthCheckResponse.SERVING
        server.stop()
        assert next(seen).status == health.HealthCheckResponse.NOT_SERVING


def test_metrics_have_tritons_names_and_count(serve: Serve) -> None:
    server = serve()
    with triton.InferenceServerClient(server.address) as client:
        for _ in range(3):
            infer(client)
        text = scrape(server)
        assert 'nv_inference_request_success{model="m",version="1"} 3\n' in text
        assert 'nv_inference_pending_request_count{model="m",version="1"} 0\n' in text
        assert "# TYPE nv_inference_exec_count counter\n" in text
        for name in ("count", "request_failure", "request_duration_us", "queue_duration_us",
                     "compute_input_duration_us", "compute_infer_duration_us", "compute_output_duration_us"):
            assert f"\nnv_inference_{name}{{" in text


def scrape(server: RunningServer) -> str:
    with urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics", timeout=TIMEOUT_SECS) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text: str = response.read().decode()
    return text


def page(server: RunningServer, path: str) -> int:
    try:
        with urlopen(f"http://127.0.0.1:{server.ports.http}{path}", timeout=TIMEOUT_SECS) as response:
            status: int = response.status
    except HTTPError as error:
        with error:
            status = error.code
    return status
