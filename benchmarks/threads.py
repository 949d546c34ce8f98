"""Benchmark of several threads on one request: the speed-up, alone and under contention, and a check of every byte.

    python -m benchmarks.threads m.plan                         # 2 threads, 5 s for each condition, 5,000 requests
    python -m benchmarks.threads m.plan --threads 4 --seconds 10 --requests 0 --write       # no check
    python -m benchmarks.threads m.plan --seconds 0 --batch 4 --write                       # the check alone

Contexts of one and of several threads take turns in one process, so that other load affects both; the table shows the
medians of wall times at batch 1. A second table shows queued requests: a context of one thread on each core against one
context of all threads. The check runs batches of random size at random times, while a process on each core computes in
bursts; every output of every request is compared with that of one thread on the same input.
"""
from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measure.neighbours import bursts, busy_loop, second_copy
from benchmarks.reports.document import Cell, machine, markdown_table, write_section
from infer_server.engines.backends.llvm.runtime.abi import WorkerRow
from infer_server.engines.backends.llvm.runtime.workers import ParallelExecution
from infer_server.engines.ir.graph import Array
from infer_server.engines.plan.file import read_plan
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.context import ExecutionContext
from infer_server.engines.runtime.specialisation import Specialisation

TURN = 3                # executions in a row of one context
FEEDS = 16              # different inputs of the check
LONGEST_PAUSE_S = 3e-3  # between two requests of the check


@dataclass(frozen=True)
class Speed:
    """Median times of one and of several threads under one condition."""
    condition: str
    one_ms: float
    several_ms: float
    p99_ms: float           # 99th percentile with several threads

    @property
    def ratio(self) -> float:
        return self.one_ms / self.several_ms


@dataclass(frozen=True)
class Check:
    """Result of the check: the number of requests, and of answers that differ from one thread's."""
    requests: int
    wrong: int              # results that differ in a byte from those of one thread
    by_helpers: int         # chunks
    repeated: int           # chunks run again because they were late


def random_feed(engine: Specialisation, batch: int, seed: int) -> dict[str, Array]:
    """Return random inputs: standard normal floats, and integers that are 0 or 1."""
    random = np.random.default_rng(seed)
    feed = {}
    for io in engine.inputs:
        shape = [batch if isinstance(extent, str) else extent for extent in io.shape]
        dtype = np.dtype(io.dtype)
        values = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
        feed[io.name] = values.astype(dtype)
    return feed


def ready(engine: Specialisation) -> ExecutionContext:
    """Create a context and run it once at batch 1."""
    context = engine.create_context()
    fill(context, random_feed(engine, 1, seed=0), 1)
    context.execute(1)
    return context


def fill(context: ExecutionContext, feed: dict[str, Array], batch: int) -> None:
    for name, array in feed.items():
        context.input(name, batch)[...] = array


def speeds(one: ExecutionContext, several: ExecutionContext, plan: Path, threads: int, seconds: float) -> list[Speed]:
    conditions: dict[str, AbstractContextManager[None]] = {
        "nothing else": nullcontext(),
        "a busy loop pinned to one core": busy_loop(pinned=True),
        "a busy loop anywhere": busy_loop(pinned=False),
        "a second copy of this": second_copy(plan, threads),
    }
    results = []
    for condition, neighbour in conditions.items():
        with neighbour:
            results.append(speed(condition, one, several, seconds))
    return results


def speed(condition: str, one: ExecutionContext, several: ExecutionContext, seconds: float) -> Speed:
    """Measure both contexts in alternating turns for `seconds`, at least one turn of each."""
    times: dict[ExecutionContext, list[float]] = {one: [], several: []}
    end = time.perf_counter() + seconds
    while not times[several] or time.perf_counter() < end:
        for context, durations in times.items():
            context.execute(1)          # warm-up: caches are cold, helper threads asleep
            for _ in range(TURN):
                begin = time.perf_counter()
                context.execute(1)
                durations.append(1e3 * (time.perf_counter() - begin))
    return Speed(condition, median(times[one]), median(times[several]), float(np.percentile(times[several], 99)))


def throughput(contexts: list[ExecutionContext], seconds: float) -> float:
    """Return the requests per second of all contexts, each running continuously on a thread of its own."""
    counts = [0] * len(contexts)

    def send(number: int) -> None:
        while time.perf_counter() < end:
            contexts[number].execute(1)
            counts[number] += 1

    end = time.perf_counter() + seconds
    clients = [threading.Thread(target=send, args=(i,)) for i in range(len(contexts))]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return sum(counts) / seconds


