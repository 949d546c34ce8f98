"""Tests of frontend workers before one engine process, with real processes, sockets and clients.

The tests of endpoints run against them as well.
"""
from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import serialize_byte_tensor

from infer_server.frontend_workers import link
from infer_server.frontend_workers.engine_end import EngineEnd
from infer_server.frontend_workers.link import Frame
from scripts.testing.mute_client import MuteClient
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_grpc import request_of
from tests.infer_server.endpoints.test_serving import eventually, scrape, statistics
from tests.infer_server.frontend_workers.several_workers import SOME, infer, open_calls, waiting, workers_of
from tests.infer_server.serving import WORKERS, RunningServer, serving


@pytest.mark.parametrize("front", WORKERS)
def test_requests_that_come_by_several_workers_are_one_batch(front: str, tmp_path: Path) -> None:
    write_model(tmp_path, "m", gate="workers_of", max_batch=64)
    with serving(tmp_path, grpc_front=front) as server, ThreadPoolExecutor(64) as pool:
        with GATES["workers_of"].closed(), waiting(server, pool, GATES["workers_of"]) as requested:
            assert all(open_calls(server))
            GATES["workers_of"].let_one_through()
            assert GATES["workers_of"].holds(1)
            GATES["workers_of"].let_one_through()
            for number, answer in requested:
                assert (answer.result(TIMEOUT_SECS) == 2 * number + 1).all()
        counters = statistics(server)
        assert (counters.execution_count, counters.inference_count) == (2, len(requested))


@pytest.mark.parametrize("front", WORKERS)
def test_large_tensors_pass_whole(front: str, tmp_path: Path) -> None:
    """The tensors exceed the socket buffers between the processes, in both directions and several at a time."""
    values = 1 << 20
    write_model(tmp_path, "m", kind="echo", shape=[values], max_batch=2)
    with serving(tmp_path, grpc_front=front) as server, ThreadPoolExecutor(8) as pool:
        def over_grpc(seed: int) -> bool:
            x = np.random.default_rng(seed).random((1, values), np.float32)
            with triton.InferenceServerClient(server.address) as client:
                return bool((infer(client, x) == x).all())

        def over_http(seed: int) -> bool:
            x = np.random.default_rng(seed).random((1, values), np.float32)
            tensor = triton_http.InferInput("x", [1, values], "FP32")
            tensor.set_data_from_numpy(x)
            with triton_http.InferenceServerClient(f"127.0.0.1:{server.ports.http}") as client:
                return bool((client.infer("m", [tensor]).as_numpy("y") == x).all())

        assert all(pool.map(lambda seed: (over_grpc, over_http)[seed % 2](seed), range(8)))
        assert eventually(lambda: server.server._inflight.held_bytes == 0)


@pytest.mark.parametrize("front", WORKERS)
def test_what_is_held_is_counted_over_all_workers(front: str, tmp_path: Path) -> None:
    values = 1 << 16
    write_model(tmp_path, "m", gate="held", shape=[values], max_batch=1)
    with (serving(tmp_path, grpc_front=front, max_inflight_bytes=12 * values * SOME) as server,
          ThreadPoolExecutor(4 * SOME) as pool, ExitStack() as stack):
        clients = [stack.enter_context(triton.InferenceServerClient(
            server.address, channel_args=[("grpc.use_local_subchannel_pool", 1)])) for _ in range(4 * SOME)]
        with GATES["held"].closed():
            over_http = pool.submit(urlopen, Request(
                f"http://127.0.0.1:{server.ports.http}/v2/models/m/infer", json.dumps({"inputs": [
                    {"name": "x", "datatype": "FP32", "shape": [1, values], "data": [0] * values}]}).encode()),
                timeout=TIMEOUT_SECS)
            assert eventually(lambda: server.server._inflight.held_bytes > 12 * values), "it, and its answer twice"
            answers = [pool.submit(infer, client, np.ones((1, values), np.float32)) for client in clients]
            assert eventually(lambda: sum(answer.done() for answer in answers) >= 3 * SOME)
        errors = [error for answer in answers if (error := answer.exception(TIMEOUT_SECS))]
        assert {error.status() for error in errors} == {"StatusCode.RESOURCE_EXHAUSTED"}  # type: ignore[attr-defined]
        over_http.result(TIMEOUT_SECS).close()
        assert eventually(lambda: server.server._inflight.held_bytes == 0)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_answers_whose_size_is_not_known_before_are_counted_until_they_are_read(
        server: RunningServer, protocol: str) -> None:
    raw = serialize_byte_tensor(np.array([b"x" * (4 << 20)], np.object_)).item()
    if protocol == "grpc":
        client: Any = MuteClient(server.ports.grpc)
        client.send_request("/inference.GRPCInferenceService/ModelInfer",
                            request_of("text", datatype="BYTES", shape=(1, 1), raw=raw).SerializeToString())
    else:
        head = json.dumps({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1, 1],
                                       "parameters": {"binary_data_size": len(raw)}}],
                           "parameters": {"binary_data_output": True}}).encode()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)        # sockets have no room for the answer
        client.settimeout(TIMEOUT_SECS)
        client.connect(("127.0.0.1", server.ports.http))
        client.sendall(b"POST /v2/models/text/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
                       b"Content-Length: %d\r\n\r\n%b" % (len(head), len(head) + len(raw), head + raw))
    with closing(client):
        assert eventually(lambda: server.server._inflight.held_bytes > 3 * len(raw)), "it, and its answer twice"
    assert eventually(lambda: server.server._inflight.held_bytes == 0)


