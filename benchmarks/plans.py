"""Comparison of two plans of one model, before and after a change: costs in turns, and outputs byte for byte.

    python -m benchmarks.plans before.plan after.plan
    python -m benchmarks.plans before/ after/ --batch 1,8 --seconds 10      # folders: all plans that both have, by name
    python -m benchmarks.plans fixed.plan open.plan         # open.plan, specialised for the fixed shapes

Both run in one process, so each evicts the weights and buffers of the other from the nearest caches, as in a server
with several models. One thread, in user-mode cycles where the machine counts them, else in CPU time. --steps lists
the steps whose tactics differ, with the time of each within the network.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from benchmarks.measure.cycles import Counter
from benchmarks.measure.measuring import WorkClock, interleaved
from infer_server.calibration.data.generated import generated
from infer_server.engines import load_engine
from infer_server.engines.compiler.specialise import graph_at
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.plan.plan import Step
from infer_server.engines.runtime.context import ExecutionContext
from infer_server.engines.runtime.specialisation import Specialisation

PROFILES = 30           # runs in which every step is timed


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.plans", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--batch", default="1", metavar="N,...")
    parser.add_argument("--seconds", type=float, default=5.0, help="of taking turns, for each batch")
    parser.add_argument("--steps", action="store_true", help="what steps of other tactics take")
    options = parser.parse_args(arguments)
    clock = WorkClock(Counter())
    print(f"| plan | batch | before, {clock.unit} | after | before / after: median (quartiles) | outputs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, paths in _pairs(options.before, options.after):
        engines, graph = _loaded(paths)
        for batch in map(int, options.batch.split(",")):
            print(f"| {name} | {batch} | {compared(engines, graph, batch, clock, options.seconds)} |", flush=True)
            if options.steps:
                print("\n".join(_steps(engines, batch)), flush=True)


def _loaded(paths: Sequence[Path]) -> tuple[list[Specialisation], Graph]:
    """Return the engines, and the graph that one of them was lowered from.

    A plan with dynamic shapes is specialised for the other plan's shapes, or for its usual shapes if both are dynamic.
    """
    loaded = [load_engine(path, cache=False) for path in paths]
    first = next((engine for engine in loaded if engine.plan.open is None), loaded[0])
    shapes = first.usual_shapes()
    return [engine.at(shapes) for engine in loaded], graph_at(first.plan)


def _pairs(before: Path, after: Path) -> Iterator[tuple[str, tuple[Path, Path]]]:
    if before.is_file():
        yield after.stem, (before, after)
        return
    for path in sorted(before.glob("*.plan")):
        if (after / path.name).exists():
            yield path.stem, (path, after / path.name)


def compared(engines: Sequence[Specialisation], graph: Graph, batch: int, clock: WorkClock, seconds: float) -> str:
    """Measure both engines and return a row of the table."""
    contexts = [engine.create_context() for engine in engines]
    feed = next(generated(engines[0].inputs, graph, batch).batches(batch))
    results = [_run(engine, context, feed, batch) for engine, context in zip(engines, contexts, strict=True)]
    same = all(np.array_equal(ours, theirs, equal_nan=True) for ours, theirs in zip(*results, strict=True))
    costs = interleaved(clock, {i: partial(context.execute, batch) for i, context in enumerate(contexts)}, seconds)
    ratios = [before / after for before, after in zip(costs[0], costs[1], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    verdict = "equal" if same else "differ"
    return f"{median(costs[0]):.4g} | {median(costs[1]):.4g} | {middle:.3f} ({low:.3f} to {high:.3f}) | {verdict}"


def _run(engine: Specialisation, context: ExecutionContext, feed: Mapping[str, Array], batch: int) -> list[Array]:
    for io in engine.inputs:
        context.input(io.name, batch)[...] = feed[io.name]
    context.execute(batch)
    return [np.array(context.output(io.name, batch)) for io in engine.outputs]


def _steps(engines: Sequence[Specialisation], batch: int) -> Iterator[str]:
    """Yield a line for each step whose tactic differs between the plans, largest change of time first."""
    profiles = [engine.create_context().profile(batch, PROFILES) for engine in engines]
    pairs: list[tuple[tuple[Step, float], tuple[Step, float]]] = list(zip(*profiles, strict=True)) if len(
        {len(profile) for profile in profiles}) == 1 else []
    changed = [(ours, theirs) for ours, theirs in pairs if ours[0].tactic != theirs[0].tactic]
    for (step, before), (other, after) in sorted(changed, key=lambda pair: -abs(pair[1][1] - pair[0][1])):
        yield f"    {1e6 * before:9.1f} -> {1e6 * after:9.1f} us  {step.name}: {step.tactic} -> {other.tactic}"


if __name__ == "__main__":
    main(sys.argv[1:])
