"""Tests of the infer-server command as a process, and of the signals that end it."""
from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from infer_server.cli.serve import _run, main, options_of
from scripts.testing.numpy_engine import TIMEOUT_SECS, write_model
from tests.infer_server.endpoints.test_serving import eventually
from tests.infer_server.serving import RunningServer, serving


def ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@contextmanager
def process(repository: Path, *options: str, environment: Mapping[str, str] = os.environ
            ) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield its process and the address of its gRPC port."""
    command = [sys.executable, "-P", "-m", "infer_server", "infer-server", "--model-repository", str(repository),
               "--grpc-port", "0", "--http-port", "0", "--metrics-port", "0", "--drain-grace-secs", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        try:
            assert running.stderr is not None
            for line in running.stderr:
                if match := re.search(r"gRPC on (\S+),", line):
                    break
            else:
                pytest.fail("it ended before it listened")
            yield running, match[1]
        finally:
            running.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_ends_it_with_success(tmp_path: Path, number: signal.Signals) -> None:
    with process(tmp_path) as (running, address):
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_live()
        running.send_signal(number)
        assert running.wait(TIMEOUT_SECS) == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with process(tmp_path, "--drain-grace-secs", "60") as (running, _):
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        assert any("draining" in line for line in running.stderr)
        running.send_signal(signal.SIGTERM)
        assert running.wait(TIMEOUT_SECS) == 128 + signal.SIGTERM


@pytest.mark.parametrize("taken", ["--grpc-port", "--http-port"])
def test_a_port_that_is_taken_is_named(tmp_path: Path, taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ports = {"--grpc-port": 0, "--http-port": 0, "--metrics-port": 0} | {taken: port}
        done = subprocess.run(
            [sys.executable, "-m", "infer_server", "infer-server", "--model-repository", str(tmp_path),
             *(str(word) for option in ports.items() for word in option)],
            capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


@pytest.mark.parametrize(("option", "value"), [("--grpc-port", "65536"), ("--http-port", "-1"), ("--threads", "0"),
                                               ("--exit-timeout-secs", "-1"), ("--drain-grace-secs", "soon"),
                                               ("--rate-limit-resource", "R1:4:1"), ("--rate-limit-resource", "R1:٤"),
                                               ("--max-message-mib", "2048"), ("--max-message-mib", "many"),
                                               ("--grpc-keepalive-time", "2147483648"),
                                               ("--grpc-max-connection-age", "soon")])
def test_a_number_out_of_range_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str,
                                                value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model-repository", str(tmp_path), f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: '{value}' is not" in capsys.readouterr().err


def test_a_repository_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model-repository", str(tmp_path), "--model-repository", str(tmp_path / "nowhere")]
    for options in ([], ["--exit-on-error"]):
        assert main([*given, *options]) == 2
        assert "nowhere: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_a_repository_that_cannot_be_looked_at_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                        check: list[str]) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name, why in (("n" * 300, "File name too long"), ("a", "Too many levels of symbolic links")):
        assert main(["--model-repository", str(tmp_path / name), *check]) == 2
        assert f"{name}: {why}" in capsys.readouterr().err


@contextmanager
def in_process(repository: Path, *more: str) -> Iterator[RunningServer]:
    """Run a server with the options of a command line on free ports, in this process."""
    running = RunningServer(options_of(["--model-repository", str(repository), "--grpc-port", "0", "--http-port", "0",
                                        "--metrics-port", "0", "--drain-grace-secs", "0", *more]))
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("strict", ["true", "false"])
def test_without_its_repository_it_is_not_live_where_it_is_told_to_go_on(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: str) -> None:
    options = ("--exit-on-error=false", f"--strict-readiness={strict}")
    with in_process(tmp_path / "nowhere", *options) as running:
        assert "nowhere: No such file" in caplog.text
        with triton.InferenceServerClient(running.address) as client:
            assert not client.is_server_live() and not client.is_server_ready()
            assert client.get_server_metadata().name == "infer-server"
            with pytest.raises(InferenceServerException, match="nowhere: No such file"):
                client.get_model_repository_index()


def test_a_repository_that_is_given_twice_is_served_once(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with (in_process(tmp_path, "--model-repository", f"{tmp_path}/../{tmp_path.name}") as running,
          triton.InferenceServerClient(running.address) as client):
        assert eventually(lambda: "has no version" in client.get_model_repository_index().models[0].reason)


def test_options_that_contradict_each_other_are_a_usage_error(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, output in ((["--load-model", "m"], "needs --model-control-mode explicit"),
                            (["--model-control-mode", "explicit", "--load-model=*", "--load-model=m"],
                             "remove the other"),
                            (["--rate-limit-resource=R:4:0", "--rate-limit-resource=R:8"], "given twice")):
        assert main(["--model-repository", str(tmp_path), *options]) == 2
        assert output in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--workers", "2")])
def test_signals_open_the_log_file_anew_and_end_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The signal reaches all processes of the server, as from `kill` of a process group, and also while it drains."""
    file = tmp_path / "log"
    with logged_process(tmp_path / "models", file, *options) as running:
        for number in (signal.SIGHUP, signal.SIGUSR1):
            moved = file.rename(tmp_path / f"log.{number}")
            os.killpg(running.pid, number)
            output = f"{number.name}: the log file was reopened"
            assert eventually(partial(contains, file, output))
            assert "gRPC on" in moved.read_text() or "SIGHUP: " in moved.read_text()
        os.killpg(running.pid, signal.SIGUSR2)
        assert "HTTP/1.1 200 OK" in live(file, tmp_path)
        os.killpg(running.pid, signal.SIGTERM)
        assert eventually(partial(contains, file, "draining"))
        os.killpg(running.pid, signal.SIGHUP)
        assert running.wait(TIMEOUT_SECS) == 0
    assert "stopped" in file.read_text()


