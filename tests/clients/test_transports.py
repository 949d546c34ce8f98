"""Tests of load-test over each transport to infer-server, and of two transports side by side."""
from __future__ import annotations

import asyncio
import csv
import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.clients.channels import StatusError
from infer_server.clients.errors import ResponseError
from infer_server.clients.load.arguments import parse
from infer_server.clients.load.cli import CANNOT_RUN, FAILED, FINE, main
from infer_server.clients.load.schedule import Closed
from infer_server.clients.load.transports import over_shared_memory, split_url
from infer_server.clients.load.transports.over_grpc import GrpcTransport
from infer_server.clients.load.transports.over_http import HttpTransport
from infer_server.clients.load.transports.over_shared_memory import SharedMemoryTransport
from infer_server.clients.load.transports.transport import MAX_OPEN_DESCRIPTORS, SETUP_SECS, StartedSend
from infer_server.protos import inference as pb
from scripts.testing.numpy_engine import write_model
from tests.clients.channels.peers import Proxy, proxy_to
from tests.infer_server.serving import RunningServer, serving

FAST = ["--duration", "0.2", "--warmup", "0"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "affine")
    write_model(folder, "picky", kind="fails_on_negative")
    with serving(folder, allow_client_shm=True) as running:
        yield running


def urls(server: RunningServer) -> dict[str, str]:
    return {"grpc": server.address, "http": f"http://127.0.0.1:{server.ports.http}", "shm": f"shm://{server.address}"}


@pytest.mark.parametrize("way", ["grpc", "http", "shm"])
def test_every_way_sends_the_data_and_counts_what_fails(server: RunningServer, tmp_path: Path, way: str,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", x=np.array([[1, 2, 3, 4], [5, 6, 7, -8]], np.float32))
    arguments = ["-m", "picky", "-u", urls(server)[way], *FAST,
                 "--input-data", str(tmp_path / "x.npz"), "--json", str(tmp_path / "r.json")]
    assert main(arguments) == FAILED
    (level,) = json.loads((tmp_path / "r.json").read_text())["levels"]
    assert set(level["errors"]) == {"INTERNAL"}     # only the second request fails
    assert abs(level["requests"] - level["errors"]["INTERNAL"]) <= 2 and level["server"]["executions"] > 0
    assert "a negative value" in capsys.readouterr().out
    assert main(["-m", "nobody", "-u", urls(server)[way]]) == CANNOT_RUN
    assert "nobody" in capsys.readouterr().err


def test_two_ways_are_measured_under_the_same_loads_and_compared(
        server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    http, shm = urls(server)["http"], urls(server)["shm"]
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "csv", "plot")}
    assert main(["-m", "affine", "-u", http, "--against", shm, *FAST, "--concurrency", "2",
                 *(part for kind, path in files.items() for part in (f"--{kind}", str(path)))]) == FINE
    assert f"A: {http}, B: {shm}" in capsys.readouterr().out
    first = json.loads(files["json"].read_text())
    assert [len(each["levels"]) for each in (first, first["against"])] == [1, 1]
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [(row["url"], row["concurrency"]) for row in rows] == [(http, "2"), (shm, "2")]
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[SharedMemory]:
    """Return a list that collects the shared-memory regions which this process makes from here on."""
    created: list[SharedMemory] = []

    def make(*arguments: object) -> SharedMemory:
        created.append(SharedMemory(*arguments))    # type: ignore[arg-type]
        return created[-1]

    monkeypatch.setattr(over_shared_memory, "SharedMemory", make)
    return created


def are_gone(regions: list[SharedMemory]) -> bool:
    return not any(Path("/dev/shm", region.name).exists() for region in regions)


def test_shared_memory_is_asked_for_where_tensors_lie_and_given_back(
        server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, regions: list[SharedMemory]) -> None:
    seen: list[bytes] = []
    monkeypatch.setattr(SharedMemory, "unlink", lambda region, unlink=SharedMemory.unlink: (
        seen.append(Path("/dev/shm", region.name).read_bytes()), unlink(region)))
    np.savez(tmp_path / "x.npz", x=np.array([[1, 2, 3, 4]], np.float32))
    assert main(["-m", "affine", "-u", urls(server)["shm"], *FAST, "--input-data", str(tmp_path / "x.npz")]) == FINE
    assert [np.frombuffer(region[:16], np.float32).tolist() for region in seen] == [[1, 2, 3, 4], [3, 5, 7, 9]]
    assert regions and are_gone(regions)
    with triton.InferenceServerClient(server.address) as client:
        assert not client.get_system_shared_memory_status().regions


def test_a_name_that_grpc_resolves_is_an_address() -> None:
    for scheme, name in (("grpc", "unix:/run/s.sock"), ("grpc", "unix:///run/s.sock"), ("grpc", "dns:///localhost:8001"),
                         ("shm", "unix:///run/s.sock")):
        url = name if scheme == "grpc" else f"{scheme}://{name}"
        assert split_url(parse(["-m", "m", "-u", url]).url) == (scheme, name)


