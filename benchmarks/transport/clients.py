"""Benchmark of a client's CPU time per request, from NumPy arrays to NumPy arrays, by client library.

    python -m benchmarks.transport.clients --rounds 7 --write

The server has one core, the clients another. In each round every client runs in turn, so that other load affects all of
them. The load generator sends messages that are encoded once, and does not decode responses.
"""
from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import uvloop

from benchmarks.reports.document import Cell, machine, markdown_table, write_section
from benchmarks.transport.__main__ import commands
from benchmarks.transport.models import SHAPES, write_repository
from benchmarks.transport.processes import running
from infer_server.clients import AsyncInferenceClient, InferenceClient
from infer_server.clients.load.transports.over_grpc import GrpcTransport

_WARM_SECS = 0.1
_IN_FLIGHT = (1, 8, 64)


class Client(ABC):
    """Client library under test."""
    name: str

    @abstractmethod
    def send(self, in_flight: int, end: float) -> list[float]:
        """Keep `in_flight` requests in flight until `end`, a time.perf_counter(). Returns the seconds of each."""


class Blocking(Client):
    """Blocking client: each request in flight has a thread."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self.name, self._call = name, call
        self._pool = ThreadPoolExecutor(max(_IN_FLIGHT))

    def send(self, in_flight: int, end: float) -> list[float]:
        users = [self._pool.submit(self._repeat, end) for _ in range(in_flight)]
        return [secs for user in users for secs in user.result()]

    def _repeat(self, end: float) -> list[float]:
        seconds: list[float] = []
        while (began := time.perf_counter()) < end or not seconds:
            self._call()
            seconds.append(time.perf_counter() - began)
        return seconds


class Asynchronous(Client):
    """Asynchronous client: each request in flight is a task of one event loop."""

    def __init__(self, name: str, runner: asyncio.Runner, call: Callable[[], Awaitable[object]]) -> None:
        self.name, self._runner, self._call = name, runner, call

    def send(self, in_flight: int, end: float) -> list[float]:
        return self._runner.run(self._send(in_flight, end))

    async def _send(self, in_flight: int, end: float) -> list[float]:
        users = await asyncio.gather(*(self._repeat(end) for _ in range(in_flight)))
        return [secs for user in users for secs in user]

    async def _repeat(self, end: float) -> list[float]:
        seconds: list[float] = []
        while (began := time.perf_counter()) < end or not seconds:
            await self._call()
            seconds.append(time.perf_counter() - began)
        return seconds


def blocking_clients(url: str, model: str, x: np.ndarray[Any, Any]) -> list[Client]:
    triton = tritonclient.grpc.InferenceServerClient(url)
    clients = {transport: InferenceClient(url, transport=transport) for transport in ("nghttp2", "grpcio")}

    def call_triton() -> object:
        tensor = tritonclient.grpc.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        return triton.infer(model, [tensor]).as_numpy("y")

    return [Blocking("`InferenceClient`", lambda: clients["nghttp2"].infer(model, {"x": x})["y"]),
            Blocking("`InferenceClient`, grpcio", lambda: clients["grpcio"].infer(model, {"x": x})["y"]),
            Blocking("`tritonclient.grpc`", call_triton)]


async def asynchronous_clients(url: str, model: str, x: np.ndarray[Any, Any], runner: asyncio.Runner) -> list[Client]:
    triton = tritonclient.grpc.aio.InferenceServerClient(url)
    clients = {transport: AsyncInferenceClient(url, transport=transport) for transport in ("nghttp2", "grpcio")}
    generator, = await GrpcTransport(url).prepare(model, "", [{"x": x}])

    async def call_triton() -> object:
        tensor = tritonclient.grpc.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        return (await triton.infer(model, [tensor])).as_numpy("y")

    return [Asynchronous("`AsyncInferenceClient`", runner, lambda: clients["nghttp2"].infer(model, {"x": x})),
            Asynchronous("`AsyncInferenceClient`, grpcio", runner, lambda: clients["grpcio"].infer(model, {"x": x})),
            Asynchronous("`tritonclient.grpc.aio`", runner, call_triton),
            Asynchronous("the generator of `load-test`", runner, lambda: generator(30.0))]


def turn(client: Client, in_flight: int, seconds: float) -> tuple[float, float]:
    """Return CPU microseconds per request, and the median latency in microseconds."""
    client.send(in_flight, time.perf_counter() + _WARM_SECS)
    cpu = time.process_time()
    durations = client.send(in_flight, time.perf_counter() + seconds)
    return (time.process_time() - cpu) * 1e6 / len(durations), median(durations) * 1e6


def rows_of(results: dict[tuple[str, str, int], list[tuple[float, float]]]) -> list[list[Cell]]:
    def spread(values: Sequence[float]) -> str:
        return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"

    return [[name, model, in_flight, *(spread(column) for column in zip(*turns, strict=True))]
            for (name, model, in_flight), turns in results.items()]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.transport.clients", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn")
    parser.add_argument("--cores", type=lambda text: tuple(map(int, text.split(","))), default=(0, 1),
                        metavar="CLIENT,SERVER")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks")
    options = parser.parse_args(arguments)
    options.ours, options.echo, options.peer = [], False, []
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    where, (own, server_core) = machine(), options.cores
    results: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        write_repository(Path(temporary))
        (name, command), = commands(options, Path(temporary))
        with running(name, command, server_core) as server:
            os.sched_setaffinity(0, {own})
            url = f"127.0.0.1:{server.ports.grpc}"
            inputs = {model: np.ones((1, *shape), np.float32) for model, shape in SHAPES.items()}
            clients = {model: [*blocking_clients(url, model, x),
                               *runner.run(asynchronous_clients(url, model, x, runner))] for model, x in inputs.items()}
            for _ in range(options.rounds):
                for model, in_flight in [("floats", number) for number in _IN_FLIGHT] + [("picture", 8)]:
                    for client in clients[model]:
                        results[client.name, model, in_flight].append(turn(client, in_flight, options.seconds))
    header = ["client", "model", "in flight", "CPU us a request", "p50, us"]
    text = (f"`python -m benchmarks.transport.clients {shlex.join(arguments)}`\n\nOn {where}; the server on one core, "
            f"the clients on another; medians of {options.rounds} turns of {options.seconds:g} s,\nthe least and the "
            f"most in brackets.\n\n{markdown_table(header, rows_of(results))}")
    print(text, flush=True)
    if options.write:
        write_section("clients", text)
    os._exit(0)                             # the clients are not closed one by one


if __name__ == "__main__":
    main(sys.argv[1:])
