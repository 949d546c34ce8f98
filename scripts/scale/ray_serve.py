"""Serve behind Ray Serve's HAProxy: CPU per request, kill -9, a rolling update, autoscaling.

    python -m scripts.scale ray_serve                       # all parts, some ten minutes
    python -m scripts.scale ray_serve --only cost,kill

Needs the extra `ray`, psutil and a free range of seven ports.
"""
from __future__ import annotations

import argparse
import asyncio
import collections
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from infer_server import build_engine
from infer_server.protos import inference
from scripts.scale._ray_cluster import BIN, Cluster, cpu_secs, wait_until

MODEL = Path(__file__).parents[1] / "demo_data" / "model.onnx"
CALL = "/inference.GRPCInferenceService/"
MAX_TIMES_CPU = 2.2
PARTS = ("cost", "kill", "update", "scale")
RETRIES = {"methodConfig": [{"name": [{"service": "inference.GRPCInferenceService"}], "retryPolicy": {
    "maxAttempts": 4, "initialBackoff": "0.05s", "maxBackoff": "1s", "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE"]}}]}
_DEADLINE_SECS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run (default %(default)s)")
    parser.add_argument("--port", type=int, default=9600, help="first of seven ports (default %(default)s)")
    parser.add_argument("--requests", type=int, default=1500, help="requests of a turn (default %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each server (default %(default)s)")
    parser.add_argument("--cpus", type=int, default=4, help="CPUs that the cluster is told of (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run the parts; return 1 if a limit is missed."""
    folder = Path(tempfile.mkdtemp(prefix="ray-models-"))
    parts: dict[str, Callable[[Cluster, Path, argparse.Namespace], bool]] = {
        "cost": cost, "kill": kill, "update": update, "scale": scale}
    passed = []
    try:
        for version in (1, 2):
            (folder / str(version) / "digits" / str(version)).mkdir(parents=True)
        plan = folder / "1" / "digits" / "1" / "model.plan"
        build_engine(MODEL).save(plan)
        shutil.copy(plan, folder / "2" / "digits" / "2")
        with Cluster(arguments.port, arguments.cpus) as cluster:
            for name in arguments.only.split(","):
                print(f"{name}:", flush=True)
                passed.append(parts[name](cluster, folder, arguments))
                print(f"  {'passed' if passed[-1] else 'MISSED'}", flush=True)
    finally:
        shutil.rmtree(folder)
    return 0 if all(passed) else 1


def request_of(seed: int = 0) -> bytes:
    image = np.random.default_rng(seed).random((1, 1, 28, 28), np.float32)
    request = inference.ModelInferRequest(model_name="digits", id=str(seed), raw_input_contents=[image.tobytes()])
    request.inputs.add(name="image", datatype="FP32", shape=image.shape)
    return request.SerializeToString()


@dataclass
class Load:
    """Requests in a closed loop: how each ended, and which version answered."""
    url: str
    in_flight: int
    retries: bool = False
    requests: int = 0                   # number of requests; 0: until `stop` is set
    stop: threading.Event = field(default_factory=threading.Event)
    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    secs: list[float] = field(default_factory=list)

    async def run(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.retries:
            options.append(("grpc.service_config", json.dumps(RETRIES)))        # type: ignore[arg-type]
        async with grpc.aio.insecure_channel(self.url, options=options) as channel:
            call = channel.unary_unary(CALL + "ModelInfer")
            data, started = request_of(), 0

            async def loop() -> None:
                nonlocal started
                while not self.stop.is_set() and (not self.requests or started < self.requests):
                    started += 1
                    await self._one(call, data)

            await asyncio.gather(*(loop() for _ in range(self.in_flight)))

    async def _one(self, call: Any, data: bytes) -> None:
        begin = time.monotonic()
        try:
            answer = await call(data, timeout=_DEADLINE_SECS)
            version = inference.ModelInferResponse.FromString(answer).model_version
            self.ends[f"version {version}"] += 1
        except grpc.aio.AioRpcError as error:
            self.ends[f"LOST {error.code().name}: {(error.details() or '')[:80]}"] += 1
            await asyncio.sleep(0.01)
        self.secs.append(time.monotonic() - begin)

    @contextmanager
    def in_background(self) -> Iterator[Load]:
        """Run the load on a thread until the end of a `with` block."""
        thread = threading.Thread(target=lambda: asyncio.run(self.run()))
        thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            thread.join()

    @property
    def lost(self) -> int:
        return sum(count for end, count in self.ends.items() if end.startswith("LOST"))

    def report(self) -> None:
        p50, p99 = np.percentile(np.array(self.secs) * 1e3, [50, 99])
        print(f"  {len(self.secs)} requests: {dict(self.ends)}, p50 {p50:.0f} ms, p99 {p99:.0f} ms", flush=True)


@contextmanager
def alone(folder: Path, port: int) -> Iterator[psutil.Process]:
    """Run infer-server without Ray."""
    process = subprocess.Popen([BIN / "infer-server", "--model-repository", folder / "1", "--grpc-port", str(port),
                                "--allow-http=false", "--allow-metrics=false", "--cores=1", "--log-level=error"])
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(60)
            wait_until(lambda: is_ready(channel), 60, "infer-server is ready")
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def is_ready(channel: grpc.Channel) -> bool:
    return inference.ServerReadyResponse.FromString(channel.unary_unary(CALL + "ServerReady")(b"")).ready


def cost(cluster: Cluster, folder: Path, arguments: argparse.Namespace) -> bool:
    """Compare the CPU time per request in alternating turns, and the answers byte for byte."""
    cluster.deploy({"model_repository": str(folder / "1"), "num_replicas": 1, "num_cpus": 1})
    cluster.wait_for(1)
    passed = True
    with alone(folder, arguments.port + 6) as server:
        urls = [f"127.0.0.1:{port}" for port in (arguments.port + 6, cluster.grpc)]
        different = [seed for seed in range(100) if answers_differ(urls, request_of(seed))]
        print(f"  answers of {100 - len(different)} of 100 requests are equal byte for byte")
        for in_flight in (1, 16):
            best: dict[str, float] = {}
            for _ in range(arguments.turns):
                for url, processes in zip(urls, (lambda: [server], cluster.processes), strict=True):
                    for kind, used in turn(url, in_flight, arguments.requests, processes).items():
                        name = "alone" if url == urls[0] else kind
                        best[name] = min(best.get(name, np.inf), used)
            served = best["haproxy"] + best["replica"]
            ratio, every = served / best["alone"], (served + best["rest"]) / best["alone"]
            print(f"  {in_flight} in flight, us of CPU a request: infer-server {best['alone']:.0f}; HAProxy "
                  f"{best['haproxy']:.0f} + replica {best['replica']:.0f}, {ratio:.2f} times (bar {MAX_TIMES_CPU}); "
                  f"Ray's other processes {best['rest']:.0f}, {every:.2f} times with them", flush=True)
            passed &= ratio <= MAX_TIMES_CPU
    return passed and not different


def answers_differ(urls: list[str], request: bytes) -> bool:
    answers = []
    for url in urls:
        with grpc.insecure_channel(url) as channel:
            answers.append(channel.unary_unary(CALL + "ModelInfer")(request, timeout=_DEADLINE_SECS))
    return answers[0] != answers[1]


def turn(url: str, in_flight: int, requests: int, processes: Callable[[], list[psutil.Process]]) -> dict[str, float]:
    """Return the microseconds of CPU per request, by the kinds of processes."""
    asyncio.run(Load(url, in_flight, requests=100).run())
    before = cpu_secs(processes())
    load = Load(url, in_flight, requests=requests)
    asyncio.run(load.run())
    assert not load.lost, load.ends
    return {kind: (secs - before.get(kind, 0.0)) / len(load.secs) * 1e6
            for kind, secs in cpu_secs(processes()).items()}


def kill(cluster: Cluster, folder: Path, _: argparse.Namespace) -> bool:
    """Kill one of three replicas under load by clients with retries."""
    cluster.deploy({"model_repository": str(folder / "1"), "num_replicas": 3, "num_cpus": 0.5})
    cluster.wait_for(3)
    with Load(f"127.0.0.1:{cluster.grpc}", 6, retries=True).in_background() as load:
        time.sleep(5)
        cluster.replicas()[0].kill()
        time.sleep(20)
    load.report()
    return load.lost == 0


def update(cluster: Cluster, folder: Path, _: argparse.Namespace) -> bool:
    """Replace the repository under load by clients without retries, until all answers have the new version."""
    arguments = {"num_replicas": 2, "num_cpus": 0.5}
    cluster.deploy({"model_repository": str(folder / "1"), **arguments})
    cluster.wait_for(2)
    with Load(f"127.0.0.1:{cluster.grpc}", 6).in_background() as load:
        time.sleep(3)
        cluster.deploy({"model_repository": str(folder / "2"), **arguments})
        wait_until(lambda: load.ends["version 2"] > 0, 240, "the new version answers")
        cluster.wait_for(2)
        before = load.ends.copy()
        time.sleep(5)
        late = load.ends["version 1"] - before["version 1"]
    load.report()
    print(f"  answers of version 1 after the update: {late}")
    return load.lost == 0 and load.ends["version 2"] > before["version 2"] and not late


def scale(cluster: Cluster, folder: Path, _: argparse.Namespace) -> bool:
    """Scale from one replica to three under load, and back."""
    cluster.deploy({"model_repository": str(folder / "1"), "num_cpus": 0.5, "min_replicas": 1, "max_replicas": 3,
                    "target_ongoing_requests": 32, "upscale_delay_s": 5, "downscale_delay_s": 10,
                    "look_back_period_s": 6, "metrics_interval_s": 2})
    cluster.wait_for(1)
    seen = [1]

    def follow(count: int) -> bool:
        running = cluster.running()
        if running and running != seen[-1]:
            seen.append(running)
        return seen[-1] == count

    with Load(f"127.0.0.1:{cluster.grpc}", 24).in_background() as load:
        wait_until(lambda: follow(3), 120, "three replicas are running")
    wait_until(lambda: follow(1), 150, "one replica is running")
    load.report()
    print(f"  replicas by `serve status`: {' -> '.join(map(str, seen))}; ongoing requests would have asked for one "
          f"(24 in flight, target 32)")
    return load.lost == 0 and {1, 3} <= set(seen) and seen[-1] == 1
