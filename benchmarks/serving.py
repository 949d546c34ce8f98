"""Benchmark of serving overhead: infer-server under load-test compared with run-engine at the same batch size.

    python -m benchmarks.serving                              # ResNet-50 INT8 of the zoo, concurrency 1 to 32
    python -m benchmarks.serving --model mobilenet_v2 --precision fp32 --threads 2 --write
    python -m benchmarks.serving --plan models/mobilenet_v2/1/model.plan --apart 0,1
    python -m benchmarks.serving --plan models/mobilenet_v2/1/model.plan --apart 0,1 --way http

For each concurrency it reports throughput, latency, the mean batch size that the server formed, and the share of the
throughput that the engine alone has at that size. The server has one instance and run-engine one context. Server and
engine runs alternate, so that other load affects both; the table shows the median of the repetitions. The load test
uses part of the machine, which counts as overhead. With --apart the server and the client have a core each, and the
client is a bare connection (transport/bare.py), so that the overhead is the server's own.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import build, run, source_of
from benchmarks.reports.document import Cell, machine, markdown_table, write_section
from benchmarks.transport import bare
from infer_server.clients import ClientError, InferenceClient
from infer_server.server import Ports

READY_TIMEOUT_S = 120


@dataclass(frozen=True)
class Point:
    """Results at one concurrency: medians over the repetitions."""
    concurrency: int
    served: float               # items/s
    p50_ms: float
    p99_ms: float
    mean_batch: float
    engine: float               # items/s of run-engine at the rounded mean batch
    ratios: list[float]         # served / engine of each repetition, ascending


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serving(plan: Path, options: argparse.Namespace) -> Iterator[Ports]:
    """Run an infer-server on `plan`, <repository>/<model>/<version>/model.plan; yields its ports when it is ready."""
    grpc, http, metrics = (free_port() for _ in range(3))
    process = subprocess.Popen(
        [sys.executable, "-m", "infer_server.cli.serve", "--model-repository", plan.parents[2],
         "--threads", str(options.threads), "--cores", str(options.threads),  # so that the model gets one instance
         "--grpc-front", options.grpc_front, "--log-level", "warning", "--allow-client-shm",
         "--grpc-port", str(grpc), "--http-port", str(http), "--metrics-port", str(metrics)],
        preexec_fn=partial(_pin, options.apart[1:]))
    try:
        wait_until_ready(f"127.0.0.1:{grpc}", plan.parents[1].name, process)
        yield Ports(grpc, http, metrics)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextmanager
def serving_folder(folder: Path, models: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run an infer-server with one core for its models; yields its gRPC address and process when they are ready."""
    grpc, http, metrics = (free_port() for _ in range(3))
    process = subprocess.Popen(
        [sys.executable, "-m", "infer_server.cli.serve", "--model-repository", folder, "--threads", "1", "--cores", "1",
         "--log-level", "warning", "--grpc-port", str(grpc), "--http-port", str(http), "--metrics-port", str(metrics)])
    try:
        for model in models:
            wait_until_ready(f"127.0.0.1:{grpc}", model, process)
        yield f"127.0.0.1:{grpc}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _pin(cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)


