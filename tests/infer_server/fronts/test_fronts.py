"""Several processes that read and answer, over one that executes: real processes, sockets and clients. What every front
has to do, the tests of endpoints ask of these, too."""
from __future__ import annotations

import asyncio
import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

import infer_server
from infer_server.errors import RepositoryError
from infer_server.fronts import fronts as fronts_of_servers
from infer_server.fronts import link
from infer_server.fronts.engine_end import EngineEnd
from infer_server.fronts.fronts import Fronts
from infer_server.fronts.link import Frame
from infer_server.fronts.ports import Reserved
from infer_server.fronts.settings import FrontSettings
from infer_server.server import Server
from infer_server.workers import in_daemon_thread
from tests.infer_server.cli.test_serve import process
from tests.infer_server.endpoints.test_grpc import request_of
from tests.infer_server.endpoints.test_serving import eventually, scrape, statistics
from tests.infer_server.mute_client import MuteClient
from tests.infer_server.numpy_engine import GATES, TIMEOUT_SECS, Gate, load_numpy_engine, write_model
from tests.infer_server.serving import WORKERS, RunningServer, options, serving

SOME = 8                # clients; that one front has all of their connections happens once in a hundred times


def infer(client: triton.InferenceServerClient, x: np.ndarray, model: str = "m") -> np.ndarray:
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    y: np.ndarray = client.infer(model, [tensor]).as_numpy("y")
    return y


def fronts(server: RunningServer) -> Fronts:
    assert server.server._fronts
    return server.server._fronts


def pids(server: RunningServer) -> set[int]:
    return set(fronts(server).processes().values())


def open_calls(server: RunningServer) -> list[int]:
    """That each front has handed on and waits for."""
    return [len(front._end._infers._answers) for front in fronts(server)._fronts]


@contextmanager
def waiting(server: RunningServer, pool: ThreadPoolExecutor,
            gate: Gate) -> Iterator[list[tuple[float, Future[np.ndarray]]]]:
    """Requests of clients on all fronts, behind the first, which the closed gate holds: the number that each sent, and
    its answer."""
    asked: list[tuple[float, Future[np.ndarray]]] = []
    with ExitStack() as stack:
        while len(asked) < SOME or 0 in open_calls(server):
            # a channel of its own: others share their connections
            client = stack.enter_context(triton.InferenceServerClient(
                server.address, channel_args=[("grpc.use_local_subchannel_pool", 1)]))
            x = np.full((1, 4), len(asked), np.float32)
            asked.append((x[0, 0], pool.submit(infer, client, x)))
            assert eventually(lambda: sum(open_calls(server)) == len(asked))
            assert gate.holds(1)
        yield asked


@pytest.mark.parametrize("front", WORKERS)
def test_requests_that_come_by_several_fronts_are_one_batch(front: str, tmp_path: Path) -> None:
    write_model(tmp_path, "m", gate="fronts", max_batch=64)
    with serving(tmp_path, grpc_front=front) as server, ThreadPoolExecutor(64) as pool:
        with GATES["fronts"].closed(), waiting(server, pool, GATES["fronts"]) as asked:
            assert all(open_calls(server))
            GATES["fronts"].let_one_through()
            assert GATES["fronts"].holds(1)
            GATES["fronts"].let_one_through()
            for number, answer in asked:
                assert (answer.result(TIMEOUT_SECS) == 2 * number + 1).all()
        counters = statistics(server)
        assert (counters.execution_count, counters.inference_count) == (2, len(asked))


@pytest.mark.parametrize("front", WORKERS)
def test_a_front_that_is_killed_takes_its_own_requests_with_it_and_comes_back(front: str, tmp_path: Path) -> None:
    write_model(tmp_path, "m", gate="killed", max_batch=1)
    with serving(tmp_path, grpc_front=front) as server, ThreadPoolExecutor(64) as pool:
        model, before = server.server.repository.find("m"), pids(server)
        with GATES["killed"].closed(), waiting(server, pool, GATES["killed"]) as asked:
            lost, kept = open_calls(server)
            os.kill(fronts(server)._fronts[0].pid, signal.SIGKILL)
            assert eventually(lambda: open_calls(server)[-1] == sum(open_calls(server)) == kept)
            assert eventually(lambda: model.pending in (kept - 1, kept)), "what nobody waits for is not executed"
            for _ in range(kept + 1):
                GATES["killed"].let_one_through()
            errors = [error for _, answer in asked if (error := answer.exception(TIMEOUT_SECS))]
        assert [type(error) for error in errors] == [InferenceServerException] * lost
        assert {error.status() for error in errors} == {"StatusCode.UNAVAILABLE"}
        assert eventually(lambda: sum(model.statistics.snapshot().failures.values()) == lost)
        assert eventually(lambda: len(pids(server)) == 2 and pids(server) != before and not any(open_calls(server)))
        with triton.InferenceServerClient(server.address) as client:
            assert infer(client, np.ones((1, 4), np.float32)).all()


