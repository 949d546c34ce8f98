"""Search for the layers to keep in float so that a metric drops no more than allowed, at the least cost in time.

1. The metric of the all-INT8 model is measured on evaluation items, which no range was chosen on. If it is within the
   target, nothing else is done.
2. All layers are scored in each float precision, the fastest first, until one meets the target. If the fastest misses
   it, layers move to float32, too.
3. The noise that each layer adds is measured on calibration items (infer_server.calibration.target.sensitivity).
4. A set of layers is selected by these measurements (infer_server.calibration.target.selection).
5. The chosen set is scored on test items, on which nothing was chosen (infer_server.calibration.target.split).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infer_server.calibration.target.evaluation import Evaluation
from infer_server.calibration.target.labels import FOLDERS, read_labels
from infer_server.calibration.target.metrics import AGREEMENT, TOP1, check_metric
from infer_server.calibration.target.path import PrecisionPath
from infer_server.calibration.target.plan_times import PlanTimes
from infer_server.calibration.target.selection import Selection
from infer_server.calibration.target.sensitivity import Costs, NoiseMeter, Sensitivity, costs_of, layers_of
from infer_server.calibration.target.sets import FP32, INT8, Mix, ScoredSets
from infer_server.calibration.target.split import LabelledItems, Split
from infer_server.calibration.trials.judge import Judge
from infer_server.engines.compiler.ranges import Notify, Progress
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.recipe import Recipe

SHOWN = 5               # layers named in the notice
MAX_SLOWDOWN = 0.25     # share of the INT8 time that a target may add if the options do not say


@dataclass(frozen=True)
class AccuracyTarget:
    """Accuracy that an INT8 build must keep: `Calibration(data, target=AccuracyTarget(0.005))`.

    Attributes
    ----------
    max_drop : float
        How far the metric may fall below the float model's, in the metric's unit: 0.005 is half a per cent of top-1.
    metric : str
        "agreement", "top1", "cosine" or "script.py:function" (infer_server.calibration.target.metrics); "" chooses by
        the outputs and labels.
    data : path, feeds or function
        Items on which layers are chosen, as Calibration.data. None: every fourth calibration item, which ranges then
        do not see.
    labels : str, path or sequence of int
        Class of each evaluation item, for "top1" and functions (infer_server.calibration.target.labels).
    test : path, feeds or function
        Items for the reported score; nothing is chosen on them. None: a part of the evaluation or calibration items
        if there are enough (infer_server.calibration.target.split).
    test_labels : str, path or sequence of int
        Class of each test item. "": `labels`, if these are "folders" or a .csv file.
    max_slowdown : float, optional
        How much longer than all layers in INT8 the plan may take: 0.25 is a quarter. If the target needs more, the
        closest plan within this time is built. None: no limit.

    Raises
    ------
    ConfigError
        A value is unknown or out of range.
    """
    max_drop: float
    metric: str = ""
    data: Any = None
    labels: str | Path | Sequence[int] = ""
    test: Any = None
    test_labels: str | Path | Sequence[int] = ""
    max_slowdown: float | None = MAX_SLOWDOWN

    def __post_init__(self) -> None:
        if self.max_slowdown is not None and not self.max_slowdown >= 0.0:
            raise ConfigError(f"max_slowdown={self.max_slowdown}: it is a share of the INT8 time, at least 0")
        if not self.max_drop >= 0.0:
            raise ConfigError(f"max_drop={self.max_drop}: it is the allowed fall of the metric, at least 0")
        check_metric(self.metric, bool(self.labels))
        if self.labels and self.data is None:
            raise ConfigError("labels are of evaluation items: give evaluation data, too")
        if self.test_labels and self.test is None:
            raise ConfigError("test labels are of test items: give test data, too")
        if self.test is not None and self.labels and not self._labels_of_test:
            raise ConfigError("the labels are those of the evaluation items: give labels of the test items, too")

    def facts(self) -> dict[str, Any]:
        """Return all that affects the choice of layers except the items, as JSON values."""
        script = self.metric.rpartition(":")[0]
        labels = [str(each) if isinstance(each, str | Path) else list(map(int, each))
                  for each in (self.labels, self.test_labels)]
        return {"max_drop": self.max_drop, "metric": self.metric, "labels": labels, "max_slowdown": self.max_slowdown,
                "files": [Path(file).read_bytes().hex() for file in (script, *labels)
                          if isinstance(file, str) and Path(file).is_file()]}

    def labels_of(self) -> list[int] | None:
        """Return the labels of the evaluation items. Raises CalibrationError."""
        return read_labels(self.labels, self.data) if self.labels else None

    def test_labels_of(self) -> list[int] | None:
        """Return the labels of the test items. Raises CalibrationError."""
        return read_labels(self._labels_of_test, self.test) if self._labels_of_test else None

    @property
    def _labels_of_test(self) -> str | Path | Sequence[int]:
        """Labels of the test items: a file of paths, or folders, may serve both sets."""
        serves_both = isinstance(self.labels, str | Path) and (
            str(self.labels) == FOLDERS or Path(self.labels).suffix == ".csv")
        return self.test_labels or (self.labels if serves_both else "")


@dataclass(frozen=True)
class Outcome:
    """Result of a search.

    Attributes
    ----------
    kept : tuple of str
        ONNX nodes to keep in float.
    float_type : str
        Their precision; "" if there are none.
    fp32 : tuple of str
        Those of them that compute in float32 in any case.
    report : dict
        Fields for the plan's metadata: metric, items, scores, and the sensitivity of each layer.
    """
    kept: tuple[str, ...]
    float_type: str
    fp32: tuple[str, ...]
    report: dict[str, Any]


class TargetSearch:
    """One search for the layers to keep in float."""

    def __init__(self, target: AccuracyTarget, subject: Subject, split: Split, notify: Notify,
                 progress: Progress) -> None:
        """Run the float model on the evaluation items. Raises ConfigError, CalibrationError."""
        self._split = split
        self._target, self._subject, self._notify, self._progress = target, subject, notify, progress
        self._ran, self._runs = 0, 0
        self._stage: tuple[str, int, int, str] | None = None        # of the selection, while it runs
        self._times: PlanTimes | None = None
        self._evaluation = Evaluation(subject, split.evaluation, target.metric, self._tick)
        count = len(self._evaluation)
        self._runs = 2 * count
        least = 1.0 / count
        if self._evaluation.metric.name in (AGREEMENT, TOP1) and target.max_drop < least:
            notify(f"{count} evaluation items resolve {self._evaluation.metric.name} to {100 * least:.1f} %; a "
                   f"target of {100 * target.max_drop:g} % needs {round(1 / max(target.max_drop, 1e-4))} items or more")

    def run(self, recipe: Recipe, judge: Callable[[int], Judge]) -> Outcome:
        """Return the layers to keep in float.

        Parameters
        ----------
        recipe : Recipe
            Ranges of the build.
        judge : callable
            Returns the evaluator of recipes on calibration items for so many trials; called if INT8 alone misses the
            target.
        """
        graph, config = self._subject.graph, self._subject.builder.config
        sets = ScoredSets(self._subject, recipe, layers_of(graph, config.keep_float), self._evaluation)
        mix, measured = self._selected(sets, recipe, judge)
        self._stage = None
        outcome = self._outcome(sets, measured, mix)
        if self._split.test is not None:
            outcome.report["test"] = self._tested(self._split.test, recipe, outcome)
        return outcome

    def _selected(self, sets: ScoredSets, recipe: Recipe, judge: Callable[[int], Judge]
                  ) -> tuple[Mix, Sequence[Sensitivity]]:
        """Return the precision of each layer, and the noise of those that were measured."""
        none = Mix()
        if sets.drop(none) <= self._target.max_drop:
            return none, ()
        costs = costs_of(self._subject, recipe)
        self._runs += len(self._evaluation) * len(costs)
        precisions = self._precisions(sets, costs)
        sets.float_type = precisions[0]
        is_mixed = len(precisions) > 1
        trials = (1 + is_mixed) * len(sets.layers) + 2
        meter = NoiseMeter(self._subject, judge(trials), recipe, sets.layers)
        measured = meter.sensitivities(costs[sets.float_type], self._ranking)
        noises = {INT8: {one.layer: one.noise for one in measured}} | {
            name: meter.of_float(name, self._ranking) if is_mixed and name != FP32 else {} for name in precisions}

        def chosen(most_us: float) -> Mix:
            path = PrecisionPath(sets, noises, costs, most_us, self._selecting)
            return Selection(sets, path, self._target.max_drop, self._selecting).chosen()

        limit, self._times = self._limit(sets), PlanTimes(self._subject, recipe, sets)
        mix = chosen(math.inf) if limit is None else self._times.fitting(limit, chosen)
        return (mix if sets.drop(mix) <= self._target.max_drop else max((none, mix), key=sets.score)), measured

    def _limit(self, sets: ScoredSets) -> float | None:
        """Return how much longer than all layers in INT8 the plan may take; None without timing or limit."""
        return self._target.max_slowdown if sets.us(Mix()) else None

    def _precisions(self, sets: ScoredSets, costs: Costs) -> list[str]:
        """Return the float precisions to which layers move, the fastest first.

        The last is the fastest that meets the target with all layers in it, or the one of the highest score if none
        does. If that is float32, layers may also stop at a faster precision.
        """
        scores, every = dict[str, float](), Mix(frozenset(sets.layers))
        for precision in sorted(costs, key=lambda name: sum(costs[name].values())):
            sets.float_type = precision
            scores[precision] = sets.score(every)
            if sets.drop(every) <= self._target.max_drop:
                break
        first = next(iter(scores))
        exact = sets.float_type if sets.drop(every) <= self._target.max_drop else max(
            scores, key=lambda name: scores[name])
        return [first, FP32] if exact == FP32 != first else [exact]

    def _ranking(self, done: int, of: int, layer: str) -> None:
        self._selecting("ranking", done, of, layer)

    def _tick(self) -> None:
        """Report an evaluated item, or again the stage of the selection for which it was evaluated."""
        self._ran += 1
        self._progress(*self._stage or ("evaluating", min(self._ran, self._runs), self._runs, ""))

    def _selecting(self, stage: str, done: int, of: int, layer: str) -> None:
        self._stage = stage, done, of, layer
        self._progress(*self._stage)

    def _outcome(self, sets: ScoredSets, measured: Sequence[Sensitivity], mix: Mix) -> Outcome:
        """Tell the user the result, and return it."""
        evaluation, none, every = self._evaluation, Mix(), Mix(frozenset(sets.layers))
        met = sets.drop(mix) <= self._target.max_drop
        kept = [layer.name for layer in sets.in_order(mix.kept)]
        nodes, float_type, exact_nodes = sets.precisions(mix)
        fp32 = [layer.name for layer in sets.in_order(mix.fp32)] if exact_nodes else []
        summary = f"{evaluation.metric.name} {evaluation.reference:.4f} in float, {sets.score(none):.4f} in INT8"
        timed = (("int8", none), ("chosen", mix), ("float", every)) if kept else ()
        us = {name: sets.us(one) for name, one in timed}
        if kept:
            summary += (f", {sets.score(mix):.4f} with {len(kept)} of {len(sets.layers)} layers in "
                        f"{float_type}{f', but {len(fp32)} of them in fp32' if fp32 else ''} "
                        f"({', '.join(kept[:SHOWN])}{', ...' * (len(kept) > SHOWN)})")
        slowdown = self._times.ratio(mix) - 1.0 if kept and self._times and us["int8"] else 0.0
        if slowdown:
            summary += f", at {1.0 + slowdown:.2f} times the time of INT8"
        self._notify(f"target of a drop of at most {self._target.max_drop:g} {self._verdict(sets, met)}: {summary}; "
                     f"{len(evaluation)} items that the layers are chosen on")
        report = {"metric": evaluation.metric.name, "max_drop": self._target.max_drop, "met": met,
                  "max_slowdown": self._target.max_slowdown, "slowdown": slowdown,
                  "items": len(evaluation), "float": evaluation.reference, "int8": sets.score(none),
                  "score": sets.score(mix), "kept": kept, "float_type": float_type, "kept_fp32": fp32, "us": us,
                  "tried": sets.scored(),
                  "layers": [{**asdict(one), "layer": one.layer.name} for one in measured]}
        return Outcome(nodes, float_type if kept else "", exact_nodes, report)

    def _verdict(self, sets: ScoredSets, met: bool) -> str:
        """Return whether the target is met, and why not."""
        if met:
            return "met"
        every = Mix(frozenset(sets.layers))
        limit, slowdown = self._limit(sets), sets.us(every) / (sets.us(Mix()) or math.inf) - 1.0
        if limit is None or slowdown <= limit:
            return "NOT met, the closest is taken"
        return (f"NOT met within {100.0 * limit:g} % more than the time of INT8, the closest is taken (all layers in "
                f"{sets.float_type}: {sets.score(every):.4f} at {1.0 + slowdown:.2f} times that "
                "time; --max-slowdown sets the limit)")

    def _tested(self, items: LabelledItems, recipe: Recipe, outcome: Outcome) -> dict[str, Any]:
        """Score the float model and the chosen layers on the test items; notify the user, and return the scores."""
        self._ran, self._runs = 0, 2 * (items.data.count or 0)
        evaluation = Evaluation(self._subject, items, self._evaluation.metric.name, self._tick)
        score = evaluation.score(recipe, outcome.kept, outcome.float_type or "fp32", outcome.fp32)
        missed = "; this drop exceeds the target, so the items that choose layers are too few, --eval" * (
            round(evaluation.reference - score, 9) > self._target.max_drop)
        self._notify(f"test: {evaluation.metric.name} {evaluation.reference:.4f} in float, {score:.4f} as built; "
                     f"{len(evaluation)} items that nothing was chosen on ({self._split.source}){missed}")
        return {"items": len(evaluation), "float": evaluation.reference, "score": score,
                "source": self._split.source}