def wait_until_ready(address: str, model: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    with InferenceClient(address) as client:
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(ClientError):         # the server does not listen yet
                if client.is_model_ready(model, timeout=1):
                    return
            time.sleep(0.1)
    raise SystemExit(f"infer-server at {address} did not get '{model}' ready; its log says why")


def loaded(ports: Ports, model: str, concurrency: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one concurrency by load-test or by the bare client; return its level."""
    if options.apart:
        _pin(options.apart[:1])
        return bare.level(ports, model, concurrency, options.duration, options.way)
    run("infer_server.clients.load.cli", "-m", model, "-u", f"127.0.0.1:{ports.grpc}", "--concurrency", concurrency,
        "--duration", options.duration, "--json", folder / "load.json")
    level: dict[str, Any] = json.loads((folder / "load.json").read_text())["levels"][0]
    return level


def alone(plan: Path, batch: int, options: argparse.Namespace) -> float:
    """Return run-engine's throughput in items per second."""
    done = subprocess.run(
        [sys.executable, "-m", "infer_server.cli.run_engine", plan, "--batch", str(batch),
         "--threads", str(options.threads), "--seconds", str(options.duration), "--json"],
        check=True, capture_output=True, text=True, preexec_fn=partial(_pin, options.apart[1:]))
    return float(json.loads(done.stdout)["throughput"])


def measure(plan: Path, options: argparse.Namespace, folder: Path) -> list[Point]:
    points = []
    model = plan.parents[1].name
    for concurrency in options.concurrency:
        levels, engines = [], []
        for _ in range(options.repeats):
            with serving(plan, options) as ports:
                levels.append(loaded(ports, model, concurrency, options, folder))
            batch = max(1, round(levels[-1]["server"]["mean_batch"]))
            engines.append(alone(plan, batch, options))
        points.append(Point(
            concurrency, served=median(level["throughput"] for level in levels),
            p50_ms=median(level["latency_ms"]["p50"] for level in levels),
            p99_ms=median(level["latency_ms"]["p99"] for level in levels),
            mean_batch=median(level["server"]["mean_batch"] for level in levels), engine=median(engines),
            ratios=sorted(level["throughput"] / engine for level, engine in zip(levels, engines, strict=True))))
    return points


def section(points: list[Point], options: argparse.Namespace) -> str:
    """Return the result as a section of docs/benchmarks."""
    header = ["concurrency", "served, infer/s", "p50, ms", "p99, ms", "mean batch", "run-engine, infer/s", "ratio"]
    rows: list[list[Cell]] = [[p.concurrency, p.served, p.p50_ms, p.p99_ms, p.mean_batch, p.engine,
                               f"{median(p.ratios):.0%} ({p.ratios[0]:.0%} to {p.ratios[-1]:.0%})"] for p in points]
    client = ("Server and client have a core each." if options.apart else "The load test runs on the same machine.")
    command = "python -m benchmarks.serving " + " ".join(options.arguments)
    return (f"### Serving: {Path(options.model).stem}, {options.precision}, {options.threads} threads\n\n"
            f"`{command.strip()}`\n\nOn {options.machine}; median of {options.repeats}. Clients send single items; "
            f"run-engine runs the rounded\nmean batch. {client}\n\n"
            f"{markdown_table(header, rows)}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.serving", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", metavar="NAME|FILE", help="of benchmarks/zoo, or an ONNX file")
    parser.add_argument("--precision", default="int8", choices=("int8", "fp32", "fp16", "bf16"))
    parser.add_argument("--threads", type=int, default=1, help="of the engine, served and alone")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")],
                        default=[1, 2, 4, 8, 16, 32], metavar="N,...")
    parser.add_argument("--duration", type=float, default=5.0, metavar="S", help="of each load and each engine run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plan", type=Path, help="a plan of <repository>/<model>/<version>/ instead of building one")
    parser.add_argument("--apart", type=lambda text: [int(part) for part in text.split(",")], default=[],
                        metavar="CLIENT,SERVER", help="cores, and the bare client instead of load-test")
    parser.add_argument("--way", choices=bare.WAYS, default="grpc", help="of the bare client's inputs")
    parser.add_argument("--grpc-front", default="nghttp2", choices=("nghttp2", "grpcio"), help="as infer-server's")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks")
    options = parser.parse_args(arguments)
    options.arguments, options.machine = arguments, machine()
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plan = options.plan
        if plan is None:
            source = source_of(options.model, folder)
            plan = folder / "repository" / source.stem / "1" / "model.plan"
            build(source, plan, options.precision, options.max_batch)
        options.model = plan.parents[1].name
        text = section(measure(plan, options, folder), options)
    print(text)
    if options.write:
        write_section(f"serving {Path(options.model).stem} {options.precision}", text)


if __name__ == "__main__":
    main(sys.argv[1:])
