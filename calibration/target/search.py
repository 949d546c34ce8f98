"""Search for the layers to keep in float so that a metric drops no more than allowed, at the least cost in time.

1. The metric of the all-INT8 model is measured on evaluation items, which no range was chosen on.
2. If it drops too far, each layer is kept in float in turn, and the noise of the outputs measured on calibration items.
3. Layers move to the fastest float precision that meets the target, in the order of the noise removed per microsecond
   lost; a bisection finds how many are needed.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infer_server.calibration.data.items import CalibrationData
from infer_server.calibration.target.evaluation import Evaluation
from infer_server.calibration.target.labels import read_labels
from infer_server.calibration.target.metrics import check_metric
from infer_server.calibration.target.sensitivity import Layer, Sensitivity, costs_of, layers_of, sensitivities
from infer_server.calibration.trials.judge import Judge
from infer_server.engines.compiler.ranges import Notify, Progress
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.errors import CalibrationError, ConfigError
from infer_server.engines.ir.recipe import Recipe

HELD_OUT = 4            # without evaluation data, every fourth calibration item is for evaluation
SHOWN = 5               # layers named in the notice


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
        Evaluation items, as Calibration.data. None: every fourth calibration item, which ranges then do not see.
    labels : str, path or sequence of int
        Class of each evaluation item, for "top1" and functions (infer_server.calibration.target.labels).

    Raises
    ------
    ConfigError
        A value is unknown or out of range.
    """
    max_drop: float
    metric: str = ""
    data: Any = None
    labels: str | Path | Sequence[int] = ""

    def __post_init__(self) -> None:
        if not self.max_drop >= 0.0:
            raise ConfigError(f"max_drop={self.max_drop}: it is the allowed fall of the metric, at least 0")
        check_metric(self.metric, bool(self.labels))
        if self.labels and self.data is None:
            raise ConfigError("labels are of evaluation items: give evaluation data, too")

    def facts(self) -> dict[str, Any]:
        """Return all that affects the choice of layers except the items, as JSON values."""
        script = self.metric.rpartition(":")[0]
        labels = self.labels
        return {"max_drop": self.max_drop, "metric": self.metric,
                "labels": str(labels) if isinstance(labels, str | Path) else [int(label) for label in labels],
                "files": [Path(file).read_bytes().hex() for file in (script, str(labels)) if Path(file).is_file()]}

    def without_held_out(self, data: CalibrationData) -> CalibrationData:
        """Return the items for calibration out of all calibration items."""
        return data if self.data is not None else data.without_every(HELD_OUT, HELD_OUT - 1)

    def held_out(self, data: CalibrationData) -> CalibrationData:
        """Return the items for evaluation out of all calibration items."""
        return data.every(HELD_OUT, HELD_OUT - 1)

    def labels_of(self, count: int) -> list[int] | None:
        """Return the labels of so many items. Raises CalibrationError."""
        if not self.labels:
            return None
        found = read_labels(self.labels, self.data)
        if len(found) != count:
            raise CalibrationError(f"{len(found)} labels for {count} evaluation items")
        return found


@dataclass(frozen=True)
class Outcome:
    """Result of a search.

    Attributes
    ----------
    kept : tuple of str
        ONNX nodes to keep in float.
    float_type : str
        Their precision; "" if there are none.
    report : dict
        Fields for the plan's metadata: metric, items, scores, and the sensitivity of each layer.
    """
    kept: tuple[str, ...]
    float_type: str
    report: dict[str, Any]


