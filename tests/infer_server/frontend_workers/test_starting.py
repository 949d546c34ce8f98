"""Frontend workers start all together or not at all, and restart after they end."""
from __future__ import annotations

import asyncio
import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import infer_server
from infer_server.errors import RepositoryError
from infer_server.frontend_workers import supervisor
from infer_server.frontend_workers.engine_end import EngineEnd
from infer_server.frontend_workers.ports import Reserved
from infer_server.frontend_workers.settings import WorkerSettings
from infer_server.frontend_workers.supervisor import FrontendWorkers
from infer_server.server import Server
from infer_server.workers import in_daemon_thread
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, load_numpy_engine, write_model
from tests.infer_server.cli.test_serve import process
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.frontend_workers.several_workers import (
    children_of,
    infer,
    is_alive,
    open_calls,
    pids,
    waiting,
    workers_of,
)
from tests.infer_server.serving import WORKERS, options, serving


def test_modules_of_the_folder_that_a_server_is_started_in_are_not_its_workers(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed infer-server may be started in a folder with modules of the same names."""
    (tmp_path / "json.py").write_text("raise SystemExit('of the folder')")
    monkeypatch.setenv("PYTHONPATH", str(Path(infer_server.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        assert len(pids(server)) == 2


def test_a_front_of_other_code_is_not_started(tmp_path: Path) -> None:
    package = tmp_path / "site" / "infer_server"
    models = tmp_path / "models"
    models.mkdir()
    shutil.copytree(Path(infer_server.__file__).parent, package)        # with its bytecode
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


def test_a_front_knows_of_no_models() -> None:
    code = ("import sys, infer_server.frontend_workers.process\n"
            "print(sorted({'infer_server.engines', 'llvmlite', 'onnx', 'numpy'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          timeout=TIMEOUT_SECS)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("front", WORKERS)
def test_a_worker_that_is_killed_takes_its_own_requests_with_it_and_comes_back(
        front: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_PAUSE_SECS", 0.01)
    write_model(tmp_path, "m", gate="killed", max_batch=1)
    with serving(tmp_path, grpc_front=front) as server, ThreadPoolExecutor(64) as pool:
        model, before = server.server.repository.find("m"), pids(server)
        with GATES["killed"].closed(), waiting(server, pool, GATES["killed"]) as requested:
            lost, kept = open_calls(server)
            os.kill(workers_of(server)._workers[0].pid, signal.SIGKILL)
            assert eventually(lambda: open_calls(server)[-1] == sum(open_calls(server)) == kept)
            assert eventually(lambda: model.pending in (kept - 1, kept)), "what nobody waits for is not executed"
            for _ in range(kept + 1):
                GATES["killed"].let_one_through()
            errors = [error for _, answer in requested if (error := answer.exception(TIMEOUT_SECS))]
        assert [type(error) for error in errors] == [InferenceServerException] * lost
        assert {error.status() for error in errors} == {"StatusCode.UNAVAILABLE"}
        assert eventually(lambda: sum(model.statistics.snapshot().failures.values()) == lost)
        assert eventually(lambda: len(pids(server)) == 2 and pids(server) != before and not any(open_calls(server)))
        with triton.InferenceServerClient(server.address) as client:
            assert infer(client, np.ones((1, 4), np.float32)).all()


def test_a_worker_that_cannot_be_started_for_a_while_comes_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    start, pair = supervisor._start_process, socket.socketpair
    created: list[socket.socket] = []
    calls: list[int] = []

    def pairs() -> tuple[socket.socket, socket.socket]:
        created.extend(ends := pair())
        return ends

    def fails_twice(descriptor: int) -> subprocess.Popen[bytes]:
        calls.append(descriptor)
        if len(calls) > 2:
            return start(descriptor)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        before = pids(server)
        monkeypatch.setattr(supervisor, "_PAUSE_SECS", 0.01)
        monkeypatch.setattr(supervisor, "_start_process", fails_twice)
        monkeypatch.setattr("socket.socketpair", pairs)
        os.kill(workers_of(server)._workers[0].pid, signal.SIGKILL)
        assert eventually(lambda: len(calls) == 3 and all(worker._listens() for worker in workers_of(server)._workers))
        assert len(pids(server) - before) == 1 and len(pids(server)) == 2
        assert [end.fileno() for end in created[:4]] == [-1] * 4, "of those that were not started"
        assert caplog.text.count("front 0: [Errno 11] Resource temporarily unavailable") == 2


def test_a_front_comes_back_for_which_there_was_no_thread_for_a_while(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[object] = []

    async def fails_twice(function: Callable[[], Any]) -> Any:
        calls.append(function)
        if len(calls) > 2:
            return await in_daemon_thread(function)
        raise RepositoryError("no more threads")

    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        before = pids(server)
        monkeypatch.setattr(supervisor, "_PAUSE_SECS", 0.01)
        monkeypatch.setattr(supervisor, "in_daemon_thread", fails_twice)
        os.kill(workers_of(server)._workers[0].pid, signal.SIGKILL)
        assert eventually(lambda: len(calls) >= 3 and all(worker._listens() for worker in workers_of(server)._workers))
        assert len(pids(server) - before) == 1 and len(pids(server)) == 2
        assert caplog.text.count("front 0: no more threads") == 2


def test_a_worker_that_is_closed_as_it_comes_back_is_not_started_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    closing: list[asyncio.Future[None]] = []
    set_started = supervisor._FrontendWorker._set_started

    def set_started_and_close(worker: supervisor._FrontendWorker, reason: str) -> None:
        set_started(worker, reason)
        if not closing and not reason:
            closing.append(asyncio.ensure_future(worker.close(answered=True)))

    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        worker = workers_of(server)._workers[0]
        monkeypatch.setattr(supervisor, "_PAUSE_SECS", 0.01)
        monkeypatch.setattr(worker, "_set_started", lambda reason: set_started_and_close(worker, reason))
        os.kill(worker.pid, signal.SIGKILL)
        assert eventually(lambda: bool(closing and closing[0].done()))
        assert eventually(lambda: worker._watching is not None and worker._watching.done())
        assert not is_alive(worker.pid) and caplog.text.count("front 0 has ended") == 1


def test_a_port_of_another_server_is_refused_and_workers_share_theirs(tmp_path: Path) -> None:
    async def start(workers: int, **ports: int) -> None:
        started = Server(replace(options(tmp_path, workers=workers), **ports), load_numpy_engine)
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{next(iter(ports.values()))}"):
            await started.start()
        await started._listeners.close(answered=True)

    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        for workers in (1, 2):
            asyncio.run(start(workers, grpc_port=server.ports.grpc))
            asyncio.run(start(workers, http_port=server.ports.http))
        with socket.create_connection(("127.0.0.1", server.ports.http), TIMEOUT_SECS):
            assert len(pids(server)) == 2
        done = subprocess.run(
            [sys.executable, "-m", "scripts.testing.numpy_server", "--model-repository", str(tmp_path),
             "--workers", "2", "--metrics-port", "0", "--http-port", "0", "--grpc-port", str(server.ports.grpc)],
            capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False)
    assert done.returncode == 1 and f"cannot listen on {server.address}" in done.stderr


def test_a_server_whose_workers_cannot_listen_says_why_and_leaves_none(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        class Taken(Reserved):
            def __init__(self, host: str, port: int) -> None:
                super().__init__(host, port)
                self.port = other.getsockname()[1]

        async def start() -> FrontendWorkers | None:
            server = Server(options(tmp_path, workers=2), load_numpy_engine)
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{other.getsockname()[1]}"):
                await server.start()
            await server._listeners.close(answered=True)
            return server._workers

        monkeypatch.setattr("infer_server.frontend_workers.ports.Reserved", Taken)
        started = asyncio.run(start())
    assert started and not any(is_alive(pid) for pid in started.processes().values())


def test_a_worker_that_listens_as_another_cannot_start_is_not_watched(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    start_one, begin = supervisor._FrontendWorker._start, EngineEnd.begin
    begun = asyncio.Event()
    ends: list[EngineEnd] = []

    def begins(end: EngineEnd, settings: WorkerSettings) -> None:
        begin(end, settings)
        ends.append(end)
        begun.set()

    async def start() -> list[supervisor._FrontendWorker]:
        server = Server(options(tmp_path, workers=2), load_numpy_engine)

        async def fails(worker: supervisor._FrontendWorker, settings: WorkerSettings) -> None:
            if worker.name == "front 1":
                return await start_one(worker, settings)
            await begun.wait()
            select.select([ends[0]._transport.get_extra_info("socket")], [], [], TIMEOUT_SECS)      # it says so
            raise OSError("nothing goes")

        monkeypatch.setattr(supervisor._FrontendWorker, "_start", fails)
        monkeypatch.setattr(EngineEnd, "begin", begins)
        with pytest.raises(OSError, match="nothing goes"):
            await server.start()
        await server._listeners.close(answered=True)
        return server._workers._workers                   # type: ignore[union-attr]

    started = asyncio.run(start())
    assert not started[1]._watching and not is_alive(started[1].pid) and "started again" not in caplog.text
