"""Compare plan-capacity's simulation with one to three real servers.

The servers run a Python model that sleeps, so that they need little processor time: 1 s an item in batches of 1, or
0.8 s a batch and 60 ms an item in batches of up to 8. A client sends requests of one item at the times of a Poisson
process, to the servers in turn. The simulation gets the same times of arrival, and the times of executions that the
model records under the load; a second one gets times measured before, as plan-capacity does.
Limit: the simulated 99th percentile is within 20 % of the measured one.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from infer_server import AsyncInferenceClient, InferenceClient
from infer_server.engines.ir.graph import Array
from infer_server.fleet.service import ServiceTimes, measured
from infer_server.fleet.simulate import WARM_UP, Fleet, poisson, simulate

BAR = 0.2
MODELS = {"items": (1000.0, 0.0, 1), "batches": (60.0, 800.0, 8)}       # ms an item, ms a batch, max_batch_size
START_SECONDS = 180
MODEL = """import time
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        items = sum(len(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests)
        begin = time.perf_counter()
        time.sleep(({fixed} + {item} * items) / 1e3)
        with open({notes!r}, "a") as file:
            file.write(f"{{items}} {{time.perf_counter() - begin}}\\n")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(
            request, "x").as_numpy())]) for request in requests]
"""
CONFIG = """backend: "python"
max_batch_size: {batch}
input {{ name: "x" data_type: TYPE_FP32 dims: 1 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
dynamic_batching {{ }}
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 3], help="numbers of servers (default 1 2 3)")
    parser.add_argument("--instances", type=int, default=4, help="instances of a server (default 4)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="models (default: both)")
    parser.add_argument("--load", type=float, default=0.8, help="share of the servers' capacity (default 0.8)")
    parser.add_argument("--requests", type=int, default=350, help="requests of a comparison (default 350)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrivals (default 0)")


def run(arguments: argparse.Namespace) -> int:
    """Compare each number of servers; return 1 if one differs by more than the limit."""
    worst = max(abs(compared(model, count, arguments)) for model in arguments.models for count in arguments.servers)
    print(f"largest error of the 99th percentile: {worst:.0%} (bar {BAR:.0%})")
    return 0 if worst <= BAR else 1


def compared(model: str, count: int, arguments: argparse.Namespace) -> float:
    """Compare a number of servers of a model, print the numbers, and return the error of the simulated p99."""
    item_ms, fixed_ms, most = MODELS[model]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, notes = Path(name, "sleeper"), Path(name, "notes.txt")
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(MODEL.format(fixed=fixed_ms, item=item_ms, notes=str(notes)))
        (folder / "config.pbtxt").write_text(CONFIG.format(batch=most, instances=arguments.instances))
        started = [stack.enter_context(server(folder.parent)) for _ in range(count)]
        urls = [wait_for(process, url) for process, url in started]
        before = measure(urls, most)
        noted = executions(notes)[1]
        hop = max(0.0, before.of(1) - float(noted.mean()))       # client, network and server without the execution
        planned = Fleet(count, arguments.instances, before, most, "round-robin")
        arrivals = poisson(arguments.load * planned.capacity, arguments.requests, arguments.seed)
        notes.unlink()
        latencies = asyncio.run(send(urls, arrivals))[int(WARM_UP * arguments.requests):]
        loaded = replace(planned, times=measured(executions(notes), "noted by the model"), hop_seconds=hop)
    seen = np.percentile(latencies, (50, 99))
    simulated = np.percentile(simulate(loaded, arrivals), (50, 99))
    ahead = np.percentile(simulate(planned, arrivals), 99)
    error = float(simulated[1] / seen[1] - 1)
    print(f"{model}: {count} x {arguments.instances} instances, {arguments.load * planned.capacity:.1f} requests/s, a "
          f"batch of 1 takes {1e3 * before.of(1):.0f} ms, under load {1e3 * (loaded.times.of(1) + hop):.0f}: p50 "
          f"{1e3 * seen[0]:.0f} ms, simulated {1e3 * simulated[0]:.0f}; p99 {1e3 * seen[1]:.0f} ms, simulated "
          f"{1e3 * simulated[1]:.0f} ({error:+.0%}), by the times before {1e3 * ahead:.0f}", flush=True)
    return error


def executions(notes: Path) -> dict[int, Array]:
    """Return the seconds of executions by batch size, as the model records them."""
    seconds_by_items: dict[int, list[float]] = defaultdict(list)
    for line in notes.read_text().splitlines():
        items, seconds = line.split()
        seconds_by_items[int(items)].append(float(seconds))
    return {items: np.array(seconds) for items, seconds in seconds_by_items.items()}


@contextlib.contextmanager
def server(repository: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start an infer-server on free ports, and end it with the block."""
    ports = [free_port() for _ in range(3)]
    options = [f"--{name}-port={port}" for name, port in zip(("grpc", "http", "metrics"), ports, strict=True)]
    process = subprocess.Popen([sys.executable, "-m", "infer_server", "infer-server", "--model-repository",
                                str(repository), *options], stderr=subprocess.DEVNULL)
    try:
        yield process, f"127.0.0.1:{ports[0]}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(process: subprocess.Popen[bytes], url: str) -> str:
    """Return the URL of a server once its model is ready."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(Exception), InferenceClient(url) as client:
            client.infer("sleeper", {"x": np.zeros((1, 1), np.float32)})
            return url
        time.sleep(0.2)
    raise SystemExit(f"the server at {url} did not become ready within {START_SECONDS} s")


def measure(urls: list[str], most: int) -> ServiceTimes:
    """Return times of batches, measured by sequential requests to each server, on all servers concurrently."""
    sizes = sorted({1, most})

    def one(url: str) -> list[list[float]]:
        with InferenceClient(url) as client:
            return [[timed(client, {"x": np.zeros((items, 1), np.float32)}) for _ in range(10)] for items in sizes]

    with ThreadPoolExecutor(len(urls)) as threads:
        measurements = list(threads.map(one, urls))
    return measured({items: np.concatenate([server[index] for server in measurements])
                     for index, items in enumerate(sizes)}, "measured on the servers")


def timed(client: InferenceClient, feed: dict[str, Array]) -> float:
    begin = time.perf_counter()
    client.infer("sleeper", feed)
    return time.perf_counter() - begin


async def send(urls: list[str], arrivals: Array) -> Array:
    """Return the latencies in seconds of requests that are sent at given times, to the servers in turn."""
    clients = [AsyncInferenceClient(url) for url in urls]
    feed = {"x": np.zeros((1, 1), np.float32)}
    begin = time.perf_counter() + 0.5

    async def one(number: int, due: float) -> float:
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        await clients[number % len(clients)].infer("sleeper", feed)
        return time.perf_counter() - begin - due

    try:
        return np.array(await asyncio.gather(*(one(number, due) for number, due in enumerate(arrivals.tolist()))))
    finally:
        for client in clients:
            await client.close()