class TargetSearch:
    """One search for the layers to keep in float."""

    def __init__(self, target: AccuracyTarget, subject: Subject, data: CalibrationData, notify: Notify,
                 progress: Progress) -> None:
        """Run the float model on the evaluation items. Raises ConfigError, CalibrationError."""
        self._target, self._subject, self._notify, self._progress = target, subject, notify, progress
        self._ran, self._runs = 0, 0
        self._evaluation = Evaluation(subject, data, target.labels_of, target.metric, self._tick)
        self._scores: dict[int, float] = {}         # by the number of layers in float
        self._float_type = "fp32"
        count = len(self._evaluation)
        self._runs = 2 * count
        least = 1.0 / count
        if self._evaluation.metric.name in ("agreement", "top1") and target.max_drop < least:
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
        if self._meets(recipe, [], 0):
            return self._outcome([], 0)
        layers = layers_of(self._subject.graph, self._subject.builder.config.keep_float)
        costs = costs_of(self._subject, recipe)
        self._runs += len(self._evaluation) * (len(costs) + len(layers).bit_length())
        self._float_type = self._precision(recipe, layers, costs)
        ranked = sensitivities(self._subject, judge(len(layers)), recipe, layers, costs[self._float_type],
                               self._float_type, lambda done, of, layer: self._progress("ranking", done, of, layer))
        low, high = 0, len(ranked)          # low misses the target, high meets it or is all there is
        if self._drop(high) <= self._target.max_drop:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._meets(recipe, ranked, middle) else (middle, high)
        else:
            high = max(self._scores, key=lambda count: (self._scores[count], -count))
        return self._outcome(ranked, high)

    def _precision(self, recipe: Recipe, layers: Sequence[Layer], costs: Mapping[str, Mapping[str, float]]) -> str:
        """Return the fastest float precision that meets the target with all layers in it, or the most accurate."""
        every = tuple(dict.fromkeys(name for layer in layers for name in layer.nodes))
        scores: dict[str, float] = {}
        for precision in sorted(costs, key=lambda name: sum(costs[name].values())):
            scores[precision] = self._evaluation.score(recipe, every, precision)
            if self._evaluation.reference - scores[precision] <= self._target.max_drop:
                break
        best = max(scores, key=lambda name: scores[name])
        self._scores[len(layers)] = scores[best]
        return best

    def _tick(self) -> None:
        self._ran += 1
        self._progress("evaluating", min(self._ran, self._runs), self._runs, "")

    def _meets(self, recipe: Recipe, ranked: Sequence[Sensitivity], count: int) -> bool:
        """Return True if the first `count` layers in float suffice."""
        self._scores[count] = self._evaluation.score(recipe, _nodes(ranked[:count]), self._float_type)
        return self._drop(count) <= self._target.max_drop

    def _drop(self, count: int) -> float:
        return round(self._evaluation.reference - self._scores[count], 9)

    def _outcome(self, ranked: Sequence[Sensitivity], count: int) -> Outcome:
        """Tell the user the result, and return it."""
        evaluation, drop = self._evaluation, self._drop(count)
        met = drop <= self._target.max_drop
        kept = [one.layer.name for one in ranked[:count]]
        said = f"{evaluation.metric.name} {evaluation.reference:.4f} in float, {self._scores[0]:.4f} in INT8"
        if kept:
            said += (f", {self._scores[count]:.4f} with {len(kept)} of {len(ranked)} layers in {self._float_type} "
                     f"({', '.join(kept[:SHOWN])}{', ...' * (len(kept) > SHOWN)})")
        verdict = "met" if met else "NOT met, the closest is taken"
        self._notify(f"target of a drop of at most {self._target.max_drop:g} {verdict}: {said}; "
                     f"{len(evaluation)} evaluation items")
        report = {"metric": evaluation.metric.name, "max_drop": self._target.max_drop, "met": met,
                  "items": len(evaluation), "float": evaluation.reference, "int8": self._scores[0],
                  "score": self._scores[count], "kept": kept, "float_type": self._float_type,
                  "scores": {str(number): score for number, score in sorted(self._scores.items())},
                  "layers": [{**asdict(one), "layer": one.layer.name} for one in ranked]}
        return Outcome(_nodes(ranked[:count]), self._float_type if kept else "", report)


def _nodes(ranked: Sequence[Sensitivity]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in ranked for name in one.layer.nodes))
