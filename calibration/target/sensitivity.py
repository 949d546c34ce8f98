"""Noise that each INT8 layer adds to the outputs, and the time that it costs in float.

A layer's noise is measured with this layer alone in INT8 and all others in float32. These noise powers add up: the 53
of MobileNetV2 sum to -23.50 dB, and all layers in INT8 give -23.44 dB. Keeping a layer in float while the others are in
INT8 measures no more than a few tenths of a dB of change, because any change rounds all later values differently: on
unseen photos the layers that seemed to remove half of the noise removed 6 %.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from infer_server.calibration.target.sets import Layer, keeping, nodes_of
from infer_server.calibration.trials.judge import Judge
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.ir.graph import Graph
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.passes.quantization.kept import kept_nodes
from infer_server.engines.passes.quantization.quantize import contractions

MOST_LAYERS = 128       # more layers are measured in groups of neighbours
Costs = Mapping[str, Mapping[str, float]]       # by float precision and kernel, microseconds an item


@dataclass(frozen=True)
class Sensitivity:
    """Effect of a layer in INT8.

    Attributes
    ----------
    layer : Layer
    sqnr_db : float
        Signal to quantisation noise ratio of the outputs, of the worst part, with this layer alone in INT8.
    noise : float
        Noise power that the layer adds, as a share of that with all layers in INT8.
    us : float
        Time an item that it takes more in float, in microseconds; 0 without timing.
    """
    layer: Layer
    sqnr_db: float
    noise: float
    us: float


def layers_of(graph: Graph, kept: Iterable[str]) -> list[Layer]:
    """Return the INT8 layers of a graph in order, neighbours together if there are more than MOST_LAYERS."""
    nodes = [node.origin for node in contractions(graph, kept_nodes(graph, tuple(kept))) if node.origin]
    size = -(-len(nodes) // MOST_LAYERS)
    groups = [nodes[first:first + size] for first in range(0, len(nodes), size or 1)]
    return [Layer(group[0][0], tuple(dict.fromkeys(name for origin in group for name in origin))) for group in groups]


def costs_of(subject: Subject, recipe: Recipe) -> Costs:
    """Return by float precision how many microseconds an item each kernel takes more than in INT8.

    Kernels are named by their first ONNX node; all values are 0 without timing.
    """
    times = subject.builder.times(subject.graph, recipe.ranges)
    int8 = {node.name: node.time_us for node in times["int8"]}
    return {precision: {node.fuses[0]: max(node.time_us - int8[node.name], 0.0)
                        for node in nodes if node.fuses and node.name in int8}
            for precision, nodes in times.items() if precision != "int8"}


def cost_of(layer: Layer, costs: Mapping[str, float]) -> float:
    """Return how many microseconds an item a layer takes more in float, from the costs of kernels."""
    return sum(costs.get(name, 0.0) for name in layer.nodes)


class NoiseMeter:
    """Measurements of the noise that single layers add to the outputs, on calibration items."""

    def __init__(self, subject: Subject, judge: Judge, recipe: Recipe, layers: Sequence[Layer]) -> None:
        self._subject, self._judge, self._recipe, self._layers = subject, judge, recipe, layers
        self._floor = noise_power(self._sqnr_db(layers))    # of tensors that are stored in INT8 between float layers
        self._int8 = noise_power(self._sqnr_db(()))

    def sensitivities(self, costs: Mapping[str, float], progress: Callable[[int, int, str], None]
                      ) -> list[Sensitivity]:
        """Measure all layers in INT8, and return them by noise, the most first.

        Parameters
        ----------
        costs : mapping of str to float
            Microseconds by kernel, see `costs_of`.
        progress : callable
            Called with (done, of, layer).
        """
        results, layers = [], self._layers
        for number, layer in enumerate(layers):
            progress(number, len(layers), layer.name)
            sqnr = self._sqnr_db([other for other in self._layers if other is not layer])
            results.append(Sensitivity(layer, sqnr, self._share(sqnr), cost_of(layer, costs)))
        progress(len(layers), len(layers), "")
        return sorted(results, key=lambda one: -one.noise)

    def of_float(self, precision: str, progress: Callable[[int, int, str], None]) -> dict[Layer, float]:
        """Return the noise that each layer adds in a float precision, as a share of that with all layers in INT8."""
        shares = {}
        for number, layer in enumerate(self._layers):
            progress(number, len(self._layers), layer.name)
            others = [other for other in self._layers if other is not layer]
            shares[layer] = self._share(self._sqnr_db(self._layers, precision, others))
        return shares

    def _share(self, sqnr_db: float) -> float:
        """Return the noise above the floor as a share of that with all layers in INT8."""
        return max(noise_power(sqnr_db) - self._floor, 0.0) / self._int8 if self._int8 else 0.0

    def _sqnr_db(self, kept: Iterable[Layer], float_type: str = "fp32", fp32: Iterable[Layer] = ()) -> float:
        with keeping(self._subject.builder, nodes_of(kept), float_type, nodes_of(fp32)):
            return self._judge.errors(self._recipe).sqnr_db


def noise_power(sqnr_db: float) -> float:
    """Return the noise power relative to the signal."""
    return float(10.0 ** (-sqnr_db / 10.0))
