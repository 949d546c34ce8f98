"""Sensitivity of a quantised model to its layers: the accuracy gained and the time lost if a layer is kept in float."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from infer_server.calibration.target.evaluation import keeping
from infer_server.calibration.trials.judge import Judge
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.ir.graph import Graph
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.passes.quantization.kept import kept_nodes
from infer_server.engines.passes.quantization.quantize import contractions

LEAST_US = 1.0          # cost of a layer that is as fast in float, so that ratios are finite
MOST_LAYERS = 128       # more layers are tried in groups of neighbours


@dataclass(frozen=True)
class Layer:
    """Layers that are kept in float together: most often one.

    Attributes
    ----------
    name : str
        Name of the first ONNX node.
    nodes : tuple of str
        Names of all their ONNX nodes.
    """
    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Sensitivity:
    """Effect of keeping a layer in float, the others in INT8.

    Attributes
    ----------
    layer : Layer
    sqnr_db : float
        Signal to quantisation noise ratio of the outputs, of the worst part.
    noise : float
        Share of the all-INT8 noise power that the layer removes; below 0 if the noise grows.
    us : float
        Time an item that it costs, in microseconds; 0 without timing.
    """
    layer: Layer
    sqnr_db: float
    noise: float
    us: float

    @property
    def efficiency(self) -> float:
        """Noise removed per microsecond lost."""
        return self.noise / max(self.us, LEAST_US)


def layers_of(graph: Graph, kept: Iterable[str]) -> list[Layer]:
    """Return the INT8 layers of a graph in order, neighbours together if there are more than MOST_LAYERS."""
    nodes = [node.origin for node in contractions(graph, kept_nodes(graph, tuple(kept))) if node.origin]
    size = -(-len(nodes) // MOST_LAYERS)
    groups = [nodes[first:first + size] for first in range(0, len(nodes), size or 1)]
    return [Layer(group[0][0], tuple(dict.fromkeys(name for origin in group for name in origin))) for group in groups]


def costs_of(subject: Subject, recipe: Recipe) -> dict[str, dict[str, float]]:
    """Return by float precision how many microseconds an item each kernel takes more than in INT8.

    Kernels are named by their first ONNX node; all values are 0 without timing.
    """
    times = subject.builder.times(subject.graph, recipe.ranges)
    int8 = {node.name: node.time_us for node in times["int8"]}
    return {precision: {node.fuses[0]: max(node.time_us - int8[node.name], 0.0)
                        for node in nodes if node.fuses and node.name in int8}
            for precision, nodes in times.items() if precision != "int8"}


def sensitivities(subject: Subject, judge: Judge, recipe: Recipe, layers: Sequence[Layer], costs: Mapping[str, float],
                  float_type: str, progress: Callable[[int, int, str], None]) -> list[Sensitivity]:
    """Measure all layers, and return them by efficiency, the best first.

    Parameters
    ----------
    subject : Subject
    judge : Judge
        Measures the outputs on calibration items.
    recipe : Recipe
    layers : sequence of Layer
    costs : mapping of str to float
        Microseconds by kernel, see `costs_of`.
    float_type : str
        Precision of a kept layer.
    progress : callable
        Called with (done, of, layer).
    """
    int8_noise = noise_power(judge.errors(recipe).sqnr_db)
    results = []
    for number, layer in enumerate(layers):
        progress(number, len(layers), layer.name)
        with keeping(subject.builder, layer.nodes, float_type):
            sqnr = judge.errors(recipe).sqnr_db
        us = sum(costs.get(name, 0.0) for name in layer.nodes)
        removed = (int8_noise - noise_power(sqnr)) / int8_noise if int8_noise else 0.0
        results.append(Sensitivity(layer, sqnr, removed, us))
    progress(len(layers), len(layers), "")
    return sorted(results, key=lambda one: -one.efficiency)


def noise_power(sqnr_db: float) -> float:
    """Return the noise power relative to the signal."""
    return float(10.0 ** (-sqnr_db / 10.0))
