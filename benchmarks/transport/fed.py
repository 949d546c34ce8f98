"""Benchmark of the engine process under --workers: processes in place of frontend workers send equal requests.

    python -m benchmarks.transport.fed --rounds 5

The engine process has one core, the sending processes another. It is the bottleneck if it is always busy.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.reports.document import Cell, machine, markdown_table
from benchmarks.transport.cases import CASES, Case, over_grpc, over_http, path_of
from benchmarks.transport.models import write_repository
from infer_server.frontend_workers import link, supervisor
from infer_server.frontend_workers.link import Frame, Link
from infer_server.process import tune_malloc
from infer_server.server import Server, ServerOptions

_WARM_SECS = 0.3
_FED = [case for case in CASES if case.at_a_time > 1 and not (case.shared or case.as_json)]


class Feeder(Link):
    """Link that replaces a frontend worker and sends the case's request."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case, self._number = case, 0
        headers, body = over_http(case)
        lower = {name.lower(): value for name, value in headers.items()}
        self._kind, self._payload, self._about = (
            (link.HTTP, body, json.dumps(("POST", path_of(case), "1.1", lower)).encode()) if case.protocol == "HTTP"
            else (link.INFER, over_grpc(case), b""))

    def received(self, frame: Frame) -> None:
        if frame.kind == link.DRAIN:
            os._exit(0)
        if frame.kind == link.SETTINGS:
            self.send(link.READY)
            for _ in range(self._case.at_a_time // 2):
                self._send_request()
        else:                           # a response, or a refusal while the model is loading
            self._send_request()

    def closed(self, reason: Exception | None) -> None:
        os._exit(0)

    def _send_request(self) -> None:
        self._number += 1
        self.send(self._kind, self._number, self._payload, about=self._about, peer=b"ipv4:127.0.0.1:50000",
                  received_ns=time.monotonic_ns())


async def feed(case: Case, descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    await asyncio.get_running_loop().create_unix_connection(lambda: Feeder(case), sock=connection)
    await asyncio.Event().wait()


async def measure(models: Path, case: Case, seconds: float, core: int) -> tuple[float, float, float]:
    """Return CPU microseconds per request, requests per second, and the share of time that the process was busy."""
    def start_feeder(descriptor: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transport.fed", "--cores", f"{core},{core}",
             "--feed", str(CASES.index(case)), str(descriptor)], pass_fds=[descriptor])

    supervisor._start_process = start_feeder
    server = Server(ServerOptions((models,), grpc_port=0, http_port=0, metrics_port=0, cores=1, workers=2))
    await server.start()
    await server.loaded()
    await asyncio.sleep(_WARM_SECS)
    statistics = server.repository.find(case.model).statistics
    began, cpu_secs, count = time.monotonic(), time.process_time(), statistics.snapshot().success.count
    await asyncio.sleep(seconds)
    cpu_secs, count = time.process_time() - cpu_secs, statistics.snapshot().success.count - count
    elapsed = time.monotonic() - began
    await server.stop()
    return cpu_secs * 1e6 / max(1, count), count / elapsed, cpu_secs / elapsed


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.transport.fed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--cores", type=lambda text: tuple(map(int, text.split(","))), default=(0, 1),
                        metavar="FEEDERS,SERVER")
    parser.add_argument("--feed", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    where, (feeders, own) = machine(), options.cores
    os.sched_setaffinity(0, {own})
    tune_malloc()
    if options.feed:
        uvloop.run(feed(CASES[options.feed[0]], options.feed[1]))
    with tempfile.TemporaryDirectory() as temporary:
        write_repository(Path(temporary))
        results = {case.name: [uvloop.run(measure(Path(temporary), case, options.seconds, feeders))
                               for _ in range(options.rounds)] for case in _FED}
    rows: list[list[Cell]] = []
    for name, turns in results.items():
        cpu_us, rates, busy = zip(*turns, strict=True)
        rows.append([name, f"{median(cpu_us):.0f} ({min(cpu_us):.0f} to {max(cpu_us):.0f})", f"{median(rates):.0f}",
                     f"{median(busy):.0%}"])
    print(f"On {where}:\n")
    print(markdown_table(["request", "CPU us a request", "requests/s", "busy"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
