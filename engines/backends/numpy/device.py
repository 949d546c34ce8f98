"""NumPy's serving side: lowers the plan's graph at load and calls the reference of each problem in order."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from infer_server.engines.backends.device import Device, Loaded, Show, final_before
from infer_server.engines.backends.fallback import FallbackStep
from infer_server.engines.backends.numpy.backend import lowered_for_numpy, machine_part
from infer_server.engines.errors import PlanVersionError
from infer_server.engines.ir.graph import BATCH, Array
from infer_server.engines.lowering.calls.calls import ProblemCall
from infer_server.engines.lowering.calls.placement import NO_BUFFER, Placement, strided
from infer_server.engines.lowering.steps import fallback_of
from infer_server.engines.plan.arena import Memory, array_at, plan_memory, write_halo
from infer_server.engines.plan.plan import Plan, TensorView, graph_of

Memories = Callable[[Placement], tuple[Array, int]]     # placement -> (bytes, offset of the tensor in them)


def solve(call: ProblemCall, memory: Memories, batch: int) -> None:
    """Run the reference of a call's problem on its tensors in place.

    Floating-point warnings are suppressed: infinities and NaN are ordinary results.
    """
    problem, items = call.problem, call.outputs[0].items
    count = batch if items == BATCH else int(items)
    inputs, outputs = ([strided(*memory(placement), view, count) for placement, view in zip(placed, views, strict=True)]
                       for placed, views in ((call.inputs, problem.inputs), (call.outputs, problem.outputs)))
    with np.errstate(all="ignore"):
        for target, result in zip(outputs, problem.reference(inputs, call.constants), strict=True):
            target[...] = result


class NumpyPlan:
    """Lowered graph of a plan, shared by all executions."""

    def __init__(self, plan: Plan) -> None:
        lowered = lowered_for_numpy(graph_of(plan), plan.max_batch)
        if machine_part(lowered, plan.max_batch) != plan.machine:
            raise PlanVersionError(f"{plan.name}: its buffers were laid out by another version of the compiler; "
                                   "build the plan again")
        self.plan, self.layout = plan, plan_memory(plan.machine.buffers, plan.machine.fills)
        constants = lowered.graph.constants
        self.constants = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                          for name, array in constants.items()}
        self.steps = [call if isinstance(call, ProblemCall)
                      else FallbackStep(fallback_of(lowered, call.node), constants)
                      for call in lowered.calls]

    @property
    def arena_bytes(self) -> int:
        return self.layout.total

    def execution(self, cpus: Sequence[int] | None) -> NumpyExecution:
        """Return a new execution. `cpus` is ignored: NumPy's threads are not pinned."""
        return NumpyExecution(self)


class NumpyExecution:
    """Buffers of one context, and a way to run the steps on them."""

    def __init__(self, loaded: NumpyPlan) -> None:
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
        whole = final_before(self._loaded.plan.machine)
        for index, step in enumerate((*self._steps(batch), None)):
            for view in whole.get(index, ()):
                show(view.name, self.output(view, batch))
            if step:
                step()

    def profile(self, batch: int, repeats: int) -> list[float]:
        return [min(times) for times in zip(*([_seconds(step) for step in self._steps(batch)] for _ in range(repeats)),
                                            strict=True)]

    def close(self) -> None:
        """Do nothing: there are no threads to stop."""

    def _steps(self, batch: int) -> list[Callable[[], None]]:
        self._prepare(batch)
        arrays = partial(self.output, batch=batch)
        return [partial(solve, step, self._bytes, batch) if isinstance(step, ProblemCall)
                else partial(step.run, arrays, batch)
                for step in self._loaded.steps]

    def _bytes(self, placement: Placement) -> tuple[Array, int]:
        if placement.buffer == NO_BUFFER:
            return self._loaded.constants[placement.constant], placement.offset
        return self._memory, self._loaded.layout.offsets[placement.buffer] + placement.offset

    def _prepare(self, batch: int) -> None:
        """Write the halos of batch slots that were not used before."""
        if batch > self._filled:
            for fill in self._loaded.plan.machine.fills:
                write_halo(self.output(fill.view, batch), fill, self._filled)
            self._filled = batch


def _seconds(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


class NumpyDevice:
    """The machine at hand, whatever it is."""

    @property
    def name(self) -> str:
        return "numpy"

    def at(self, number: int) -> NumpyDevice:
        """Return this device: there is only one."""
        return self

    def mismatch(self, plan: Plan) -> str:
        return ""

    def load(self, plan: Plan, threads: int, base: Loaded | None = None) -> NumpyPlan:
        """Load a plan. `threads` is ignored: NumPy decides itself."""
        return NumpyPlan(plan)


DEVICE: Device = NumpyDevice()
