"""Servers as child processes with fixed ports, whose logs are kept."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[2]
START_SECS = 300.0
_POLL_SECS = 0.05


def free_ports(count: int) -> list[int]:
    """Return numbers of free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


class ServerProcess:
    """infer-server as a child process. It keeps its ports when it is started again."""

    def __init__(self, models: str, log: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        """Serve a repository, a folder or an address; the process is started by start()."""
        self.grpc_port, self.http_port, self.metrics_port = free_ports(3)
        self._log, self._environment = log, {**os.environ, **(environment or {})}
        self._command = [sys.executable, "-m", "infer_server.cli.serve", "--model-repository", models,
                         "--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port),
                         "--metrics-port", str(self.metrics_port), *options]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def start(self, *options: str) -> float:
        """Start the process and return the seconds until it is ready."""
        began = time.monotonic()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*self._command, *options], cwd=ROOT, env=self._environment, stderr=log)
        while self.status("/v2/health/ready") != 200:
            if self.process.poll() is not None or time.monotonic() - began > START_SECS:
                raise RuntimeError(f"the server on {self.address} did not become ready:\n{self.log()[-2000:]}")
            time.sleep(_POLL_SECS)
        return time.monotonic() - began

    def status(self, path: str) -> int:
        """Return the status of a path of the metrics port; 0 if no server listens."""
        try:
            with urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=5) as response:
                return int(response.status)
        except HTTPError as error:
            return error.code
        except OSError:
            return 0

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a metric."""
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process
        self.process.send_signal(number)

    def wait(self) -> int:
        """Return the exit status of the process once it has ended."""
        assert self.process
        return self.process.wait(START_SECS)

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def terminate(self) -> int:
        """End the process by SIGTERM, if it runs, and return its exit status."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
