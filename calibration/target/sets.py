"""Sets of layers that are kept in float, with their noise, time and score; each is measured once."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        Precision of the layers of a set.
    scores : dict of frozenset to float
        Scores so far.
    """

    def __init__(self, subject: Subject, recipe: Recipe, layers: Sequence[Layer], evaluation: Evaluation) -> None:
        self._subject, self._recipe, self._evaluation = subject, recipe, evaluation
        self.layers, self.float_type = layers, "fp32"
        self.scores: dict[Kept, float] = {}
        self._times: dict[Kept, float] = {}

    def in_order(self, kept: Kept) -> list[Layer]:
        """Return the layers of a set in the order of the graph."""
        return [layer for layer in self.layers if layer in kept]

    def drop(self, kept: Kept) -> float:
        """Return by how much the metric falls below the float model's."""
        if kept not in self.scores:
            self.scores[kept] = self._evaluation.score(self._recipe, nodes_of(self.in_order(kept)), self.float_type)
        return round(self._evaluation.reference - self.scores[kept], 9)

    def noise(self, judge: Judge, kept: Kept) -> float:
        """Return the noise power of the outputs relative to the signal."""
        with keeping(self._subject.builder, nodes_of(self.in_order(kept)), self.float_type):
            return noise_power(judge.errors(self._recipe).sqnr_db)

    def us(self, kept: Kept) -> float:
        """Return the time of all kernels in microseconds an item, conversions included; 0 without timing."""
        if kept not in self._times:
            builder, graph = self._subject.builder, self._subject.graph
            with keeping(builder, nodes_of(self.in_order(kept)), self.float_type):
                self._times[kept] = builder.time_us(graph, self._recipe.ranges)
        return self._times[kept]
