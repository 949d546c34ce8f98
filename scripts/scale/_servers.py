"""Three servers of one model repository as child processes, for checks that stop and restart them."""
from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.scale._process import ROOT, ServerProcess

MODEL = "digits"


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process in ns, all its threads together."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


@contextlib.contextmanager
def servers(count: int, *options: str) -> Iterator[list[ServerProcess]]:
    """Start `count` servers of the digits model, and end them afterwards."""
    with TemporaryDirectory() as folder:
        models = Path(folder, "models")
        (models / MODEL / "1").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "demo_data" / "model.onnx", models / MODEL / "1" / "model.onnx")
        running = [ServerProcess(str(models), Path(folder, f"log{number}"), *options) for number in range(count)]
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
