"""Demonstrate everything on real data: build, measure, serve, query and load-test a digit classifier.

Each step prints and runs the installed command that a user would type. Every result is checked, so this is also a test
of the installation; it exits with 0 if all checks pass.
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray

from infer_server import load_engine
from infer_server.engines.errors import EngineError
from infer_server.engines.preprocess import load_preprocess

DATA = Path(os.path.relpath(Path(__file__).parent / "demo_data"))        # relative, as in a user's command
MODEL, INPUT, OUTPUT = "digits", "image", "logits"
MAX_BATCH = 32
CLIENTS = 32
CONCURRENCY = (1, 8, 32)

# Limits that a correct build meets with a wide margin.
MIN_TOP1 = 0.97
MAX_INT8_LOSS = 0.01

Array = NDArray[Any]


class DemoError(Exception):
    """A step failed; the message names it and has its output."""


@dataclass(frozen=True)
class Measured:
    """Images per second of an engine on one thread: `single` at batch 1, `batched` at MAX_BATCH."""
    build_s: float
    size_bytes: int
    logits: Array               # float32 [test images, 10]
    top1: float
    single: float
    single_p50_ms: float
    batched: float


def tool(name: str) -> str:
    """Return the path of a console script: next to this Python, else on PATH."""
    installed = Path(sys.executable).with_name(name)
    path = str(installed) if installed.exists() else shutil.which(name)
    if path is None:
        raise DemoError(f"{name} is not installed; run scripts/demo, which installs it")
    return path


def run(*command: str | Path | float) -> str:
    """Print and run an installed command, and return its standard output. Raises DemoError if it fails."""
    arguments = [str(word) for word in command]
    print(f"$ {shlex.join(arguments)}", flush=True)
    done = subprocess.run([tool(arguments[0]), *arguments[1:]], capture_output=True, text=True)
    if done.returncode:
        raise DemoError(f"{arguments[0]} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def test_images() -> tuple[Array, Array]:
    """Return images float32 [n, 1, 28, 28] and labels int64 [n], from files named LABEL-INDEX.png."""
    paths = sorted((DATA / "test").glob("*.png"))
    preprocess = load_preprocess(DATA / "preprocess.toml")
    images = np.concatenate([preprocess.apply(path, ["N", 1, 28, 28]) for path in paths])
    return images, np.array([int(path.name.split("-")[0]) for path in paths])


def build_and_measure(precision: str, plan: Path, images: Array, labels: Array, seconds: float) -> Measured:
    options: list[str | Path] = [f"--{precision}"]
    if precision == "int8":
        options += ["--calib", DATA / "calibration", "--preprocess", DATA / "preprocess.toml"]
    began = time.monotonic()
    run("build-engine", DATA / "model.onnx", "-o", plan, *options, "--max-batch", MAX_BATCH, "--no-cache")
    build_s = time.monotonic() - began
    logits = load_engine(plan, threads=1).run({INPUT: images})[OUTPUT]
    speed = ["run-engine", plan, "--threads", 1, "--seconds", seconds, "--json", "--batch"]
    single, batched = (json.loads(run(*speed, batch)) for batch in (1, MAX_BATCH))
    return Measured(build_s, plan.stat().st_size, logits, float((logits.argmax(1) == labels).mean()),
                    single["throughput"], single["latency_ms"]["p50"], batched["throughput"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(repository: Path, log: Path) -> Iterator[str]:
    """Run an infer-server and yield its address; it must exit with 0 when it is stopped."""
    grpc_port, http_port, metrics_port = (free_port() for _ in range(3))
    command = ["infer-server", "--model-repository", str(repository), "--grpc-port", str(grpc_port),
               "--http-port", str(http_port), "--metrics-port", str(metrics_port)]
    print(f"$ {shlex.join(command)}", flush=True)
    with log.open("w") as output:
        process = subprocess.Popen([tool(command[0]), *command[1:]], stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(process, f"127.0.0.1:{grpc_port}", log)
        yield f"127.0.0.1:{grpc_port}"
        process.send_signal(signal.SIGTERM)
        if status := process.wait(timeout=30):
            raise DemoError(f"infer-server exited with {status} after SIGTERM:\n{log.read_text()}")
    finally:
        process.kill()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    with triton.InferenceServerClient(address) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise DemoError(f"infer-server exited with {process.returncode}:\n{log.read_text()}")
            try:
                if client.is_model_ready(MODEL):
                    return
            except triton.InferenceServerException:
                # The server does not listen yet: retry until the deadline.
                time.sleep(0.1)
            else:
                time.sleep(0.1)
    raise DemoError(f"infer-server was not ready after {limit_s:.0f} s:\n{log.read_text()}")


def query(address: str, images: Array) -> tuple[Array, float]:
    """Return the logits of single-image requests from CLIENTS concurrent clients, and the mean batch size."""
    answers = np.empty((len(images), 10), np.float32)

    def one_client(index: Array) -> None:
        with triton.InferenceServerClient(address) as client:
            for i in index:
                tensor = triton.InferInput(INPUT, [1, *images.shape[1:]], "FP32")
                tensor.set_data_from_numpy(images[i : i + 1])
                answers[i] = client.infer(MODEL, [tensor]).as_numpy(OUTPUT)[0]

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one_client, np.array_split(np.arange(len(images)), CLIENTS)))
    with triton.InferenceServerClient(address) as client:
        statistics = client.get_inference_statistics(MODEL).model_stats[0]
    return answers, statistics.inference_count / statistics.execution_count


def check(holds: bool, message: str) -> None:
    if not holds:
        raise DemoError(message)


def table(rows: list[tuple[str, ...]]) -> str:
    """Align rows in columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    lines = ("  ".join(cell.rjust(width) if column else cell.ljust(width)
                       for column, (cell, width) in enumerate(zip(row, widths, strict=False))) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def summary(engines: dict[str, Measured], mean_batch: float, load: list[dict[str, Any]]) -> str:
    fp32, int8 = engines["fp32"], engines["int8"]
    agreement = float((fp32.logits.argmax(1) == int8.logits.argmax(1)).mean())

    def row(label: str, text: Callable[[Measured], str], ratio: float | None = None) -> tuple[str, ...]:
        return label, text(fp32), text(int8), "" if ratio is None else f"{ratio:.2f}x"

    rows: list[tuple[str, ...]] = [
        ("digits, one thread", "fp32", "INT8", "INT8/fp32"),
        row("build, s", lambda m: f"{m.build_s:.1f}"),
        row("plan, kB", lambda m: f"{m.size_bytes / 1e3:.0f}", int8.size_bytes / fp32.size_bytes),
        row(f"top-1 on {len(fp32.logits)} held-out images", lambda m: f"{m.top1:.1%}"),
        ("  same answer as fp32", "", f"{agreement:.1%}"),
        row("images/s, batch 1", lambda m: f"{m.single:,.0f}", int8.single / fp32.single),
        row("p50 latency, batch 1, ms", lambda m: f"{m.single_p50_ms:.3f}", int8.single_p50_ms / fp32.single_p50_ms),
        row(f"images/s, batch {MAX_BATCH}", lambda m: f"{m.batched:,.0f}", int8.batched / fp32.batched),
    ]
    rows += [(f"served images/s, {level['concurrency']} in flight", "", f"{level['throughput']:,.0f}",
              f"p99 {level['latency_ms']['p99']:.1f} ms") for level in load]
    rows.append((f"mean batch of {CLIENTS} tritonclients", "", f"{mean_batch:.1f}"))
    return table(rows)


def demo(work: Path, results: Path, seconds: float) -> str:
    """Run the demo and return its summary. Raises DemoError at the first step that fails."""
    images, labels = test_images()
    repository = work / "models"
    version = repository / MODEL / "1"          # no config.pbtxt: the server completes it from the plan
    version.mkdir(parents=True)

    engines = {precision: build_and_measure(precision, plan, images, labels, seconds)
               for precision, plan in (("fp32", work / "fp32.plan"), ("int8", version / "model.plan"))}
    check(engines["fp32"].top1 >= MIN_TOP1, f"fp32 top-1 is {engines['fp32'].top1:.1%}, below {MIN_TOP1:.0%}")
    check(engines["int8"].top1 >= engines["fp32"].top1 - MAX_INT8_LOSS,
          f"INT8 top-1 is {engines['int8'].top1:.1%}, fp32 {engines['fp32'].top1:.1%}")

    with server(repository, results / "server.log") as address:
        print(f"{len(images)} requests of one image from {CLIENTS} concurrent tritonclients", flush=True)
        answers, mean_batch = query(address, images)
        differ = int((np.abs(answers - engines["int8"].logits).max(1) > 1e-4).sum())
        check(differ == 0, f"{differ} of {len(images)} served answers differ from the engine's own")
        report = results / "load-test.json"
        print(run("load-test", "-m", MODEL, "-u", address, "--concurrency", ",".join(map(str, CONCURRENCY)),
                  "--duration", seconds, "--warmup", min(1.0, seconds), "--json", report,
                  "--plot", results / "load-test.png"))
        load = json.loads(report.read_text())["levels"]
    return summary(engines, mean_batch, load)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement (default: 3)")
    parser.add_argument("--results", type=Path, default=Path("demo-results"),
                        help="folder for the load test's and the server's output")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="infer-server-demo-") as work:
            text = demo(Path(work), arguments.results, arguments.seconds)
    except (DemoError, EngineError, triton.InferenceServerException, subprocess.TimeoutExpired) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    print(f"\n{text}\n\nThe load test's plot: {arguments.results}/load-test.png")
    print(f"All went well, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
