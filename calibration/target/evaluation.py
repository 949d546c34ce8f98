"""Scores of a model on evaluation items, in float32 and quantised with some layers kept in float."""
from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from infer_server.calibration.target.metrics import Items, Metric, Outputs, bytes_of, check_bytes, metric_of
from infer_server.calibration.target.sets import keeping
from infer_server.calibration.target.split import LabelledItems
from infer_server.calibration.trials.judge import GraphEngines, Tick, float_engines
from infer_server.engines.backends.fallback import to_real
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.errors import CalibrationError
from infer_server.engines.ir.graph import Array
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.passes.quantization.recipe import prepared


class Evaluation:
    """Evaluation items with the float model's score.

    Attributes
    ----------
    metric : Metric
    reference : float
        Score of the float model.
    """

    def __init__(self, subject: Subject, items: LabelledItems, metric: str, tick: Tick) -> None:
        """Run the float model on the items. tick: called after each item. Raises ConfigError, CalibrationError."""
        self._subject, self._data, self._tick = subject, items.data, tick
        labels = items.labels
        self._items = Items(items.data, labels)
        outputs = self._outputs(float_engines(subject, ()))
        first = next(outputs)
        self.metric: Metric = metric_of(metric, first, labels is not None)
        self.reference = self.metric.score(self._items, self._with_expected(chain([first], outputs)))
        if labels is not None and len(labels) != len(self):
            raise CalibrationError(f"{len(labels)} labels for {len(self)} evaluation items")

    def __len__(self) -> int:
        return len(self._items.expected)

    def score(self, recipe: Recipe, kept: Collection[str] = (), float_type: str = "fp32",
              fp32: Collection[str] = ()) -> float:
        """Return the score of the model quantised by a recipe with these nodes kept in a float precision.

        fp32: those of them that compute in float32 in any case.
        """
        builder = self._subject.builder
        with keeping(builder, kept, float_type, fp32):
            engines = GraphEngines(self._subject, lambda graph: builder.trial(
                prepared(graph, recipe, builder.config.keep_float), recipe.ranges), self._tick)
            return self.metric.score(self._items, self._outputs(engines))

    def _with_expected(self, outputs: Iterator[Outputs]) -> Iterator[Outputs]:
        """Yield the float model's outputs, after what the metric needs of them was kept."""
        size = 0
        for item_outputs in outputs:
            self._items.expected.append(self.metric.keep(item_outputs))
            size += bytes_of(self._items.expected[-1])
            check_bytes(size, len(self))
            yield item_outputs

    def _outputs(self, engines: GraphEngines) -> Iterator[Outputs]:
        """Run all items, one at a time, and yield the outputs of each."""
        names = {io.name: io.dtype for io in engines.usual.outputs}
        for feed in self._data.batches(1):
            values: dict[str, Array] = {}

            def keep(name: str, array: Array, values: dict[str, Array] = values) -> None:
                if name in names:
                    values[name] = to_real(array, None, names[name])

            engines.show(feed, keep)
            yield values
            self._tick()
