"""load-test: measure the throughput and latency of a model under a given load.

    load-test -m classifier -u localhost:8001 --concurrency 1,4,16 --plot latency.png     as fast as it can
    load-test -m classifier -u localhost:8001 --rate 200,400                              as users would
    load-test -m classifier -u localhost:8001 --against otherhost:8001 --concurrency 16   two servers by turns
"""
from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TextIO, TypeVar

from infer_server.clients.errors import ClientError
from infer_server.clients.load.arguments import Options, parse
from infer_server.clients.load.measure import Summary
from infer_server.clients.load.mlperf.report import scenario_table, write_scenario
from infer_server.clients.load.mlperf.run import ScenarioResult, measure, require_loadgen
from infer_server.clients.load.plot import require_matplotlib, write_plot
from infer_server.clients.load.report import Report, table, write_csv, write_json
from infer_server.clients.load.schedule import Load, Scenario
from infer_server.clients.load.target import open_target

try:
    from uvloop import new_event_loop
except ImportError:                 # there is none for Windows
    from asyncio import new_event_loop  # type: ignore[assignment]

T = TypeVar("T")
FINE, FAILED, CANNOT_RUN, INTERRUPTED = 0, 1, 2, 130
CLEAR = "\r\033[K"


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 or 2 as listed by --help, 130 when interrupted."""
    options = parse(arguments)
    progress = Progress()
    try:
        return measure_scenario(options, options.scenario, progress) if options.scenario else (
            measure_loads(options, progress))
    except ClientError as error:
        progress.clear()
        print(f"load-test: {error}", file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt:
        progress.clear()
        print("load-test: interrupted; nothing is reported", file=sys.stderr)
        return INTERRUPTED


def measure_loads(options: Options, progress: Progress) -> int:
    """Measure the loads, write the reports, and return the exit status. Raises ClientError."""
    if options.plot:
        require_matplotlib()
    report = run_loop(run(options, progress))
    progress.clear()
    print(table(report))
    for path, write in ((options.json, write_json), (options.csv, write_csv), (options.plot, write_plot)):
        if path:
            write(report, path)
    return verdict(report, options.allow_errors)


def measure_scenario(options: Options, scenario: Scenario, progress: Progress) -> int:
    require_loadgen()

    async def measured() -> list[ScenarioResult]:
        async with AsyncExitStack() as stack:
            targets = [await stack.enter_async_context(open_target(options, url)) for url in options.urls]
            progress.write(f"{scenario.name}: running")
            return [await measure(scenario, target, options.duration, options.timeout, options.seed)
                    for target in targets]

    servers = run_loop(measured())
    progress.clear()
    print(scenario_table(options.model, scenario, servers))
    if options.json:
        write_scenario(options.model, scenario, servers, options.json)
    failed = any(server.decisive.errors for server in servers) and not options.allow_errors
    return FAILED if failed or not all(server.value for server in servers) else FINE


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop's event loop, or on asyncio's if uvloop is not installed."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def verdict(report: Report, allow_errors: bool) -> int:
    """Return FAILED if requests failed; with `allow_errors` only if a load had no success at all."""
    levels = [*report.levels, *(report.against.levels if report.against else ())]
    if allow_errors:
        return FINE if all(level.client.requests for level in levels) else FAILED
    return FAILED if any(level.client.errors or not level.client.requests for level in levels) else FINE


async def run(options: Options, progress: Progress) -> Report:
    """Measure all loads in turn, each on one server and then on the other if there are two.

    Raises ClientError if the model cannot be reached or refuses the input.
    """
    async with AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(open_target(options, url)) for url in options.urls]
        for load in options.loads:
            for target in targets:
                progress.write(f"{load}: warming up")
                await target.measure(load, progress.window)
    progress.clear()
    for problem in sorted(set.union(*(target.unavailable for target in targets))):
        print(f"load-test: no statistics from the server: {problem}", file=sys.stderr)
    return targets[0].report(targets[1].report() if options.against else None)


class Progress:
    """Progress line on a terminal, rewritten while a load test runs."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()

    def window(self, load: Load, seconds: float, summary: Summary) -> None:
        """Show the summary of the last window, `seconds` into the measurement."""
        errors = sum(summary.errors.values())
        self.write(f"{load}: {seconds:.1f} s, {summary.throughput:.1f} infer/s, p50 {summary.latency.p50:.2f} ms, "
                    f"p99 {summary.latency.p99:.2f} ms, {errors} errors")

    def clear(self) -> None:
        self.write("")

    def write(self, text: str) -> None:
        if self._live:
            self._stream.write(CLEAR + text)
            self._stream.flush()


if __name__ == "__main__":
    sys.exit(main())
