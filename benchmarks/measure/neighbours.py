"""Processes that compete for the cores during a measurement."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BUSY = "while True: pass"
_BURSTS = """
import time
while True:
    end = time.perf_counter() + 7e-4
    while time.perf_counter() < end: pass
    time.sleep(7e-4)
"""
_COPY = """
import sys
from infer_server.engines import load_engine
context = load_engine(sys.argv[1], threads=int(sys.argv[2])).create_context()
context.execute(1)
print("runs", flush=True)
while True: context.execute(1)
"""


@contextmanager
def _running(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            with process:       # closes its pipe and waits for its end
                process.kill()


def _python(program: str, *arguments: object, cpu: int | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE)
    if cpu is not None:
        os.sched_setaffinity(process.pid, {cpu})
    return process


@contextmanager
def busy_loop(pinned: bool) -> Iterator[None]:
    """Run a process that computes continuously, pinned to the last CPU or not pinned."""
    with _running(_python(_BUSY, cpu=max(os.sched_getaffinity(0)) if pinned else None)):
        yield


@contextmanager
def bursts() -> Iterator[None]:
    """Run a process on each CPU that alternates 0.7 ms of work and sleep, so that threads are preempted in a chunk."""
    with _running(*(_python(_BURSTS, cpu=cpu) for cpu in os.sched_getaffinity(0))):
        yield


@contextmanager
def second_copy(plan: Path, threads: int) -> Iterator[None]:
    """Run another process that executes the plan continuously with as many threads."""
    process = _python(_COPY, plan, threads)
    with _running(process):
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"the second copy of {plan} did not start")
        yield
