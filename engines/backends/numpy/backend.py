"""NumPy's compiler side: lowers a graph and lays out its buffers for the single target "numpy"."""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from infer_server.engines.backends.base import Backend, Progress, Session, TimedNode
from infer_server.engines.ir.graph import Graph
from infer_server.engines.lowering.buffers import buffers_of, fills_of, write_borders
from infer_server.engines.lowering.calls.calls import name_of
from infer_server.engines.lowering.lower import Lowered, lower
from infer_server.engines.lowering.steps import io_views, step_of
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.arena import check_memory
from infer_server.engines.plan.plan import MachinePart, Plan
from infer_server.engines.plan.roofline import Level, Peaks
from infer_server.engines.plan.symbolic.plans import CompiledKernel

SIDE, BYTES = 512, 1 << 26      # matrix rows and array bytes of the peak measurement


def lowered_for_numpy(graph: Graph, max_batch: int) -> Lowered:
    """Lower a graph for NumPy, with one lane per vector so that grouped convolutions keep their groups."""
    return write_borders(lower(graph, lanes=1), max_batch)


def machine_part(lowered: Lowered, max_batch: int) -> MachinePart:
    """Return the buffers and steps of a lowered graph. The computation itself stays in the plan's graph."""
    steps = tuple(step if step.fallback else replace(step, tactic=f"{step.symbol}: numpy")
                  for step in (step_of(lowered, call) for call in lowered.calls))
    inputs, outputs = (io_views(lowered, names) for names in (lowered.graph.inputs, lowered.graph.outputs))
    return MachinePart("numpy", "numpy", inputs, outputs, buffers_of(lowered, max_batch), steps, fills_of(lowered))


@dataclass(frozen=True)
class NumpyChosen:
    """Lowered graph. Each problem has one implementation, so there are no choices."""
    lowered: Lowered
    max_batch: int

    @property
    def graph(self) -> Graph:
        return self.lowered.graph

    def times(self) -> list[TimedNode]:
        return [TimedNode(name_of(call), call.node.origin, 0.0) for call in self.lowered.calls]


class NumpySession:
    """Session without timing. A plan's steps are informative: they are derived again from the graph at load."""
    target = "numpy"
    arithmetic = ("fp32", "int8")

    timed: Mapping[str, Mapping[str, float]] = {}
    dynamic_kernels: Sequence[CompiledKernel] | None = None

    @property
    def processor(self) -> str:
        return detect().model

    def take_over(self, plan: Plan, dynamic: Sequence[CompiledKernel] = ()) -> None:
        """Do nothing: constants are read from the graph."""

    def choose(self, graph: Graph, max_batch: int, opt_batch: int | None = None,
               progress: Progress | None = None) -> NumpyChosen:
        lowered = lowered_for_numpy(graph, max_batch)
        check_memory(graph.name, buffers_of(lowered, max_batch), max_batch)
        return NumpyChosen(lowered, max_batch)

    def choose_symbolic(self, graph: Graph, max_batch: int, opt_batch: int | None = None) -> None:
        """Return None: NumPy needs no dynamic kernels."""

    def settle(self, chosen: NumpyChosen, progress: Progress | None = None) -> NumpyChosen:
        return chosen

    def assemble(self, chosen: NumpyChosen) -> MachinePart:
        return machine_part(chosen.lowered, chosen.max_batch)

    def tuned(self, plan: Plan) -> Plan:
        return plan


class NumpyBackend:
    """Backend with the single target "numpy"."""
    name = "numpy"
    targets = ("numpy",)
    selects = True

    def session(self, target: str, cache: TimingCache, timing: bool) -> NumpySession:
        return NumpySession()

    def session_here(self, cache: TimingCache, sibling: Session) -> NumpySession:
        return NumpySession()

    def peaks(self) -> Peaks:
        """Measure matrix products in the type that each precision is computed in, and the bandwidth of a copy."""
        macs = {}
        for precision, dtype in (("fp32", np.float32), ("int8", np.float64)):
            a = np.ones((SIDE, SIDE), dtype)
            macs[precision] = SIDE ** 3 / _least_seconds(lambda a=a: a @ a)     # type: ignore[misc]
        memory = np.ones(BYTES, np.uint8)
        return Peaks(detect().model, "numpy", macs, (Level("memory", math.inf, BYTES / _least_seconds(memory.copy)),))


def _least_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


BACKEND: Backend = NumpyBackend()
