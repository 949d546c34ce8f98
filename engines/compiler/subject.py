"""Subject of a build: a model with its float graphs.

If only the batch is open, there is one graph; otherwise one for each combination of numbers of the open extents and
deciding inputs, made on demand.

    subject = read_subject(builder, "m.onnx")
    subject.inputs                          # x float32 [batch, 3, H, W]
    subject.at({"H": 320, "W": 480})        # the optimised float graph for these
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from infer_server.engines.compiler.builder import Builder, io_tensors
from infer_server.engines.compiler.guesses import guesses
from infer_server.engines.errors import CompilerFault, ConfigError, EngineError, ModelError, UnknownValueError
from infer_server.engines.frontend.cutting.deciding import filled, likely_values, may_decide
from infer_server.engines.frontend.extents import open_types, shapes_for, without_batch
from infer_server.engines.frontend.onnx_file import Model, OnnxModel, read_model
from infer_server.engines.ir.graph import BATCH, Array, Dim, Graph, TensorType
from infer_server.engines.ir.recipe import Pixels
from infer_server.engines.passes.caches import Cache, shapes_with_capacity, with_caches_in_place
from infer_server.engines.passes.pixels import types_of_pixels
from infer_server.engines.plan.extents import (
    CACHE_CAPACITY,
    Bounds,
    Extents,
    bounds_of,
    extents_of,
    extents_of_feed,
    open_extents,
    placeholder,
    text,
    value_name,
    value_of,
)
from infer_server.engines.plan.plan import IoTensor

Seen = Callable[[Sequence[IoTensor]], Mapping[str, Array] | None]

KEPT = 4            # default number of cached graphs at other extents; each holds its own folded constants


@dataclass
class Subject:
    """Model to be compiled, and its graphs.

    types       types of the model's inputs: extents are numbers, the batch, or names of open extents
    usual       numbers and deciding values for which it is compiled first
    profiles    optimisation profiles; (): any shapes
    deciding    inputs whose values the graphs are compiled for; graphs do not have them as inputs
    dependence  dependence of the items of a batch, if known from a plan of the model
    """
    builder: Builder
    source: OnnxModel
    types: Mapping[str, TensorType]
    usual: Extents = field(default_factory=dict)
    profiles: tuple[Bounds, ...] = ()
    deciding: tuple[str, ...] = ()
    graphs: dict[tuple[Any, ...], Graph] = field(default_factory=dict)      # cache, which subjects may share
    kept: int = KEPT
    dependence: str | None = None

    @property
    def is_open(self) -> bool:
        return bool(self.usual)

    @property
    def graph(self) -> Graph:
        """Graph for the usual extents."""
        return self.at(self.usual)

    @property
    def inputs(self) -> tuple[IoTensor, ...]:
        """Inputs of engines: images may be pixels."""
        return fed(self.types, self.builder.config.pixels)

    def at(self, extents: Extents) -> Graph:
        """Return the optimised float graph for numbers of the open extents and values of deciding inputs."""
        key = tuple(extents[name] for name in self.usual)
        graph = self.graphs.get(key)
        if graph is None:
            graph = self.import_graph(extents)
            if len(self.graphs) > self.kept:
                oldest, *_ = (known for known in self.graphs if known != tuple(self.usual.values()))
                del self.graphs[oldest]
            self.graphs[key] = graph
        return graph

    def import_graph(self, extents: Extents, caches: Sequence[Cache] = ()) -> Graph:
        """Import and optimise the graph for extents, which may be symbolic, bypassing the cache.

        caches: caches to be placed in memory with room for extents[CACHE_CAPACITY] tokens.
        """
        if not self.usual:
            return self.builder.graph(self.source)
        shapes = shapes_for(self.types, extents)
        if caches:
            shapes = shapes_with_capacity(shapes, caches, extents[CACHE_CAPACITY])
        values = {name: np.array(extents[value_name(name)]).astype(self.types[name].dtype).reshape(
            _numbers(shapes.pop(name))) for name in self.deciding}
        decided = f"the values of {', '.join(values)} decide what is computed" if values else self.dependence
        graph = self.builder.graph(self.source.with_constants(values), shapes, decided)
        if values and not graph.dependence and any(graph.shape(name)[:1] == (BATCH,) for name in graph.inputs):
            graph = replace(graph, dependence=decided or "")
        return with_caches_in_place(graph, caches, extents[CACHE_CAPACITY]) if caches else graph

    def extents_of(self, feed: Mapping[str, Array]) -> dict[str, Any]:
        """Return the numbers of open extents and the values of deciding inputs in a feed. Raises InputError."""
        found = extents_of_feed(self.source.name, self.inputs, self.deciding, feed)
        return {name: found[name] for name in self.usual}


def _numbers(shape: Sequence[int | None]) -> list[int]:
    """Return the shape of a deciding input with a batch of one item."""
    return [1 if extent is None else extent for extent in shape]


def fed(types: Mapping[str, TensorType], pixels: Pixels | None) -> tuple[IoTensor, ...]:
    """Return the inputs of an engine for a model with inputs of these types."""
    if pixels:
        types = types_of_pixels(types, pixels)
    return tuple(IoTensor(name, kind.dtype.name, kind.shape) for name, kind in types.items())


def open_outputs(source: OnnxModel, graph: Graph) -> tuple[IoTensor, ...]:
    """Return the declarations of the outputs, with names for extents that may vary.

    The ONNX file's shapes are hints only, because they may be wrong.
    """
    declared = source.output_shapes()
    return tuple(replace(io, shape=_open_shape(io, declared.get(io.name))) for io in io_tensors(graph, graph.outputs))


def _open_shape(io: IoTensor, declared: tuple[Dim | None, ...] | None) -> tuple[Dim, ...]:
    if declared is None or len(declared) != len(io.shape):
        declared = (None,) * len(io.shape)
    return tuple(extent if isinstance(extent, str) or extent == declared_extent else
                 declared_extent if isinstance(declared_extent, str) else f"{io.name}.{axis}"
                 for axis, (extent, declared_extent) in enumerate(zip(io.shape, declared, strict=True)))


def read_subject(builder: Builder, model: Model, seen: Seen = lambda inputs: None) -> Subject:
    """Read a model, with the extents that the options and the file leave open.

    A batch axis that was not requested and cannot be left open becomes an open extent.

    Parameters
    ----------
    builder : Builder
    model : path, bytes or onnx.ModelProto
    seen : callable
        Returns an item of the data for the declared inputs, or None. Its shapes and values are the usual ones.

    Raises
    ------
    ModelError
    """
    config = builder.config
    source = read_model(model).with_constants(config.constants)
    types = open_types(source.name, source.declared(), config.shapes, config.max_batch is not None)
    alone = without_batch(types)
    if config.ragged:                   # leading axes count items, but ragged inputs cannot be divided along them
        types = alone
    tries = [(types, True)]
    if any(kind.shape[:1] == (BATCH,) for kind in types.values()) and not builder.declares_batch:
        # Without a batch before less likely extents: with extents of 1, a batch flattened with them seems to be open.
        tries = [(types, False), (alone, False), (types, True), (alone, True)]
    reason: EngineError | None = None
    for each, whatever in tries:
        try:
            subject = _compilable(builder, source, each, seen, whatever)
            if len(tries) > 1 and any(subject.types[name].shape[:1] != (BATCH,) for name in subject.deciding):
                builder.forget()    # one value decides for all items, so that a batch can be neither split nor merged
                builder.config = config
                return _compilable(builder, source, alone, seen)
        except EngineError as error:
            if isinstance(error, CompilerFault):
                raise
            reason = reason or error
            builder.forget()
            builder.config = config         # without the batch of profiles
            continue
        if each is alone:
            builder.notices.append("each number of items has a specialisation of its own, for the batch cannot be left "
                                   f"open: {reason}")
        return subject
    assert reason is not None
    raise reason


def _compilable(builder: Builder, source: OnnxModel, types: Mapping[str, TensorType], seen: Seen,
                whatever: bool = True) -> Subject:
    """Return the subject with usual extents that the importer accepts: from profiles, data, or guesses.

    whatever: try unlikely guesses, too.
    """
    inputs = fed(types, builder.config.pixels)
    names = open_extents(inputs)
    if not names:
        if builder.config.profiles:
            raise ConfigError(f"{source.name} has no open extents, so there are no profiles of shapes for it")
        return settled(Subject(builder, source, types), seen(inputs))
    profiles = tuple(bounds_of(source.name, inputs, profile) for profile in builder.config.profiles)
    builder.settle_batch(profiles)
    item = seen(inputs)
    extents: Iterable[Extents]
    if profiles:
        extents = [{name: profiles[0][name][1] for name in names}]
    elif item is not None:
        found = extents_of(source.name, inputs, {name: array.shape for name, array in item.items()})
        extents = [{name: found[name] for name in names}]
    else:
        extents = guesses(source, types, whatever)
    reason: EngineError | None = None
    first: Extents = {}
    for guess in extents:
        first = first or guess
        try:
            return settled(Subject(builder, source, types, guess, profiles), item)
        except CompilerFault:
            raise
        except EngineError as error:
            reason = reason or error
            builder.forget()
    assert reason is not None
    raise ModelError(f"{reason} (for {text(first)}; give shapes for which it works, by "
                     f"{placeholder(inputs)})") from reason


def settled(subject: Subject, item: Mapping[str, Array] | None, node: str = "") -> Subject:
    """Return the subject with its deciding inputs determined, and usual values that the importer accepts.

    Parameters
    ----------
    subject : Subject
    item : mapping, optional
        Item of the data whose values are used; otherwise likely ones are tried.
    node : str
        Node that needs the values of the deciding inputs.

    Raises
    ------
    UnknownValueError
        Shapes depend on the values of a large input, or the importer accepts no likely values.
    """
    reason: EngineError | None = None
    for values in likely_values(subject.source, subject.types, subject.deciding) if subject.deciding else [{}]:
        shapes = shapes_for(subject.types, subject.usual)
        found = {value_name(name): value_of(
            item[name] if item else filled(subject.types[name], _numbers(shapes[name]), number),
            subject.types[name].dtype.name) for name, number in values.items()}
        tried = replace(subject, usual={**subject.usual, **found}, graphs={})
        try:
            tried.graph         # noqa: B018
            return tried
        except UnknownValueError as error:
            more = tuple(name for name in error.inputs if name not in subject.deciding)
            if not more or not all(may_decide(subject.types[name]) for name in more):
                raise
            subject.builder.forget()
            return settled(replace(subject, deciding=(*subject.deciding, *more)), item, error.node)
        except EngineError as error:
            if isinstance(error, CompilerFault) and (item or not values):
                raise           # otherwise the guessed values may be the cause: not a valid axis or size
            reason = reason or error
            subject.builder.forget()
    assert reason is not None
    if subject.deciding:
        raise UnknownValueError(str(reason), subject.deciding, node) from reason
    raise reason
