"""Times of whole plans with layers in float, relative to the plan of all layers in INT8.

The sum of the kernels' times leaves out that wider tensors evict each other from the caches: MobileNetV2 with 36 layers
in float takes 1.20 times the sum of INT8, and 1.37 times as long.
"""
from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

from infer_server.calibration.target.sets import LayerSets, Mix, keeping
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.machine.clock import thread_seconds
from infer_server.engines.passes.quantization.recipe import prepared
from infer_server.engines.runtime.context import ExecutionContext
from infer_server.engines.runtime.specialisation import Specialisation

MOST_TRIES = 4          # limits of the kernels' times that are tried until the plan is within its own
ENOUGH = 0.8            # share of the limit that a plan takes which is not tried to fill further
TURN_SECONDS, SECONDS = 0.02, 1.0       # of one plan in a row, and of a comparison
FEWEST_TURNS = 5
ERROR = 0.005           # of a ratio


class PlanTimes:
    """Measurements of whole plans on one thread, in turns with the plan of all layers in INT8."""

    def __init__(self, subject: Subject, recipe: Recipe, sets: LayerSets) -> None:
        self._subject, self._recipe, self._sets = subject, recipe, sets
        self._ratios: dict[Mix, float] = {Mix(): 1.0}
        self._int8: ExecutionContext | None = None

    def ratio(self, mix: Mix) -> float:
        """Return the time of the plan of a mix relative to that of all layers in INT8."""
        if mix not in self._ratios:
            self._int8 = self._int8 or self._context(Mix())
            context = self._context(mix)
            self._ratios[mix] = _ratio(context, self._int8)
            context.close()
        return self._ratios[mix]

    def fitting(self, max_slowdown: float, chosen: Callable[[float], Mix]) -> Mix:
        """Return the mix that `chosen` gives for a limit of the kernels' times by which the plan is within the limit.

        If the plan takes longer, the limit of the kernels' times shrinks in proportion, and grows again if that is too
        much.
        """
        int8_us, fits = self._sets.us(Mix()), Mix()
        low, share, high = 0.0, max_slowdown, 0.0       # shares that fit, are tried next, and do not fit
        for _ in range(MOST_TRIES):
            mix = chosen((1.0 + share) * int8_us)
            excess = self.ratio(mix) - 1.0
            if excess <= max_slowdown + ERROR:
                low, fits = share, mix
                if not high or excess >= ENOUGH * max_slowdown:
                    break
                share = (low + high) / 2
            else:
                high = min(share, self._sets.us(mix) / int8_us - 1.0)
                share = (low + high) / 2 if low else high * max_slowdown / excess
        return fits

    def _context(self, mix: Mix) -> ExecutionContext:
        """Compile the plan of a mix as the build will, and return a context of it with inputs of zeros."""
        builder = self._subject.builder
        log = list(builder.log)
        with keeping(builder, *self._sets.precisions(mix)):
            graph = prepared(self._subject.graph, self._recipe, builder.config.keep_float)
            engine = Specialisation(builder.plan(graph, self._recipe.ranges))
        builder.log[:] = log
        context = engine.create_context()
        for io in engine.inputs:
            context.input(io.name)[...] = 0
        return context


def _ratio(context: ExecutionContext, reference: ExecutionContext) -> float:
    """Return the median of the ratios of two contexts' times in turns."""
    ratios: list[float] = []
    end = perf_counter() + SECONDS
    while len(ratios) < FEWEST_TURNS or perf_counter() < end:
        ratios.append(_turn(context) / _turn(reference))
    return median(ratios)


def _turn(context: ExecutionContext) -> float:
    """Return the CPU time of a run, the median of those of a turn; the first one fills the caches."""
    context.execute()
    times: list[float] = []
    end = perf_counter() + TURN_SECONDS
    while not times or perf_counter() < end:
        begin = thread_seconds()
        context.execute()
        times.append(thread_seconds() - begin)
    return median(times)