def test_fronts_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    with process(tmp_path, "--workers", "2") as (running, _):
        children = children_of(running.pid)
        assert len(children) == 2
        running.kill()
        assert eventually(lambda: not any(is_alive(child) for child in children))


def children_of(pid: int) -> list[int]:
    """Of whichever of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):         # it has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_is_for_the_process_that_drains_the_fronts(tmp_path: Path, number: signal.Signals) -> None:
    """As a terminal and a service manager send it."""
    write_model(tmp_path, "m", gate="signalled")
    x = np.ones((1, 4), np.float32)
    with (serving(tmp_path, grpc_front=WORKERS[0]) as server, ThreadPoolExecutor(1) as pool,
          triton.InferenceServerClient(server.address) as client):
        before = pids(server)
        with GATES["signalled"].closed():
            asked = pool.submit(infer, client, x)
            assert GATES["signalled"].holds(1)
            for pid in before:
                os.kill(pid, number)
        assert asked.result(TIMEOUT_SECS).all()
        assert infer(client, x).all() and pids(server) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_while_fronts_start_ends_the_server_as_later(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.infer_server.serving", "--model-repository", str(tmp_path),
               "--workers", "2", "--grpc-port", "0", "--http-port", "0", "--metrics-port", "0",
               "--drain-grace-secs", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        try:
            assert eventually(lambda: len(children_of(running.pid)) == 2)
            os.killpg(running.pid, number)
            _, said = running.communicate(timeout=TIMEOUT_SECS)
        finally:
            running.kill()
    assert running.returncode == 0 and "stopped" in said and "Traceback" not in said, said


def test_modules_of_the_folder_that_a_server_is_started_in_are_not_its_fronts(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an installed infer-server is started in any folder."""
    (tmp_path / "json.py").write_text("raise SystemExit('of the folder')")
    monkeypatch.setenv("PYTHONPATH", str(Path(infer_server.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        assert len(pids(server)) == 2


def test_a_front_that_cannot_be_started_for_a_while_comes_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    start, pair = fronts_of_servers._start_process, socket.socketpair
    made: list[socket.socket] = []
    asked: list[int] = []

    def pairs() -> tuple[socket.socket, socket.socket]:
        made.extend(ends := pair())
        return ends

    def fails_twice(descriptor: int) -> subprocess.Popen[bytes]:
        asked.append(descriptor)
        if len(asked) > 2:
            return start(descriptor)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        before = pids(server)
        monkeypatch.setattr(fronts_of_servers, "_PAUSE_SECS", 0.01)
        monkeypatch.setattr(fronts_of_servers, "_start_process", fails_twice)
        monkeypatch.setattr("socket.socketpair", pairs)
        os.kill(fronts(server)._fronts[0].pid, signal.SIGKILL)
        assert eventually(lambda: len(asked) == 3 and all(front._listens() for front in fronts(server)._fronts))
        assert len(pids(server) - before) == 1 and len(pids(server)) == 2
        assert [end.fileno() for end in made[:4]] == [-1] * 4, "of those that were not started"
        assert caplog.text.count("front 0: [Errno 11] Resource temporarily unavailable") == 2


def test_a_front_comes_back_for_which_there_was_no_thread_for_a_while(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[object] = []

    async def fails_twice(function: Callable[[], Any]) -> Any:
        asked.append(function)
        if len(asked) > 2:
            return await in_daemon_thread(function)
        raise RepositoryError("no more threads")

    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        before = pids(server)
        monkeypatch.setattr(fronts_of_servers, "_PAUSE_SECS", 0.01)
        monkeypatch.setattr(fronts_of_servers, "in_daemon_thread", fails_twice)
        os.kill(fronts(server)._fronts[0].pid, signal.SIGKILL)
        assert eventually(lambda: len(asked) >= 3 and all(front._listens() for front in fronts(server)._fronts))
        assert len(pids(server) - before) == 1 and len(pids(server)) == 2
        assert caplog.text.count("front 0: no more threads") == 2


def test_a_front_that_is_closed_as_it_comes_back_is_not_started_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    closing: list[asyncio.Future[None]] = []
    tell = fronts_of_servers._Front._tell

    def tell_and_close(front: fronts_of_servers._Front, reason: str) -> None:
        tell(front, reason)
        if not closing and not reason:
            closing.append(asyncio.ensure_future(front.close(answered=True)))

    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        front = fronts(server)._fronts[0]
        monkeypatch.setattr(fronts_of_servers, "_PAUSE_SECS", 0.01)
        monkeypatch.setattr(front, "_tell", lambda reason: tell_and_close(front, reason))
        os.kill(front.pid, signal.SIGKILL)
        assert eventually(lambda: bool(closing and closing[0].done()))
        assert eventually(lambda: front._watching is not None and front._watching.done())
        assert not is_alive(front.pid) and caplog.text.count("front 0 has ended") == 1


def test_a_front_of_other_code_is_not_started(tmp_path: Path) -> None:
    package = tmp_path / "site" / "infer_server"
    models = tmp_path / "models"
    models.mkdir()
    shutil.copytree(Path(infer_server.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = os.pathsep.join([str(package.parent), *sys.path])
    with process(models, "--workers", "2", environment={"PYTHONPATH": path}) as (running, address):
        first, second = children_of(running.pid)
        with (package / "version.py").open("a") as changed:
            changed.write("# another\n")
        os.kill(first, signal.SIGKILL)
        assert running.stderr is not None
        assert any("is not started again: the code of infer-server has changed" in line for line in running.stderr)
        assert children_of(running.pid) == [second]
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_live()
        running.terminate()
        assert running.wait(TIMEOUT_SECS) == 0


def test_what_a_front_logs_is_logged_once_with_its_level(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m", shape=[1 << 21], kind="echo", max_batch=1)
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1 << 21],
                                   "parameters": {"binary_data_size": 4 << 21}}],
                       "parameters": {"binary_data_output": True}}).encode()
    with (serving(tmp_path, grpc_front=WORKERS[0], send_timeout_secs=0.5) as server,
          socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS) as client):
        client.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
                       b"Content-Length: %d\r\n\r\n%b" % (len(body), len(body) + (4 << 21), body) + bytes(4 << 21))
        assert eventually(lambda: "has not read its answer" in caplog.text)
        (said,) = [record for record in caplog.records if "has not read its answer" in record.getMessage()]
        assert said.levelname == "WARNING" and said.getMessage().startswith("127.0.0.1:")


