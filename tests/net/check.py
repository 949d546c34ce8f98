"""Check of a case: build it, run each stage and the engine, and compare with ONNX."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.errors import InputError, ModelError
from infer_server.engines.ir.graph import Graph
from infer_server.engines.loading import load_engine
from infer_server.engines.ops import reference
from infer_server.engines.plan.file import write_plan
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from tests.net.evaluation import Array, expected, widened
from tests.net.graphs import ITEMS, Case, dtype_of
from tests.net.stages import float_stages, results_of

MAX_BATCH = 2           # so that ITEMS items run in slices
BACKENDS = {"llvm": "", "numpy": "numpy"}        # name -> target
# What may be refused, by a part of the message; the list may only shrink.
REFUSALS = (
    "cannot be run in slices",                                  # items that depend on each other, beyond max_batch
    "must be fixed here",                                       # a Slice or TopK along the items
    "batch == ",                                                # a Split of the items
    "does not fit an extent",                                   # a window that is wider than the image and its padding
)
seen: Counter[str] = Counter()      # results of the cases: "right", or why they were refused


class Wrong(AssertionError):
    """An engine's result differs from ONNX's."""


def check(case: Case) -> None:
    """Check a case. Raises Wrong, or an exception that is not a known refusal."""
    try:
        engines = {name: engine_of(plan_of(case, target)) for name, target in BACKENDS.items()}
        check_stages(case)
        for items in (1, MAX_BATCH, ITEMS) if case.symbolic else (ITEMS,):
            for name, engine in engines.items():
                compare(case, items, engine.run(case.feeds(items)), name)
    except (ModelError, InputError) as refusal:
        reason = next((reason for reason in REFUSALS if reason in str(refusal)), None)
        if reason is None:
            raise
        seen[f"refused: {reason}"] += 1
    else:
        seen["right"] += 1


def check_stages(case: Case) -> None:
    """Compare the graph's results after each stage; at the end tensors have the dtypes of the precision."""
    builder = builder_of(case)
    for stage, graph in float_stages(case, builder.config):
        compare(replace(case, precision="fp32"), ITEMS, results_of(case, graph), stage)
    graph = builder.graph(case.model())
    stored = builder.stored(graph, ranges_of(case, builder, graph))
    compare(case, ITEMS, results_of(case, stored), "quantise")


def builder_of(case: Case, target: str = "") -> Builder:
    max_batch = MAX_BATCH if case.symbolic else None
    return Builder(BuildConfig(case.precision, max_batch=max_batch, timing=False, target=target))


def plan_of(case: Case, target: str) -> Plan:
    builder = builder_of(case, target)
    graph = builder.graph(case.model())
    return builder.plan(graph, ranges_of(case, builder, graph))


def ranges_of(case: Case, builder: Builder, graph: Graph) -> dict[str, tuple[float, float]] | None:
    """Return the ranges that calibration on the case's own items would find, or None if the precision needs none."""
    if case.precision != "int8":
        return None
    watched = reference.run(graph, case.feeds(ITEMS), builder.edges(graph))
    return {name: (float(widened(array).min(initial=0)), float(widened(array).max(initial=0)))
            for name, array in watched.items()}


def engine_of(plan: Plan) -> Engine:
    """Load the plan by way of a file, as a server does."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "net.plan"
        write_plan(plan, path)
        return load_engine(path)


def compare(case: Case, items: int, results: dict[str, Array], by: str) -> None:
    """Raise Wrong if a result differs from ONNX's by more than rounding explains. by: what computed it."""
    values = {**case.feeds(items), **case.constants}
    for name, desired in expected(case.evaluators, values, case.outputs, case.precision).items():
        got, value = results[name], desired.value
        if value.dtype.name == "bfloat16" and got.dtype == np.uint16:
            got = got.view(dtype_of("bfloat16"))
        if (got.dtype, got.shape) != (value.dtype, value.shape):
            raise Wrong(f"{by}: {name} of {items} items is {got.dtype}{list(got.shape)}, "
                        f"not {value.dtype}{list(value.shape)}")
        if (wrong := desired.wrong(got)).any():
            place: Any = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise Wrong(f"{by}: {name}{list(place)} of {items} items is {got[place]}, not {value[place]} "
                        f"(+-{desired.tolerance[place]:.3g}); {wrong.sum()} of {wrong.size} are wrong")
