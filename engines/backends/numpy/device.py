"""Runs plans by NumPy: lowers a plan's graph when it is loaded, and calls the reference of each problem in turn."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from engines.backends.device import Device, Loaded, Show, whole_before
from engines.backends.numpy.backend import lowered_for_numpy, machine_part
from engines.errors import PlanVersionError
from engines.ir.graph import BATCH, Array
from engines.lowering.calls.calls import Call
from engines.lowering.calls.placement import NO_BUFFER, Placement, strided
from engines.lowering.steps import fallback_of
from engines.plan.arena import Memory, array_at, plan_memory, write_halo
from engines.plan.plan import Plan, TensorView, graph_of
from engines.runtime.fallback import FallbackStep

Memories = Callable[[Placement], tuple[Array, int]]     # the bytes that a tensor lies in; from which one on


def solve(call: Call, memory: Memories, batch: int) -> None:
    """Run the reference of a call's problem on its tensors where they lie. Infinities and NaN are results like others,
    of which nothing is said."""
    problem, items = call.problem, call.outputs[0].items
    count = batch if items == BATCH else int(items)
    inputs, outputs = ([strided(*memory(placement), view, count) for placement, view in zip(placed, views, strict=True)]
                       for placed, views in ((call.inputs, problem.inputs), (call.outputs, problem.outputs)))
    with np.errstate(all="ignore"):
        for target, result in zip(outputs, problem.reference(inputs, call.constants), strict=True):
            target[...] = result


class LoadedPlan:
    """A plan's graph, lowered; shared by all executions."""

    def __init__(self, plan: Plan) -> None:
        lowered = lowered_for_numpy(graph_of(plan), plan.max_batch)
        if machine_part(lowered, plan.max_batch) != plan.machine:
            raise PlanVersionError(f"{plan.name}: another version of the compiler laid out its tensors; build it again")
        self.plan, self.layout = plan, plan_memory(plan.machine.buffers, plan.machine.fills)
        constants = lowered.graph.constants
        self.constants = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                          for name, array in constants.items()}
        self.steps = [call if isinstance(call, Call) else FallbackStep(fallback_of(lowered, call.node), constants)
                      for call in lowered.calls]

    @property
    def arena_bytes(self) -> int:
        return self.layout.total

    def execution(self, cpus: Sequence[int] | None) -> NumpyExecution:
        """cpus: NumPy's own threads are where they are."""
        return NumpyExecution(self)


class NumpyExecution:
    """The buffers of one context, on which the steps run."""

    def __init__(self, loaded: LoadedPlan) -> None:
        self._loaded, self._memory, self._filled = loaded, Memory(loaded.layout.total).bytes, 0

    def input(self, view: TensorView, batch: int) -> Array:
        self._prepare(batch)
        return self.output(view, batch)

    def output(self, view: TensorView, batch: int) -> Array:
        return array_at(self._memory, self._loaded.layout.offsets[view.buffer], view, batch)

    def run(self, batch: int) -> None:
        for step in self._steps(batch):
            step()

    def show(self, batch: int, show: Show) -> None:
        whole = whole_before(self._loaded.plan.machine)
        for index, step in enumerate((*self._steps(batch), None)):
            for view in whole.get(index, ()):
                show(view.name, self.output(view, batch))
            if step:
                step()

    def profile(self, batch: int, repeats: int) -> list[float]:
        return [min(times) for times in zip(*([_seconds(step) for step in self._steps(batch)] for _ in range(repeats)),
                                            strict=True)]

    def close(self) -> None:
        """There are no threads to stop."""

    def _steps(self, batch: int) -> list[Callable[[], None]]:
        self._prepare(batch)
        arrays = partial(self.output, batch=batch)
        return [partial(solve, step, self._bytes, batch) if isinstance(step, Call) else partial(step.run, arrays, batch)
                for step in self._loaded.steps]

    def _bytes(self, placement: Placement) -> tuple[Array, int]:
        if placement.buffer == NO_BUFFER:
            return self._loaded.constants[placement.constant], placement.offset
        return self._memory, self._loaded.layout.offsets[placement.buffer] + placement.offset

    def _prepare(self, batch: int) -> None:
        """Write the halos of the batch slots that none has asked for so far."""
        if batch > self._filled:
            for fill in self._loaded.plan.machine.fills:
                write_halo(self.output(fill.view, batch), fill, self._filled)
            self._filled = batch


def _seconds(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


class NumpyDevice:
    """Any machine."""

    @property
    def name(self) -> str:
        return "numpy"

    def at(self, number: int) -> NumpyDevice:
        """The same: it is one."""
        return self

    def mismatch(self, plan: Plan) -> str:
        return ""

    def load(self, plan: Plan, threads: int, beside: Loaded | None = None) -> LoadedPlan:
        """threads: NumPy has as many as it likes."""
        return LoadedPlan(plan)


DEVICE: Device = NumpyDevice()