def test_a_region_that_cannot_be_made_is_a_failed_request_in_a_load_and_an_error_before_it(
        server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, regions: list[SharedMemory],
        capsys: pytest.CaptureFixture[str]) -> None:
    full, allocated = OSError(errno.ENOSPC, "No space left"), []

    def allocate(*_: int) -> None:
        allocated.append(1)
        if len(allocated) > room:
            raise full

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    room = 2                                                # two regions: for inputs, and for the trial's outputs
    assert main(["-m", "affine", "-u", urls(server)["shm"], *FAST, "--concurrency", "2", "--json",
                 str(tmp_path / "r.json")]) == FAILED
    (level,) = json.loads((tmp_path / "r.json").read_text())["levels"]
    assert level["errors"]["RESOURCE_EXHAUSTED"] > 0
    room = 0
    allocated.clear()
    assert main(["-m", "affine", "-u", urls(server)["shm"], *FAST]) == CANNOT_RUN
    assert "shared memory: No space left" in capsys.readouterr().err
    assert regions and are_gone(regions)


def test_a_model_that_fails_or_answers_without_bytes_is_told_apart_when_regions_are_sized(
        monkeypatch: pytest.MonkeyPatch) -> None:
    async def sizes() -> dict[str, int]:
        return await SharedMemoryTransport("localhost:1")._sizes(pb.ModelInferRequest())

    async def fails(*_: object) -> bytes:
        raise StatusError("INTERNAL", "told to")

    async def no_bytes(*_: object) -> bytes:
        return pb.ModelInferResponse(outputs=[pb.ModelInferResponse.InferOutputTensor(name="y")]).SerializeToString()

    monkeypatch.setattr(SharedMemoryTransport, "infer", fails)
    assert asyncio.run(sizes()) == {}
    monkeypatch.setattr(SharedMemoryTransport, "infer", no_bytes)
    with pytest.raises(ResponseError, match="no bytes for each output"):
        asyncio.run(sizes())


@pytest.mark.parametrize("way", ["http", "shm"])
def test_more_in_flight_than_a_way_can_have_is_refused(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{way}://localhost:8000"
    assert parse(["-m", "m", "-u", url, "--concurrency", "512"]).loads == (Closed(512),)
    assert parse(["-m", "m", "--concurrency", "513"]).loads == (Closed(513),)
    with pytest.raises(SystemExit):
        parse(["-m", "m", "--against", url, "--concurrency", "1,513"])
    assert "at most 512" in capsys.readouterr().err


def test_statistics_do_not_wait_for_the_requests_of_the_load(server: RunningServer) -> None:
    async def reads_while_all_slots_are_taken() -> int:
        transport = HttpTransport(urls(server)["http"].removeprefix("http://"))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(transport.close)
            for _ in range(MAX_OPEN_DESCRIPTORS):
                await stack.enter_async_context(transport.slots.one(SETUP_SECS))
            return len(await transport.statistics("affine", ""))

    assert asyncio.run(reads_while_all_slots_are_taken()) == 1


@pytest.mark.parametrize(
    "url", ["localhost", "ftp://localhost:21", "localhost:http", "http://unix:/run/s.sock", "a:1,b:2"])
def test_an_address_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["-m", "m", "-u", url])
    assert refused.value.code == CANNOT_RUN and "is not HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b'{"inputs": 5}', b"5", b"<html>", b'[{"inputs": 5}]'])
def test_an_answer_that_is_not_the_protocols_is_said_without_a_traceback(
        body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    class Another(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Another) as another, ThreadPoolExecutor(1) as pool:
        serves = pool.submit(another.serve_forever, 0.01)
        try:
            assert main(["-m", "m", "-u", f"http://127.0.0.1:{another.server_port}"]) == CANNOT_RUN
        finally:
            another.shutdown()
            serves.result()
    assert "GET /v2/models/m: the answer is not the protocol's JSON" in capsys.readouterr().err


def test_requests_without_a_coroutine_need_a_connection_and_end_with_it(server: RunningServer) -> None:
    async def run(url: str, proxy: Proxy) -> None:
        loop, transport = asyncio.get_running_loop(), GrpcTransport(url)
        (send,) = await transport.prepare("affine", "", [{"x": np.ones((1, 4), np.float32)}])
        assert isinstance(send, StartedSend)
        for _ in range(2):
            assert not send.start(SETUP_SECS, lambda error: None), "there is no connection yet, or any more"
            assert await send(SETUP_SECS), "it is opened by a coroutine"
            ends: list[asyncio.Future[StatusError | None]] = [loop.create_future() for _ in range(20)]
            assert all(send.start(SETUP_SECS, end.set_result) for end in ends)
            assert await asyncio.gather(*ends) == [None] * 20
            late: asyncio.Future[StatusError | None] = loop.create_future()
            assert send.start(0.0, late.set_result)
            assert (error := await late) and error.status == "DEADLINE_EXCEEDED"
            proxy.cut()
            async with asyncio.timeout(SETUP_SECS):
                while send.start(SETUP_SECS, lambda error: None):       # until the end of the connection is noticed
                    await asyncio.sleep(0.01)
        await transport.close()

    with proxy_to(server.address) as (url, proxy):
        asyncio.run(run(url, proxy))