def test_a_stream_that_is_left_before_it_began_is_forgotten(server: RunningServer) -> None:
    opened = workers_of(server)._workers[0]._end._streams

    async def open_and_leave() -> None:
        opened.received(Frame(link.STREAM, 1, b"", about=b"[]"))
        opened.received(Frame(link.LEFT_STREAM, 1, b""))
        assert len(opened._open) == 1

    server.run(open_and_leave())
    assert eventually(lambda: not opened._open)


def test_a_call_that_is_none_is_unimplemented(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for _ in range(20):
            for method in ("inference.GRPCInferenceService/Nothing",
                           "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):       # without the option
                with pytest.raises(grpc.RpcError) as caught:
                    list(channel.stream_stream(f"/{method}")(iter([b""]), timeout=TIMEOUT_SECS))
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_response_without_a_body_has_the_headers_that_one_process_gives_it(
        server: RunningServer, tmp_path: Path) -> None:
    def headers(running: RunningServer) -> list[tuple[str, str]]:
        with urlopen(f"http://127.0.0.1:{running.ports.http}/v2/health/live", timeout=TIMEOUT_SECS) as response:
            return list(response.getheaders())

    with serving(tmp_path, grpc_front="grpcio") as alone:
        assert headers(server) == headers(alone) != []


def test_metrics_have_each_process_and_the_page_says_how_many_there_are(server: RunningServer, tmp_path: Path) -> None:
    text = scrape(server)
    for family in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        assert [line.split("}")[0] for line in text.splitlines() if line.startswith(f"{family}{{")] == [
            f'{family}{{process="{name}"' for name in ("engines", "front 0", "front 1")]
    with urlopen(f"http://127.0.0.1:{server.ports.http}/status/data.json", timeout=TIMEOUT_SECS) as page:
        assert b'"workers":2,' in page.read()
    with serving(tmp_path) as alone:
        assert "\nprocess_open_fds " in scrape(alone)


def json_bodies() -> Iterator[dict[str, Any]]:
    """Yield valid and invalid JSON requests too large to be forwarded unparsed."""
    x = {"name": "x", "datatype": "FP32", "shape": [2, 512], "data": [i / 8 for i in range(1024)]}
    yield {"inputs": [x]}
    yield {"id": "é", "inputs": [{**x, "data": [x["data"][:512], x["data"][512:]]}], "parameters": {"priority": 0},
           "outputs": [{"name": "y"}]}
    yield {"inputs": [{**x, "parameters": {}}], "outputs": [{"name": "y", "parameters": {"classification": 2}}]}
    for wrong in ({"data": x["data"][1:]}, {"data": [*x["data"][1:], "1"]}, {"data": [*x["data"][1:], [[[1.5]]] * 2]},
                  {"datatype": "INT32"}, {"datatype": "FP23"}, {"datatype": "FP16"}, {"shape": [2, "512"]},
                  {"shape": [-2, -512]}, {"shape": [1, 512]}, {"name": "z"}, {"name": 3}, {"parameters": []},
                  {"parameters": {"binary_data_size": 4}}, {"parameters": {"shared_memory_region": "r"}}):
        yield {"inputs": [{**x, **wrong}]}
    yield {"inputs": [x, x]}
    yield {"inputs": {"x": x}}
    yield {"inputs": [x], "outputs": [{"name": "nothing"}]}


def test_tensors_as_json_are_answered_as_by_one_process_and_read_in_the_front(
        server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "wide", shape=[512])
    handed_on: list[int] = []
    take = EngineEnd.received
    monkeypatch.setattr(EngineEnd, "received", lambda end, frame: (
        handed_on.append(len(frame.payload)) if frame.kind == link.HTTP else None, take(end, frame))[1])
    bodies = [json.dumps(body) for body in json_bodies()]

    def answers(running: RunningServer) -> list[tuple[int, bytes]]:
        actual = []
        with closing(HTTPConnection("127.0.0.1", running.ports.http, timeout=TIMEOUT_SECS)) as connection:
            for body in bodies:
                connection.request("POST", "/v2/models/wide/infer", body)
                response = connection.getresponse()
                actual.append((response.status, response.read()))
        return actual

    with serving(tmp_path, grpc_front="grpcio") as alone:
        expected = answers(alone)
    assert [status for status, _ in expected] == [200] * 3 + [400] * (len(bodies) - 3)
    assert answers(server) == expected
    assert all(size < 4 * 1024 + 300 < len(body) for size, body in zip(handed_on[:3], bodies[:3], strict=True))
