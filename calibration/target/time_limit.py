"""Search for the layers to keep in float so that the outputs have the least noise within a limit of time."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from infer_server.calibration.target.path import PrecisionPath
from infer_server.calibration.target.plan_times import PlanTimes
from infer_server.calibration.target.sensitivity import NoiseMeter, costs_of
from infer_server.calibration.target.sets import FP32, INT8, LayerSets, Mix
from infer_server.calibration.trials.judge import Judge
from infer_server.engines.compiler.ranges import Progress
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.recipe import Recipe


def quietest_within(max_slowdown: float, subject: Subject, recipe: Recipe, sets: LayerSets,
                    judge: Callable[[int], Judge], progress: Progress) -> tuple[Mix, dict[str, Any]]:
    """Return the mix of precisions, and fields for the plan's metadata.

    Parameters
    ----------
    max_slowdown : float
        Time that the layers in float may add, as a share of the time of all layers in INT8.
    subject : Subject
    recipe : Recipe
    sets : LayerSets
        Its precision becomes the fastest float one, unless the options name another.
    judge : callable
        Returns the evaluator of recipes on calibration items for so many trials.
    progress : callable
        Called with (stage, done, of, layer).

    Raises
    ------
    ConfigError
        Kernels are not timed.
    CalibrationError
        No output can be compared.
    """
    if not (int8_us := sets.us(Mix())):
        raise ConfigError("a limit of time needs the times of kernels, and this build has none: leave --no-timing out, "
                          "or build on the target's machine")
    asked, costs = subject.builder.config.float_type, costs_of(subject, recipe)
    sets.float_type = min(costs, key=lambda name: sum(costs[name].values())) if asked == FP32 else asked
    meter = NoiseMeter(subject, judge(len(sets.layers) + 2), recipe, sets.layers)
    measured = meter.sensitivities(costs.get(sets.float_type, {}),
                                   lambda done, of, layer: progress("ranking", done, of, layer))
    noises = {INT8: {one.layer: one.noise for one in measured}, sets.float_type: {}}
    times = PlanTimes(subject, recipe, sets)
    mix = times.fitting(max_slowdown, lambda most_us: PrecisionPath(sets, noises, costs, most_us, progress).last())
    return mix, {"kept": [layer.name for layer in sets.in_order(mix.kept)], "float_type": sets.float_type,
                 "max_slowdown": max_slowdown, "slowdown": times.ratio(mix) - 1.0,
                 "us": {"int8": int8_us, "chosen": sets.us(mix)},
                 "layers": [{**asdict(one), "layer": one.layer.name} for one in measured]}
