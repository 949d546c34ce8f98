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
_Key = tuple[str, Kept, Kept]


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
    fp32 : frozenset of Layer
        Layers of a set that compute in float32 in any case; it may change.
    """

    def __init__(self, subject: Subject, recipe: Recipe, layers: Sequence[Layer], evaluation: Evaluation) -> None:
        self._subject, self._recipe, self._evaluation = subject, recipe, evaluation
        self.layers, self.float_type, self.fp32 = layers, "fp32", Kept()
        self._scores: dict[_Key, float] = {}
        self._times: dict[_Key, float] = {}

    def in_order(self, kept: Kept) -> list[Layer]:
        """Return the layers of a set in the order of the graph."""
        return [layer for layer in self.layers if layer in kept]

    def score(self, kept: Kept) -> float:
        """Return the metric on the items that choose layers."""
        if (key := self._key(kept)) not in self._scores:
            self._scores[key] = self._evaluation.score(self._recipe, *self._precisions(kept))
        return self._scores[key]

    def drop(self, kept: Kept) -> float:
        """Return by how much the metric falls below the float model's."""
        return round(self._evaluation.reference - self.score(kept), 9)

    def noise(self, judge: Judge, kept: Kept) -> float:
        """Return the noise power of the outputs relative to the signal."""
        with keeping(self._subject.builder, *self._precisions(kept)):
            return noise_power(judge.errors(self._recipe).sqnr_db)

    def scored(self) -> list[dict[str, Any]]:
        """Return the sets that were scored, as JSON: layers, precision, score, and time (0: it was not measured)."""
        return [{"kept": len(key[1]), "float_type": key[0], "fp32": len(key[2]), "score": score,
                 "us": self._times.get(key, 0.0)} for key, score in self._scores.items()]

    def nodes(self, kept: Kept) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the ONNX nodes of a set, and those of its layers that compute in float32 in any case."""
        return nodes_of(self.in_order(kept)), nodes_of(self.in_order(kept & self.fp32))

    def _precisions(self, kept: Kept) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
        nodes, fp32 = self.nodes(kept)
        return nodes, self.float_type, fp32

    def _key(self, kept: Kept) -> _Key:
        """Return the precision, the set and its float32 layers; the precision does not matter to an empty set."""
        return self.float_type if kept else "", kept, kept & self.fp32

    def us(self, kept: Kept) -> float:
        """Return the time of all kernels in microseconds an item, conversions included; 0 without timing."""
        if (key := self._key(kept)) not in self._times:
            builder, graph = self._subject.builder, self._subject.graph
            with keeping(builder, *self._precisions(kept)):
                self._times[key] = builder.time_us(graph, self._recipe.ranges)
        return self._times[key]
