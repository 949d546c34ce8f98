"""Data of a report: a row for each kernel, joined from the plan, its measurements and the record of its build."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from infer_server.cli.profile import Profile
from infer_server.comparing.comparison import Comparison
from infer_server.engines.compiler.specialise import graph_at
from infer_server.engines.errors import EngineError
from infer_server.engines.ir.serialize import graph_to_json
from infer_server.engines.plan.coverage import writes_border
from infer_server.engines.plan.plan import Plan, Step
from infer_server.engines.plan.roofline import expected_us


@dataclass(frozen=True)
class Measured:
    """Measurements of a plan, each with the reason why it is missing.

    Attributes
    ----------
    profile : Profile, optional
        Times of the kernels on this machine.
    comparison : Comparison, optional
        Errors of the plan's layers against the model.
    no_profile, no_comparison : str
        Why there is none.
    """
    profile: Profile | None = None
    comparison: Comparison | None = None
    no_profile: str = "not measured"
    no_comparison: str = "not measured"


@dataclass(frozen=True)
class Row:
    """One kernel.

    Attributes
    ----------
    step : Step
    index : int
        Index in the plan's steps.
    ops : tuple of str
        Operators that it computes.
    tensors : tuple of str
        Tensors that it writes.
    us, bound_us : float, optional
        Time of an item and its lower bound by the roofline model, in microseconds.
    limit : str
        The bound's cause: a precision, or a level of memory.
    sqnr_db : float, optional
        SQNR of its result against the model; the noise of all layers before it counts.
    noise : float, optional
        Share of the outputs' noise power that its layer adds.
    shape : tuple
        Shape of its result.
    kept : bool
        True if its layer was kept in float.
    """
    step: Step
    index: int
    ops: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    us: float | None = None
    bound_us: float | None = None
    limit: str = ""
    sqnr_db: float | None = None
    noise: float | None = None
    shape: tuple[Any, ...] = ()
    kept: bool = False

    @property
    def is_border(self) -> bool:
        return writes_border(self.step)

    @property
    def precision(self) -> str:
        return "reference" if self.step.fallback else self.step.precision

    @property
    def title(self) -> str:
        """Operators in short: "Conv + Relu"."""
        counts = Counter(self.ops)
        return " + ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items()) or "border"


@dataclass(frozen=True)
class ReportData:
    """All that the sections of a report show."""
    plan: Plan
    measured: Measured = field(default_factory=Measured)
    size: int = 0           # bytes of the plan's file; 0: unknown

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.plan.metadata

    @cached_property
    def shown(self) -> Plan:
        """Plan whose kernels are shown: of a program, that of the segment with the most steps."""
        if self.plan.program is None:
            return self.plan
        plans = [plan for segment in self.plan.program.segments for plan in segment.plans]
        return max(plans, key=lambda plan: len(plan.machine.steps), default=self.plan)

    @cached_property
    def graph(self) -> Mapping[str, Any]:
        """Graph that the shown plan was lowered from, as JSON; {} if the plan has none."""
        if self.shown.graph or self.shown.open is None:
            return self.shown.graph
        try:
            return graph_to_json(graph_at(self.shown))[0]
        except EngineError:     # stripped
            return {}

    @property
    def record(self) -> Mapping[str, Any]:
        """Metadata of the calibration."""
        return self.shown.metadata

    @cached_property
    def basis(self) -> str:
        """Origin of the kernels' times, as words that end a sentence; "" without times."""
        if self.measured.profile:
            return "measured on this machine for the report"
        if expected_us(self.shown):
            return "expected by the cost model"
        return "as timed at the build" if any(step.time_us for step in self.shown.machine.steps) else ""

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        nodes = {node["name"]: node for node in self.graph.get("nodes", ())}
        lines = {line.step.name: line for line in self.measured.profile.lines} if self.measured.profile else {}
        modelled, rows = expected_us(self.shown), []
        sqnr, noise = self._sqnr(), self.noise
        types: Mapping[str, Any] = self.graph.get("types", {})
        for index, step in enumerate(self.shown.machine.steps):
            node, line = nodes.get(step.name, {}), lines.get(step.name)
            us = line.seconds * 1e6 / line.batch if line else modelled[index] if modelled else step.time_us or None
            tensors = tuple(node.get("outputs", ()))
            rows.append(Row(
                step, index, _ops(step, node), tensors, us, line.bound.seconds * 1e6 / line.batch if line else None,
                line.bound.limit if line else "", next((sqnr[name] for name in tensors if name in sqnr), None),
                next((noise[name] for name in step.fuses if name in noise), None),
                tuple(types.get(tensors[0], {}).get("shape", ())) if tensors else (),
                not set(self.metadata.get("kept_float", ())).isdisjoint(step.fuses)))
        return tuple(rows)

    def _sqnr(self) -> dict[str, float]:
        comparison = self.measured.comparison
        return {errors.name: errors.sqnr_db for errors in (*comparison.layers, *comparison.outputs)
                if not errors.wrong} if comparison else {}

    @cached_property
    def noise(self) -> dict[str, float]:
        """Share of the noise by the layer's first ONNX node."""
        return {one["layer"]: one["noise"] for one in self.sensitivity}

    @property
    def sensitivity(self) -> Sequence[Mapping[str, Any]]:
        """Noise that each layer adds, as the build recorded it; () if it was not measured."""
        searches = [self.record.get(name) for name in ("target", "limit")]
        layers = self.record.get("sensitivity") or next(
            (one["layers"] for one in searches if isinstance(one, Mapping) and one.get("layers")), ())
        return [one for one in layers if isinstance(one.get("layer"), str) and _is_real(one.get("noise"))]

    @cached_property
    def total_us(self) -> float:
        """Sum of the kernels' times."""
        return sum(row.us or 0.0 for row in self.rows)

    def slowest(self, count: int) -> list[Row]:
        return sorted((row for row in self.rows if row.us), key=lambda row: -(row.us or 0.0))[:count]


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _ops(step: Step, node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the operators of a kernel; without a graph, its family."""
    if node.get("op") == "Fused":
        return tuple(str(inner["op"]) for inner in node.get("body", ()))
    if node.get("op"):
        return (str(node["op"]),)
    return () if writes_border(step) else (step.tactic.partition(":")[0] or "kernel",)
