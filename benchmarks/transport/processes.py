"""Server in a process on its own core, and the CPU time of the process and its children."""
from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.serving import free_port
from infer_server.server import Ports

_READY_SECS = 60.0


@dataclass(frozen=True)
class Running:
    name: str
    ports: Ports
    pid: int

    def cpu_ns(self) -> tuple[int, int]:
        """Return the CPU time of all threads of the process, and that of its child processes, in nanoseconds."""
        first, *others = (sum(int((task / "schedstat").read_text().split()[0])
                              for task in Path(f"/proc/{pid}/task").iterdir()) for pid in _family(self.pid))
        return first, sum(others)


@contextmanager
def running(name: str, command: str, core: int) -> Iterator[Running]:
    """Run a server on one core until the block ends, with its models ready.

    command: shell command with {grpc}, {http} and {metrics} for the ports.
    """
    ports = Ports(free_port(), free_port(), free_port())
    process = subprocess.Popen(
        command.format(grpc=ports.grpc, http=ports.http, metrics=ports.metrics), shell=True, start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}), stdout=subprocess.DEVNULL)
    try:
        _wait_until_ready(name, ports, process)
        yield Running(name, ports, process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _wait_until_ready(name: str, ports: Ports, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _READY_SECS
    while process.poll() is None and time.monotonic() < end:
        with suppress(URLError, ConnectionError), urlopen(f"http://127.0.0.1:{ports.http}/v2/health/ready"):
            return
        time.sleep(0.1)
    raise SystemExit(f"{name} did not get ready")


def _family(pid: int) -> list[int]:
    """Return the ids of a process and its descendants."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family
