"""Evaluation of trial ranges: runs a model in float and quantised on calibration items and measures output errors.

Outputs are compared part by part (infer_server.calibration.accuracy.parts). If a selection such as TopK decides an
output, the inputs of the selection are compared instead, because after it nearly equal elements may be swapped with any
ranges.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from infer_server.calibration.accuracy.comparison import Errors, Reference
from infer_server.calibration.accuracy.parts import parts_by_tensor
from infer_server.calibration.accuracy.sources import Sources, selections, sources_of
from infer_server.calibration.data.items import Feed
from infer_server.calibration.data.padding import Padding
from infer_server.engines.backends.device import Show
from infer_server.engines.backends.fallback import to_real
from infer_server.engines.compiler.subject import KEPT, Subject
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.passes.outputs import shown_name
from infer_server.engines.passes.quantization.recipe import prepared
from infer_server.engines.passes.quantization.smoothing import scalable, smoothed
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.specialisation import Specialisation

Tick = Callable[[], None]       # called after each batch and each compiled plan


class GraphEngines:
    """Engines of a model's graphs, one for each set of extents in the data, created on demand."""

    def __init__(self, subject: Subject, plan: Callable[[Graph], Plan], tick: Tick = lambda: None) -> None:
        self._subject, self._plan, self._tick = subject, plan, tick
        self._engines: dict[tuple[Any, ...], Specialisation] = {}
        self.usual = self._engine(tuple(subject.usual.values()))

    def show(self, feed: Feed, show: Show) -> None:
        """Run a feed and pass the outputs to `show`."""
        extents = self._subject.extents_of(feed)
        known = self._subject.deciding
        read = {name: array for name, array in feed.items() if name not in known}
        self._engine(tuple(extents.values())).show(read, show)

    def _engine(self, extents: tuple[Any, ...]) -> Specialisation:
        if extents not in self._engines:
            if len(self._engines) > KEPT:       # never evict the first one, for the usual extents
                del self._engines[list(self._engines)[1]]
            graph = self._subject.at(dict(zip(self._subject.usual, extents, strict=True)))
            self._engines[extents] = Specialisation(self._plan(graph))
            self._tick()
        return self._engines[extents]


def float_engines(subject: Subject, tensors: Iterable[str], factors: Mapping[str, Iterable[float]] = {}      # noqa: B006
                  ) -> GraphEngines:
    """Compile the float model, smoothed by these factors, to show the tensors, as far as its graphs have them."""
    def plan(graph: Graph) -> Plan:
        able = set(scalable(graph)) if factors else ()
        graph = smoothed(graph, {name: values for name, values in factors.items() if name in able})
        return subject.builder.observable(graph, [name for name in tensors if name in graph.types])
    return GraphEngines(subject, plan)


def judged_tensors(graph: Graph) -> tuple[str, ...]:
    """Return the tensors on which a model's accuracy is measured.

    They are its outputs; for an output that follows from a selection (TopK, NonMaxSuppression), the selection's inputs.
    """
    behind = selections(graph)
    names = (name for output in graph.outputs
             for name in (behind[output].tensors if output in behind else (output,)))
    return tuple(dict.fromkeys(names))


class FloatRuns:
    """First items of the calibration data with the float model's judged tensors.

    They are kept during the pass over the data, so that these items are not read and run again.
    """

    def __init__(self, graph: Graph, min_items: int) -> None:
        """Keep at least `min_items` items: whole batches are kept."""
        self.tensors = judged_tensors(graph)
        self.feeds: list[Feed] = []
        self.expected: list[dict[str, Array]] = []
        self.items = 0
        self._graph, self._min_items = graph, min_items

    def run(self, engines: GraphEngines, feed: Feed, items: int, observe: Show) -> None:
        """Run the float model on a feed and pass its tensors to `observe`; keep them if more items are needed."""
        if self.items >= self._min_items:
            engines.show(feed, observe)
            return
        self.expected.append(self.values(engines, feed, observe))
        self.feeds.append(feed)
        self.items += items

    def values(self, engines: GraphEngines, feed: Feed, observe: Show = lambda name, array: None) -> dict[str, Array]:
        """Run a feed; return the judged tensors as real numbers (bfloat16 comes as its bits), 0 where padded."""
        names = {name: name for name in self.tensors} | {shown_name(name): name for name in self.tensors}
        values: dict[str, Array] = {}

        def keep(shown: str, array: Array) -> None:
            observe(shown, array)
            if (name := names.get(shown)) is not None:
                values[name] = to_real(array, None, str(self._graph.types[name].dtype))

        engines.show(feed, keep)
        padding = Padding(feed)
        return {name: padding.zeroed(values[name]) for name in self.tensors if name in values}


class Judge:
    """Evaluator of recipes by the errors of a model's outputs."""

    def __init__(self, subject: Subject, floats: FloatRuns, tick: Tick = lambda: None) -> None:
        """Take the float model's results as the reference. tick: called after each batch."""
        self._subject, self._floats, self._tick = subject, floats, tick
        self.items, self.feeds = floats.items, tuple(floats.feeds)
        self._reference = Reference(floats.expected, parts_by_tensor(floats.expected, list(self._sources())))

    def _sources(self) -> Iterator[Mapping[str, Sources]]:
        """Trace the judged tensors back in the graph of each feed."""
        known: dict[tuple[Any, ...], Mapping[str, Sources]] = {}
        for feed in self._floats.feeds:
            extents = self._subject.extents_of(feed) if self._subject.usual else {}
            key = tuple(extents.values())
            if key not in known:
                graph = self._subject.at(extents)
                known[key] = {name: sources_of(graph, name) for name in self._floats.tensors if name in graph.producer}
            yield known[key]

    def errors(self, recipe: Recipe) -> Errors:
        """Quantise the model by the recipe and measure its errors on the items."""
        builder = self._subject.builder
        engines = GraphEngines(self._subject, lambda graph: builder.trial(
            prepared(graph, recipe, builder.config.keep_float), recipe.ranges, self._floats.tensors), self._tick)
        return self._reference.errors(self._outputs(engines))

    def _outputs(self, engines: GraphEngines) -> Iterator[Mapping[str, Array]]:
        """Yield the judged tensors of each feed."""
        for feed in self._floats.feeds:
            yield self._floats.values(engines, feed)
            self._tick()
