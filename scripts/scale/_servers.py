"""Three servers of one model repository as child processes, which accidents happen to."""
from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
MODEL = "digits"
START_SECS = 120.0


@dataclass
class Server:
    """An infer-server process with fixed ports."""
    models: Path
    grpc_port: int
    http_port: int
    metrics_port: int
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "infer_server.cli.serve", "--model-repository", str(self.models),
             f"--grpc-port={self.grpc_port}", f"--http-port={self.http_port}", f"--metrics-port={self.metrics_port}",
             *self.options], cwd=ROOT, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_SECS
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server on {self.address} did not become ready")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.http_port}/v2/health/ready"
            with urllib.request.urlopen(url, timeout=1) as answer:
                return bool(answer.status == 200)
        return False

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


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process in ns, all its threads together."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def free_ports(count: int) -> list[int]:
    """Return numbers of ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def servers(count: int, *options: str) -> Iterator[list[Server]]:
    """Start `count` servers of the digits model, and end them afterwards."""
    with TemporaryDirectory() as folder:
        models = Path(folder, "models")
        (models / MODEL / "1").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "demo_data" / "model.onnx", models / MODEL / "1" / "model.onnx")
        running = [Server(models, *free_ports(3), options) for _ in range(count)]
        try:
            for server in running:
                server.start()
            yield running
        finally:
            for server in running:
                server.end()


@contextlib.contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block ends. Raises RuntimeError if it ends by itself."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"{command[0]} ended with status {process.returncode}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
