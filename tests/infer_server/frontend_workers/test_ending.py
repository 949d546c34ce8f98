"""Frontend workers end with their server and no earlier; a worker that fails is reported."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from infer_server.frontend_workers import link
from scripts.testing.numpy_engine import GATES, TIMEOUT_SECS, write_model
from tests.infer_server.cli.test_serve import process
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.frontend_workers.several_workers import children_of, infer, is_alive, pids, workers_of
from tests.infer_server.serving import WORKERS, RunningServer, serving


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    with process(tmp_path, "--workers", "2") as (running, _):
        children = children_of(running.pid)
        assert len(children) == 2
        running.kill()
        assert eventually(lambda: not any(is_alive(child) for child in children))


@pytest.mark.parametrize("number", [
    signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_all_is_for_the_process_that_drains_the_workers(
        server: RunningServer, number: signal.Signals) -> None:
    """Terminals and service managers send signals to the whole process group."""
    x = np.ones((1, 4), np.float32)
    with ThreadPoolExecutor(1) as pool, triton.InferenceServerClient(server.address) as client:
        before = pids(server)
        with GATES["signalled"].closed():
            requested = pool.submit(infer, client, x)
            assert GATES["signalled"].holds(1)
            for pid in before:
                os.kill(pid, number)
        assert requested.result(TIMEOUT_SECS).all()
        assert infer(client, x).all() and pids(server) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_while_workers_start_ends_the_server_as_later(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "scripts.testing.numpy_server", "--model-repository", str(tmp_path),
               "--workers", "2", "--grpc-port", "0", "--http-port", "0", "--metrics-port", "0",
               "--drain-grace-secs", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        try:
            assert eventually(lambda: len(children_of(running.pid)) == 2)
            os.killpg(running.pid, number)
            _, output = running.communicate(timeout=TIMEOUT_SECS)
        finally:
            running.kill()
    assert running.returncode == 0 and "stopped" in output and "Traceback" not in output, output


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
        (output,) = [record for record in caplog.records if "has not read its answer" in record.getMessage()]
        assert output.levelname == "WARNING" and output.getMessage().startswith("127.0.0.1:")


def test_a_worker_that_ends_by_a_bug_says_so(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, grpc_front=WORKERS[0]) as server:
        end = workers_of(server)._workers[0]._end
        server.loop.call_soon_threadsafe(lambda: end.send(link.FAIL, 1, b"", about=b"no code"))     # as a bug would
        assert eventually(lambda: "front 0 has ended (exit status 1)" in caplog.text)
        assert "invalid literal for int() with base 10: b'no code'" in capfd.readouterr().err
