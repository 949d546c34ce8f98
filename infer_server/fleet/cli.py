"""plan-capacity: find how many servers hold a rate and a 99th percentile of latency, by simulation.

    plan-capacity model.plan --rate 2000 --p99 30               times are measured here, by batch size
    plan-capacity --item-ms 16.9 --rate 2000 --p99 100          times as given
    plan-capacity --times b1.json b8.json --rate 2000 --p99 100 times of run-engine --json, or a model's statistics
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from infer_server.cli.common import ABOVE_0, guarded, natural, number_type, positive
from infer_server.engines.errors import ConfigError
from infer_server.fleet.planning import Goal, Simulation
from infer_server.fleet.report import as_json, as_text, require_matplotlib, write_plot
from infer_server.fleet.service import ServiceTimes, measured, read_times, stated
from infer_server.fleet.simulate import BALANCERS, Fleet

REQUEST_MS = 0.65       # CPU of a small request over gRPC without its execution: docs/benchmarks/serving.md
HOP_MS = 0.6            # two ways through a data centre's network and a balancer
above_0 = number_type("a number above 0", low=ABOVE_0)
at_least_0 = number_type("a number of at least 0", low=0.0)


def _command(options: argparse.Namespace) -> int:
    if options.plot:
        require_matplotlib()
    if options.threads > options.cores:
        raise ConfigError(f"--threads {options.threads}: a server has {options.cores} cores; raise --cores")
    times, batch = _times(options)
    fleet = Fleet(options.servers or 1, options.cores // options.threads, times, batch, options.balancer,
                  options.balancers, options.request_ms / 1e3, options.hop_ms / 1e3, options.slow)
    goal, simulation = Goal(options.rate, options.p99 / 1e3), Simulation(options.requests, options.seed)
    answer = simulation.answer(fleet, goal) if options.servers else simulation.fewest(fleet, goal)
    print(json.dumps(as_json(answer, options.threads), indent=1) if options.json else as_text(answer, options.threads))
    if options.plot:
        write_plot(answer, options.plot)
    return 0 if answer.holds else 1


def _times(options: argparse.Namespace) -> tuple[ServiceTimes, int]:
    """Return the times of batches and the most items of one. Raises ConfigError unless one source is given."""
    sources = [name for name in ("plan", "item_ms", "times") if getattr(options, name)]
    if len(sources) != 1:
        raise ConfigError("give one source of times: a plan to measure, --item-ms, or --times")
    if options.item_ms:
        most = options.max_batch or 8
        return stated(options.item_ms, options.fixed_ms, most), most
    if options.times:
        times = read_times(options.times)
        return times, options.max_batch or times.sizes[-1]
    return _measured(options)


def _measured(options: argparse.Namespace) -> tuple[ServiceTimes, int]:
    """Measure a plan with batches of 1, 2, 4, ... items, as run-engine does."""
    from infer_server.cli.run_engine import measure, ready_context
    from infer_server.engines.loading import load_engine
    engine = load_engine(options.plan, options.threads, specialise="wait")
    most = min(options.max_batch or engine.max_batch or 1, engine.max_batch or 1)
    sizes = sorted({*(1 << power for power in range(most.bit_length())), most})
    times = {size: measure(ready_context(engine, size), size, options.seconds)
             for size in tqdm(sizes, desc="measuring", unit="size", leave=False, disable=None)}
    return measured(times, f"{options.plan} measured here on {options.threads} thread"
                           f"{'s' * (options.threads > 1)}"), most


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("plan-capacity", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", help="plan file, which is measured here")
    goal = parser.add_argument_group("goal")
    goal.add_argument("--rate", type=above_0, required=True, metavar="Q", help="requests a second, of one item each")
    goal.add_argument("--p99", type=above_0, required=True, metavar="MS", help="99th percentile of latency to hold")
    goal.add_argument("--servers", type=positive, metavar="N",
                      help="report on N servers instead of searching for the fewest")
    times = parser.add_argument_group("times of batches")
    times.add_argument("--item-ms", type=above_0, metavar="MS", help="time of an item, without a plan")
    times.add_argument("--fixed-ms", type=at_least_0, default=0.0, metavar="MS",
                       help="time of a batch beside its items, with --item-ms (default 0)")
    times.add_argument("--times", type=Path, nargs="+", metavar="FILE",
                       help="JSON of run-engine --json, a file for each batch size, or of /v2/models/NAME/stats")
    times.add_argument("--max-batch", type=positive, metavar="N",
                       help="max_batch_size of the model (default: what the plan or the files have; 8 with --item-ms)")
    times.add_argument("--seconds", type=above_0, default=0.5, metavar="S",
                       help="duration of the measurement of a batch size (default 0.5)")
    _add_servers(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--requests", type=positive, default=50_000, metavar="N",
                        help="requests of a simulation (default 50000)")
    output.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of the simulation (default 0)")
    output.add_argument("--json", action="store_true", help="print the answer as JSON")
    output.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG: latency over load, with the goal")
    return parser


def _add_servers(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("servers")
    servers.add_argument("--cores", type=positive, default=16, metavar="N", help="cores of a server (default 16)")
    servers.add_argument("--threads", type=positive, default=1, metavar="N",
                         help="threads of an instance; a server has cores / threads instances (default 1)")
    servers.add_argument("--request-ms", type=at_least_0, default=REQUEST_MS, metavar="MS",
                         help=f"time of a request on a server's event loop (default {REQUEST_MS:g})")
    servers.add_argument("--hop-ms", type=at_least_0, default=HOP_MS, metavar="MS",
                         help=f"time of a request on its way there and back (default {HOP_MS:g})")
    servers.add_argument("--balancer", choices=BALANCERS, default=BALANCERS[0],
                         help=f"how requests are balanced (default {BALANCERS[0]})")
    servers.add_argument("--balancers", type=positive, default=1, metavar="N",
                         help="number of balancers, each of which knows its own requests only (default 1)")
    servers.add_argument("--slow", type=number_type("a share from 0 to 1", 0.0, 1.0), default=0.0, metavar="SHARE",
                         help="share of the servers that take three times as long (default 0)")


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(_command, make_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
