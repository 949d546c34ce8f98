"""Sets of layers that are kept in float, with their time and score; each is measured once."""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.passes.quantization.scaled_rows import with_scaled_rows

INT8, FP32 = "int8", "fp32"


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
class Mix:
    """Precision of each layer: INT8 but for those of `kept`, which compute in float, and in float32 those of `fp32`."""
    kept: frozenset[Layer] = frozenset()
    fp32: frozenset[Layer] = frozenset()

    def moved(self, layer: Layer, precision: str) -> Mix:
        """Return the mix with a layer in another precision."""
        kept = self.kept - {layer} if precision == INT8 else self.kept | {layer}
        return Mix(kept, self.fp32 | {layer} if precision == FP32 else self.fp32 - {layer})


class Times(Protocol):
    """Interface of measured times of mixes of precisions: LayerSets."""
    layers: Sequence[Layer]

    def us(self, mix: Mix) -> float:
        """Return the time of all kernels in microseconds an item; 0 without timing."""


def nodes_of(layers: Iterable[Layer]) -> tuple[str, ...]:
    """Return the names of the ONNX nodes of layers."""
    return tuple(dict.fromkeys(name for layer in layers for name in layer.nodes))


def exact_nodes(config: BuildConfig, float_type: str) -> tuple[str, ...]:
    """Return the nodes of the options that compute in float32 if other layers are kept in a float precision."""
    return config.keep_float if config.float_type == FP32 != float_type else config.keep_fp32


@contextmanager
def keeping(builder: Builder, names: Collection[str], float_type: str, fp32: Collection[str] = ()) -> Iterator[None]:
    """Keep these ONNX nodes in a float precision in all that the builder compiles inside the block.

    fp32: those of them that compute in float32 in any case, as do the nodes that the options keep in float32.
    """
    config = builder.config
    if names:
        builder.config = replace(config, keep_float=(*config.keep_float, *names), float_type=float_type,
                                 keep_fp32=(*exact_nodes(config, float_type), *fp32))
    try:
        yield
    finally:
        builder.config = config


class LayerSets:
    """Measured times of the quantised model with sets of layers in float.

    Attributes
    ----------
    layers : sequence of Layer
        All layers, in the order of the graph.
    float_type : str
        Precision of the layers of a set, but for those in float32; it may change.
    """

    def __init__(self, subject: Subject, recipe: Recipe, layers: Sequence[Layer], float_type: str = FP32) -> None:
        self._subject, self._recipe = subject, recipe
        self.layers, self.float_type = layers, float_type
        self._times: dict[tuple[Any, ...], float] = {}

    def in_order(self, layers: Collection[Layer]) -> list[Layer]:
        """Return layers in the order of the graph."""
        return [layer for layer in self.layers if layer in layers]

    def precisions(self, mix: Mix) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
        """Return the ONNX nodes in float, their precision, and those that compute in float32 in any case."""
        exact = mix.fp32 if self.float_type != FP32 else ()
        return nodes_of(self.in_order(mix.kept)), self.float_type, nodes_of(self.in_order(exact))

    def us(self, mix: Mix) -> float:
        """Return the time of all kernels in microseconds an item, conversions included; 0 without timing."""
        if (key := self._key(mix)) not in self._times:
            builder, graph = self._subject.builder, self._subject.graph
            with keeping(builder, *self.precisions(mix)):
                if self._recipe.scaled_rows:        # the rest of the recipe hardly changes the kernels
                    graph = with_scaled_rows(graph, self._recipe.scaled_rows, builder.config.keep_float)
                self._times[key] = builder.time_us(graph, self._recipe.ranges)
        return self._times[key]

    def _key(self, mix: Mix) -> tuple[str, frozenset[Layer], frozenset[Layer]]:
        """Return the precision, the set and its float32 layers; the precision does not matter to an empty set."""
        is_mixed = self.float_type != FP32
        return self.float_type if mix.kept else "", mix.kept, mix.fp32 if is_mixed else frozenset()


class Scorer(Protocol):
    """Interface of the metric on the items that choose layers: Evaluation."""
    reference: float

    def score(self, recipe: Recipe, kept: Collection[str] = (), float_type: str = FP32,
              fp32: Collection[str] = ()) -> float:
        """Return the metric of the model with nodes in float."""


class ScoredSets(LayerSets):
    """Measured times and scores of the quantised model with sets of layers in float."""

    def __init__(self, subject: Subject, recipe: Recipe, layers: Sequence[Layer], evaluation: Scorer) -> None:
        super().__init__(subject, recipe, layers)
        self._evaluation = evaluation
        self._scores: dict[tuple[Any, ...], float] = {}

    def score(self, mix: Mix) -> float:
        """Return the metric on the items that choose layers."""
        if (key := self._key(mix)) not in self._scores:
            self._scores[key] = self._evaluation.score(self._recipe, *self.precisions(mix))
        return self._scores[key]

    def drop(self, mix: Mix) -> float:
        """Return by how much the metric falls below the float model's."""
        return round(self._evaluation.reference - self.score(mix), 9)

    def scored(self) -> list[dict[str, Any]]:
        """Return the sets that were scored, as JSON: layers, precision, score, and time (0: it was not measured)."""
        return [{"kept": len(key[1]), "float_type": key[0], "fp32": len(key[2]), "score": score,
                 "us": self._times.get(key, 0.0)} for key, score in self._scores.items()]