def test_a_response_without_a_body_has_the_headers_that_one_process_gives_it(tmp_path: Path) -> None:
    def headers(front: str) -> list[tuple[str, str]]:
        with (serving(tmp_path, grpc_front=front) as server,
              urlopen(f"http://127.0.0.1:{server.ports.http}/v2/health/live", timeout=TIMEOUT_SECS) as response):
            return list(response.getheaders())

    assert headers(WORKERS[0]) == headers("grpcio") != []


def test_a_front_that_ends_by_a_bug_says_so(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        end = fronts(server)._fronts[0]._end
        server.loop.call_soon_threadsafe(lambda: end.send(link.FAIL, 1, b"", about=b"no code"))     # as a bug would
        assert eventually(lambda: "front 0 has ended (exit status 1)" in caplog.text)
        assert "invalid literal for int() with base 10: b'no code'" in capfd.readouterr().err


def test_a_stream_that_is_left_before_it_began_is_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        opened = fronts(server)._fronts[0]._end._streams

        async def open_and_leave() -> None:
            opened.received(Frame(link.STREAM, 1, b"", about=b"[]"))
            opened.received(Frame(link.LEFT_STREAM, 1, b""))
            assert len(opened._open) == 1

        server.run(open_and_leave())
        assert eventually(lambda: not opened._open)


@pytest.mark.parametrize("front", WORKERS)
def test_large_tensors_pass_whole(front: str, tmp_path: Path) -> None:
    """More than any buffer of the sockets between the processes, both ways and several at a time."""
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
def test_what_is_held_is_counted_over_all_fronts(front: str, tmp_path: Path) -> None:
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
        assert {error.status() for error in errors} == {"StatusCode.RESOURCE_EXHAUSTED"}        # type: ignore[attr-defined]
        over_http.result(TIMEOUT_SECS).close()
        assert eventually(lambda: server.server._inflight.held_bytes == 0)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_answers_whose_size_is_not_known_before_are_counted_until_they_are_read(tmp_path: Path, protocol: str) -> None:
    write_model(tmp_path, "text", kind="echo", dtype="object", shape=[1], max_batch=1)
    raw = serialize_byte_tensor(np.array([b"x" * (4 << 20)], np.object_)).item()
    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        if protocol == "grpc":
            client: Any = MuteClient(server.ports.grpc)
            client.ask("/inference.GRPCInferenceService/ModelInfer",
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


def test_a_port_of_another_server_is_refused_and_fronts_share_theirs(tmp_path: Path) -> None:
    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        for taken in ({"grpc_port": server.ports.grpc}, {"http_port": server.ports.http}):
            for workers in (1, 2):
                done = subprocess.run(
                    [sys.executable, "-m", "tests.infer_server.serving", "--model-repository", str(tmp_path),
                     "--workers", str(workers), "--metrics-port", "0",
                     "--grpc-port", str(taken.get("grpc_port", 0)), "--http-port", str(taken.get("http_port", 0))],
                    capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False)
                assert done.returncode == 1
                assert f"cannot listen on 127.0.0.1:{next(iter(taken.values()))}" in done.stderr
        with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS):
            assert len(pids(server)) == 2


def test_a_call_that_is_none_is_unimplemented(tmp_path: Path) -> None:
    with serving(tmp_path, grpc_front=WORKERS[0]) as server, grpc.insecure_channel(server.address) as channel:
        for _ in range(20):
            for method in ("inference.GRPCInferenceService/Nothing",
                           "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):       # without the option
                with pytest.raises(grpc.RpcError) as caught:
                    list(channel.stream_stream(f"/{method}")(iter([b""]), timeout=TIMEOUT_SECS))
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_metrics_have_each_process_and_the_page_says_how_many_there_are(tmp_path: Path) -> None:
    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        text = scrape(server)
        for family in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
            assert [line.split("}")[0] for line in text.splitlines() if line.startswith(f"{family}{{")] == [
                f'{family}{{process="{name}"' for name in ("engines", "front 0", "front 1")]
        with urlopen(f"http://127.0.0.1:{server.ports.http}/", timeout=TIMEOUT_SECS) as page:
            assert b"2 workers" in page.read()
    with serving(tmp_path) as server:
        assert "\nprocess_open_fds " in scrape(server)


def test_a_front_knows_of_no_models() -> None:
    code = ("import sys, infer_server.fronts.process\n"
            "print(sorted({name.split('.')[0] for name in sys.modules} & {'engines', 'llvmlite', 'onnx', 'numpy'}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          timeout=TIMEOUT_SECS)
    assert done.stdout == "[]\n"


def test_a_server_whose_fronts_cannot_listen_says_why_and_leaves_none(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        class Taken(Reserved):
            def __init__(self, host: str, port: int) -> None:
                super().__init__(host, port)
                self.port = other.getsockname()[1]

        async def start() -> Fronts | None:
            server = Server(options(tmp_path, workers=2), load_numpy_engine)
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{other.getsockname()[1]}"):
                await server.start()
            await server._listeners.close(answered=True)
            return server._fronts

        monkeypatch.setattr("infer_server.fronts.fronts.Reserved", Taken)
        started = asyncio.run(start())
    assert started and not any(is_alive(pid) for pid in started.processes().values())


def test_a_front_that_listens_as_another_cannot_start_is_not_watched(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    start_one, begin = fronts_of_servers._Front._start, EngineEnd.begin
    begun = asyncio.Event()
    ends: list[EngineEnd] = []

    def begins(end: EngineEnd, settings: FrontSettings) -> None:
        begin(end, settings)
        ends.append(end)
        begun.set()

    async def start() -> list[fronts_of_servers._Front]:
        server = Server(options(tmp_path, workers=2), load_numpy_engine)

        async def fails(front: fronts_of_servers._Front, settings: FrontSettings) -> None:
            if front.name == "front 1":
                return await start_one(front, settings)
            await begun.wait()
            select.select([ends[0]._transport.get_extra_info("socket")], [], [], TIMEOUT_SECS)      # it says so
            raise OSError("nothing goes")

        monkeypatch.setattr(fronts_of_servers._Front, "_start", fails)
        monkeypatch.setattr(EngineEnd, "begin", begins)
        with pytest.raises(OSError, match="nothing goes"):
            await server.start()
        await server._listeners.close(answered=True)
        return server._fronts._fronts                   # type: ignore[union-attr]

    started = asyncio.run(start())
    assert not started[1]._watching and not is_alive(started[1].pid) and "started again" not in caplog.text


def json_bodies() -> Iterator[dict[str, Any]]:
    """Requests of more JSON than is worth handing on as it is: right ones, and one for each thing that may be wrong."""
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
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "m", shape=[512])
    handed_on: list[int] = []
    take = EngineEnd.received
    monkeypatch.setattr(EngineEnd, "received", lambda end, frame: (
        handed_on.append(len(frame.payload)) if frame.kind == link.HTTP else None, take(end, frame))[1])
    bodies = [json.dumps(body) for body in json_bodies()]

    def answers(front: str) -> list[tuple[int, bytes]]:
        with serving(tmp_path, grpc_front=front) as server:
            connection = HTTPConnection("127.0.0.1", server.ports.http, timeout=TIMEOUT_SECS)
            with closing(connection):
                found = []
                for body in bodies:
                    connection.request("POST", "/v2/models/m/infer", body)
                    response = connection.getresponse()
                    found.append((response.status, response.read()))
                return found

    expected = answers("grpcio")
    assert [status for status, _ in expected] == [200] * 3 + [400] * (len(bodies) - 3)
    assert answers(WORKERS[0]) == expected
    assert all(size < 4 * 1024 + 300 < len(body) for size, body in zip(handed_on[:3], bodies[:3], strict=True))
