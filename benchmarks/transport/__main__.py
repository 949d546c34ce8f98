"""Benchmark of a server's CPU time per request, engine included: all its processes, by transport and size.

    python -m benchmarks.transport --rounds 5 --write
    python -m benchmarks.transport --ours nghttp2= --ours 'grpcio=--grpc-front grpcio' --peer 'triton=s {grpc} {http}'

All servers run on one core; the client, a bare socket (http2.py, http1.py), has another. In each round every server
runs each case in turn, so that other load affects all of them. A peer is a command that serves the same two models:
`floats` (FP32 x[16] -> y[10]) and `picture` (FP32 x[3,224,224] -> y[10]).
"""
from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.reports.document import Cell, machine, markdown_table, write_section
from benchmarks.transport.cases import CASES, Case, Measured, measure
from benchmarks.transport.models import write_repository
from benchmarks.transport.processes import Running, running

_COMMAND = ("exec {python} -m infer_server.cli.serve --model-repository {models} --grpc-port {{grpc}} "
            "--http-port {{http}} --metrics-port {{metrics}} --cores 1 --allow-client-shm --log-level warning "
            "{options}")
Results = dict[tuple[str, str], list[Measured]]         # by server and case


def commands(options: argparse.Namespace, models: Path) -> Iterator[tuple[str, str]]:
    for text in options.ours or ["infer-server="]:
        name, _, options_text = text.partition("=")
        yield name, _COMMAND.format(python=sys.executable, models=models, options=options_text)
    if options.echo:
        yield "bare echo", f"exec {sys.executable} -m benchmarks.transport.echo {{grpc}} {{http}}"
    for text in options.peer:
        name, _, command = text.partition("=")
        yield name, command


def measure_all(servers: list[Running], cases: list[Case], options: argparse.Namespace) -> Results:
    results: Results = defaultdict(list)
    for _ in range(options.rounds):
        for case in cases:
            for server in servers:
                results[server.name, case.name].append(measure(server, case, options.seconds))
    return results


def section(results: Results, servers: list[str], cases: list[Case], options: argparse.Namespace, where: str) -> str:
    header = ["request", "in flight", "server", "CPU us a request", "in processes that it starts", "of it the engine",
              "requests/s", "p50, us", "failed"]
    rows: list[list[Cell]] = []
    for case in cases:
        for server in servers:
            measurements = results[server, case.name]
            rows.append([case.name, case.at_a_time, server, _spread([m.cpu_us + m.others_us for m in measurements]),
                         f"{median(m.others_us for m in measurements):.0f}",
                         _spread([m.engine_us for m in measurements]), f"{median(m.rate for m in measurements):.0f}",
                         _spread([m.p50_us for m in measurements]), sum(m.failed for m in measurements)])
    return (f"`python -m benchmarks.transport {shlex.join(options.arguments)}`\n\nOn {where}; servers on one core, the "
            f"client on another; medians of {options.rounds} turns of {options.seconds:g} s,\nthe least and the most "
            f"in brackets. The engine's time is the server's own `compute_infer`.\n\n{markdown_table(header, rows)}")


def _spread(values: list[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.transport", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=OPTIONS",
                        help="infer-server with these options (default: without any); can be repeated")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND",
                        help="another server, with {grpc} and {http} for its ports; can be repeated")
    parser.add_argument("--echo", action="store_true", help="and a bare echo on libnghttp2, for cases over gRPC")
    parser.add_argument("--case", action="append", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--cores", type=lambda text: tuple(map(int, text.split(","))), default=(0, 1),
                        metavar="CLIENT,SERVER")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks")
    options = parser.parse_args(arguments)
    options.arguments = arguments
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    where, (client, server) = machine(), options.cores
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        models = Path(temporary)
        write_repository(models)
        servers = [stack.enter_context(running(name, command, server)) for name, command in commands(options, models)]
        os.sched_setaffinity(0, {client})
        cases = [case for case in CASES if not options.case or case.name in options.case]
        names = [server.name for server in servers]
        text = section(measure_all(servers, cases, options), names, cases, options, where)
    print(text)
    if options.write:
        write_section("transport", text)


if __name__ == "__main__":
    main(sys.argv[1:])
