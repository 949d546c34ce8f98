"""Sets of layers that are kept in float, with their noise, time and score; each is measured once."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from infer_server.calibration.target.evaluation import Evaluation, keeping
from infer_server.calibration.target.sensitivity import Layer, noise_power
from infer_server.calibration.trials.judge import Judge
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.ir.recipe import Recipe

Kept = frozenset[Layer]


def nodes_of(layers: Iterable[Layer]) -> tuple[str, ...]:
    """Return the names of the ONNX nodes of layers."""
    return tuple(dict.fromkeys(name for layer in layers for name in layer.nodes))


class LayerSets:
    """Measurements of the quantised model with sets of layers in float.

    Attributes
    ----------
    layers : sequence of Layer
        All layers, in the order of the graph.
    float_type : str
        Precision of the layers of a set; it may change.
    """

    def __init__(self, subject: Subject, recipe: Recipe, layers: Sequence[Layer], evaluation: Evaluation) -> None:
        self._subject, self._recipe, self._evaluation = subject, recipe, evaluation
        self.layers, self.float_type = layers, "fp32"
        self._scores: dict[tuple[str, Kept], float] = {}
        self._times: dict[tuple[str, Kept], float] = {}

    def in_order(self, kept: Kept) -> list[Layer]:
        """Return the layers of a set in the order of the graph."""
        return [layer for layer in self.layers if layer in kept]

    def score(self, kept: Kept) -> float:
        """Return the metric on the items that choose layers."""
        if (key := self._key(kept)) not in self._scores:
            self._scores[key] = self._evaluation.score(self._recipe, nodes_of(self.in_order(kept)), self.float_type)
        return self._scores[key]

    def drop(self, kept: Kept) -> float:
        """Return by how much the metric falls below the float model's."""
        return round(self._evaluation.reference - self.score(kept), 9)

    def noise(self, judge: Judge, kept: Kept) -> float:
        """Return the noise power of the outputs relative to the signal."""
        with keeping(self._subject.builder, nodes_of(self.in_order(kept)), self.float_type):
            return noise_power(judge.errors(self._recipe).sqnr_db)

    def scored(self) -> list[dict[str, Any]]:
        """Return the sets that were scored, as JSON: layers, precision, score, and time (0: it was not measured)."""
        return [{"kept": len(kept), "float_type": float_type, "score": score,
                 "us": self._times.get((float_type, kept), 0.0)} for (float_type, kept), score in self._scores.items()]

    def _key(self, kept: Kept) -> tuple[str, Kept]:
        """Return the precision and the set; the precision does not matter to an empty set."""
        return self.float_type if kept else "", kept

    def us(self, kept: Kept) -> float:
        """Return the time of all kernels in microseconds an item, conversions included; 0 without timing."""
        if (key := self._key(kept)) not in self._times:
            builder, graph = self._subject.builder, self._subject.graph
            with keeping(builder, nodes_of(self.in_order(kept)), self.float_type):
                self._times[key] = builder.time_us(graph, self._recipe.ranges)
        return self._times[key]