def contains(file: Path, text: str) -> bool:
    return file.exists() and text in file.read_text()


@contextmanager
def logged_process(repository: Path, file: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in a process group of its own, with a log file."""
    repository.mkdir()
    command = [sys.executable, "-P", "-m", "infer_server", "infer-server", "--model-repository", str(repository),
               "--log-file", str(file), "--grpc-port", "0", "--http-port", "0", "--metrics-port", "0",
               "--drain-grace-secs", "0.3", *options]
    with subprocess.Popen(command, start_new_session=True) as running:
        try:
            assert eventually(partial(contains, file, "ready"))
            yield running
        finally:
            running.kill()


def live(file: Path, folder: Path) -> str:
    """Return True if the server that logs into these files answers a liveness check."""
    (port,) = {match[1] for log in (file, *folder.glob("log.*"))
               if (match := re.search(r"HTTP on 127.0.0.1:(\d+)", log.read_text()))}
    with socket.create_connection(("127.0.0.1", int(port)), TIMEOUT_SECS) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        return client.recv(1000).decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("options", [(), ("--workers", "2")])
def test_full_devices_of_logs_and_traces_cost_a_line_and_no_request(tmp_path: Path, options: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    write_model(tmp_path, "m")
    command = [
        sys.executable, "-m", "scripts.testing.numpy_server", "--model-repository", str(tmp_path), "--grpc-port", "0",
        "--http-port", str(port), "--metrics-port", "0", "--drain-grace-secs", "0", "--log-file", "/dev/full",
        "--access-log", "json", "--trace-config", "triton,file=/dev/full", "--trace-config", "rate=1",
        "--trace-config", "level=TIMESTAMPS", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert eventually(lambda: is_ready(port))
            body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
            for _ in range(20):
                with urlopen(f"http://127.0.0.1:{port}/v2/models/m/infer", body, TIMEOUT_SECS) as answer:
                    assert answer.status == 200
            running.terminate()
            _, output = running.communicate(timeout=TIMEOUT_SECS)
        finally:
            running.kill()
    assert running.returncode == 0
    assert output.count("\n") == 1 and "--log-file /dev/full: No space left on device" in output, output


def is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=TIMEOUT_SECS) as answer:
            return bool(answer.status == 200)
    except HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


@pytest.mark.parametrize(("exit_on_error", "status"), [("true", 1), ("false", 0)])
def test_a_model_that_cannot_be_loaded_ends_the_server_if_that_is_asked_for(
        tmp_path: Path, exit_on_error: str, status: int) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    with ThreadPoolExecutor(1) as reader, process(tmp_path, "--exit-on-error", exit_on_error) as (running, address):
        log = running.stderr or ()
        output = reader.submit(lambda: any("1 of the models to be served failed: m version 1" in line for line in log))
        assert output.result(TIMEOUT_SECS)
        if not status:
            with triton.InferenceServerClient(address) as client:
                assert client.is_server_live() and not client.is_server_ready()
            running.terminate()
        assert running.wait(TIMEOUT_SECS) == status


@pytest.mark.skipif(not ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::", "[::]"])
def test_it_listens_on_ipv6(tmp_path: Path, host: str) -> None:
    with in_process(tmp_path, "--host", host) as running:
        for name in ["[::1]"] + ["127.0.0.1"] * (host.strip("[]") == "::"):
            with triton.InferenceServerClient(f"{name}:{running.ports.grpc}") as client:
                assert client.is_server_live()


def test_http_listens_on_both_families_as_grpc_does(tmp_path: Path) -> None:
    if not ipv6():
        pytest.skip("this machine has no IPv6")
    with serving(tmp_path, host="::") as server:
        for name in ("[::1]", "127.0.0.1"):
            with urlopen(f"http://{name}:{server.ports.http}/v2/health/live", timeout=TIMEOUT_SECS) as response:
                assert response.status == 200


def test_serving_needs_neither_compiler_nor_calibration() -> None:
    script = "import sys, infer_server.cli.serve, infer_server.engines.runtime.engine; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "infer_server.engines.runtime.engine" in loaded
    assert not set(loaded) & {
        "onnx", "llvmlite", "infer_server.calibration",
        "infer_server.engines.passes", "infer_server.engines.compiler.builder"}


def test_it_serves_on_asyncio_where_uvloop_is_missing(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def on_asyncio() -> bool:
        return type(asyncio.get_running_loop()).__module__.startswith("asyncio.")

    assert not _run(on_asyncio())
    monkeypatch.setitem(sys.modules, "uvloop", None)        # importing it raises ImportError
    assert _run(on_asyncio())
    assert "uvloop is not installed" in caplog.text


def test_options_that_cannot_be_met_are_said_without_a_traceback(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model-repository", str(tmp_path), "--log-file", str(tmp_path / "nowhere" / "log")]
    assert main(given) == 2
    assert "No such file or directory" in capsys.readouterr().err
