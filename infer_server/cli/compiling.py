"""The whole way from an ONNX file to a plan: import, calibrate, choose ranges by measured error, compile."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.compiler.builder import BuildConfig, Builder
from engines.plan.plan import Plan
from infer_server.cli.calibrating import Calibration, Say, calibrate


@dataclass(frozen=True)
class Result:
    """A plan, and what the passes did and refused."""
    plan: Plan
    notes: Sequence[Any] = field(default=())


def compile_model(model: str | Path, config: BuildConfig, calibration: Calibration, say: Say,
                  progress: Callable[[int, int, str], None] | None = None) -> Result:
    """Build a plan. Raises an EngineError that says what is wrong with the model, the options or the data."""
    builder = Builder(config, progress)
    graph = builder.graph(model)
    for notice in (*builder.notices, *filter(None, [builder.arithmetic_note])):
        say(notice)
    metadata: dict[str, Any] = {"model": Path(model).name}
    ranges = None
    if config.precision == "int8" or config.precision == "best" and (calibration.source or calibration.cache):
        found = calibrate(builder, graph, calibration, say)
        graph, ranges = found.graph, found.table.ranges
        metadata |= found.report
    plan = builder.plan(graph, ranges, metadata)
    return Result(plan, builder.log)
