"""Structure of a plan's outputs for their comparison: their sources, and the selections that decide them."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from infer_server.calibration.accuracy.sources import Selection, Sources, selections, selections_of_model, sources_of
from infer_server.calibration.data.items import Feed
from infer_server.engines.backends.fallback import to_real
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.specialise import Specialiser
from infer_server.engines.errors import EngineError
from infer_server.engines.frontend.onnx_file import read_model
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.ops import op_of
from infer_server.engines.passes.outputs import shown_name
from infer_server.engines.plan.extents import extents_of_feed
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.specialisation import Specialisation

MOST_SHAPES = 4         # further shapes of a plan with open extents for which sources are traced


@dataclass(frozen=True)
class Inner:
    """Inner tensors of a run.

    values      tensors before selections, as the engine's graph computes them
    sources     of outputs and of those tensors
    """
    values: Mapping[str, Array] = field(default_factory=dict)
    sources: Mapping[str, Sources] = field(default_factory=dict)


@dataclass(frozen=True)
class Structure:
    """Rules for comparing the outputs of a model.

    selections  outputs that a selection decides, with the selection
    tensors     inputs of selections that the ONNX file has under this name, too
    at          returns the inner tensors of a run on a feed
    fits        returns True if a feed has the shapes of the graph
    """
    selections: Mapping[str, Selection] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    at: Callable[[Feed], Inner] = lambda feed: Inner()
    fits: Callable[[Feed], bool] = lambda feed: True


def structure_of_program(model: Path) -> Structure:
    """Read the structure of a model that has no one graph from the ONNX file."""
    return Structure(selections_of_model(read_model(model)))


def tensor_names(model: Path) -> frozenset[str]:
    """Name the tensors that the nodes of an ONNX file make."""
    return frozenset(name for node in read_model(model).proto.graph.node for name in node.output)


def structure_of(plan: Plan, graph: Graph, known: Collection[str]) -> Structure:
    """Find the structure of a plan from the graph that it was lowered from.

    known: tensors of the ONNX file. The tensors before selections are run by another plan of the same graph, which
    shows them; it is compiled when the first feed comes, and for the shapes of that graph alone.
    """
    found = selections(graph)
    entering = (_known(graph, name, known) for one in found.values() for name in one.tensors)
    inside = _Inside(plan, graph, tuple(dict.fromkeys(filter(None, entering))))
    return Structure(found, inside.tensors, inside, inside.fits)


def _known(graph: Graph, name: str, known: Collection[str]) -> str:
    """Go back through moves to a tensor that the ONNX file has; "" if there is none."""
    while name not in known:
        node = graph.producer.get(name)
        if node is None or not op_of(node.op).moves or len(op_of(node.op).data(node)) != 1:
            return ""
        name, = op_of(node.op).data(node)
    return name


def _sources_in(graph: Graph, names: Sequence[str]) -> Mapping[str, Sources]:
    return {name: sources_of(graph, name) for name in names if name in graph.producer}


class _Inside:
    """Runner of a plan's graph that returns the tensors before selections."""

    def __init__(self, plan: Plan, graph: Graph, tensors: tuple[str, ...]) -> None:
        self._plan, self._graph, self.tensors = plan, graph, tensors
        self._traced: dict[tuple[Any, ...], Mapping[str, Sources]] = {}     # by the dynamic extents of the inputs

    def __call__(self, feed: Feed) -> Inner:
        if self.fits(feed):
            return Inner(dict(self._values(feed)) if self.tensors else {}, self._sources)
        extents = self._extents(feed)
        key = tuple(extents.values())
        if key not in self._traced:
            if len(self._traced) == MOST_SHAPES:
                return Inner()
            self._traced[key] = _sources_in(self._specialiser.graph(extents), self._graph.outputs)
        return Inner(sources=self._traced[key])

    def fits(self, feed: Feed) -> bool:
        """Return True if the graph was made for the feed's shapes and the input values that decide shapes."""
        return self._plan.open is None or self._extents(feed) == self._plan.extents

    def _extents(self, feed: Feed) -> dict[str, Any]:
        """Return the open extents and deciding values of a feed, in the order of the plan's."""
        part = self._plan.open_part
        found = extents_of_feed(self._plan.name, part.inputs, part.deciding, feed)
        return {name: found[name] for name in self._plan.extents}

    @cached_property
    def _specialiser(self) -> Specialiser:
        return Specialiser(self._plan)

    @cached_property
    def _sources(self) -> Mapping[str, Sources]:
        return _sources_in(self._graph, (*self._graph.outputs, *self.tensors))

    @cached_property
    def _engine(self) -> Specialisation | None:
        """Engine that also returns the tensors before selections; None if the graph cannot be compiled again."""
        try:
            return Specialisation(Builder(BuildConfig(timing=False)).showing(self._graph, self.tensors))
        except EngineError:
            return None

    def _values(self, feed: Feed) -> Iterator[tuple[str, Array]]:
        shown: dict[str, Array] = {}
        read = {name: feed[name] for name in self._graph.inputs}
        items = next((len(feed[io.name]) for io in self._plan.inputs if io.batched), 1)
        if self._engine is not None and items <= self._engine.plan.batch_slots:
            self._engine.show(read, lambda name, array: shown.__setitem__(name, array.copy()))
        for name in self.tensors:
            if (array := shown.get(shown_name(name))) is not None:
                yield name, to_real(array, None, str(self._graph.types[name].dtype))