def check(one: Specialisation, several: Specialisation, requests: int, batch: int,
          contended: Callable[[], AbstractContextManager[None]] = bursts, seed: int = 0) -> Check:
    """Run `requests` of 1 to `batch` items under contention, and compare each answer with one thread's."""
    random = np.random.default_rng(seed)
    batches = [int(random.integers(1, batch + 1)) for _ in range(FEEDS)]
    feeds = [random_feed(one, items, seed + i) for i, items in enumerate(batches)]
    expected = [{name: array.tobytes() for name, array in one.run(feed).items()} for feed in feeds]
    context, wrong = several.create_context(), 0
    with contended():
        for _ in range(requests):
            chosen = int(random.integers(FEEDS))
            items = batches[chosen]
            fill(context, feeds[chosen], items)
            context.execute(items)
            wrong += any(context.output(name, items).tobytes() != answer for name, answer in expected[chosen].items())
            if random.integers(4) == 0:     # long enough for helpers to fall asleep
                time.sleep(random.uniform(0, LONGEST_PAUSE_S))
    helped, repeated = chunk_counts(context)
    context.close()
    return Check(requests, wrong, helped, repeated)


def chunk_counts(context: ExecutionContext) -> tuple[int, int]:
    """Return the number of chunks run by other threads than the caller's, and of late chunks that were run again."""
    execution = context.execution
    assert isinstance(execution, ParallelExecution), "a context of one thread has no other workers"
    return int(execution.workers[1:, WorkerRow.DONE].sum()), int(execution.workers[:, WorkerRow.REPEATED].sum())


def speed_section(options: argparse.Namespace, plan: Plan) -> str:
    """Return speed-up and throughput as a section of docs/benchmarks."""
    one = Specialisation(plan)
    alone, together = ready(one), ready(Specialisation(plan, options.threads))
    rows: list[list[Cell]] = [[s.condition, s.one_ms, s.several_ms, f"{s.ratio:.2f}", s.p99_ms]
                              for s in speeds(alone, together, options.plan, options.threads, options.seconds)]
    side_by_side = [alone, *(ready(one) for _ in range(options.threads - 1))]
    each = [throughput(contexts, options.seconds) for contexts in ([alone], side_by_side, [together])]
    together.close()
    header = ["beside", "1 thread, ms", f"{options.threads} threads, ms", "times faster", "p99, ms"]
    return (
        f"## Threads: {plan.name}, {plan.precision}\n\n`{options.command}`\n\nOn {machine()}; medians, batch 1.\n\n"
        f"{markdown_table(header, rows)}\n\n"
        f"Requests a second when they queue: one context of one thread {each[0]:.1f}, {options.threads} of them "
        f"{each[1]:.1f},\none context of {options.threads} threads {each[2]:.1f}.")


def check_section(options: argparse.Namespace, plan: Plan) -> str:
    """Run the check and return its result as a section of docs/benchmarks."""
    result = check(Specialisation(plan), Specialisation(plan, options.threads), options.requests, options.batch)
    return (
        f"## Every byte: {plan.name}, {plan.precision}, {options.threads} threads\n\n`{options.command}`\n\n"
        f"{result.requests} requests of 1 to {options.batch} items, a process on each core computing in bursts: "
        f"{result.wrong} differed\nfrom one thread's answer in any byte. Helpers ran {result.by_helpers} chunks, "
        f"{result.repeated} were late and run again.")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.threads", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="a plan file written by build-engine")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="on one request (default 2)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="for each condition (default 5)")
    parser.add_argument("--requests", type=int, default=5000, metavar="N", help="of the check (default 5000)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="items of its requests, at most (default 1)")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks")
    options = parser.parse_args(arguments)
    shown = [Path(argument).name if argument == str(options.plan) else argument for argument in arguments]
    options.command = " ".join(["python -m benchmarks.threads", *shown])
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    plan = read_plan(options.plan)
    sections = {"threads": (speed_section, options.seconds), "threads check": (check_section, options.requests)}
    for name, (measure, amount) in sections.items():
        if amount:
            text = measure(options, plan)
            print(text, end="\n\n")
            if options.write:
                write_section(f"{name} {plan.name} {plan.precision}", text)


if __name__ == "__main__":
    main(sys.argv[1:])
