"""What is built: a model as float graphs. There is one where the model's shapes are known but for the batch; else one
for each set of numbers that its open extents and deciding inputs may have, made when it is asked for.

    subject = read_subject(builder, "m.onnx")
    subject.inputs                          # x float32 [batch, 3, H, W]
    subject.at({"H": 320, "W": 480})        # the optimised float graph for these
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engines.compiler.builder import Builder
from engines.compiler.guesses import guesses
from engines.errors import CompilerFault, ConfigError, EngineError, ModelError, UnknownValueError
from engines.frontend.cutting.deciding import filled, likely_values, may_decide
from engines.frontend.extents import open_types, shapes_for, without_batch
from engines.frontend.onnx_file import Model, OnnxModel, read_model
from engines.ir.graph import BATCH, Array, Graph, TensorType
from engines.ir.pixels import Pixels
from engines.passes.pixels import types_of_pixels
from engines.plan.extents import (
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
from engines.plan.plan import IoTensor

Seen = Callable[[Sequence[IoTensor]], Mapping[str, Array] | None]

KEPT = 4            # graphs of other extents, by default: each holds what its constants were folded to


@dataclass
class Subject:
    """A model, and the graphs that have been made of it.

    types       of the model's inputs: extents are numbers, the batch, or open ones by name
    usual       the numbers for which it is compiled first
    profiles    what each extent may be, and is compiled for at once; (): whatever comes
    deciding    inputs of the model whose values it is compiled for; graphs do not have them
    dependence  of the items of a batch, where a plan of the model has it already
    """
    builder: Builder
    source: OnnxModel
    types: Mapping[str, TensorType]
    usual: Extents = field(default_factory=dict)
    profiles: tuple[Bounds, ...] = ()
    deciding: tuple[str, ...] = ()
    graphs: dict[tuple[Any, ...], Graph] = field(default_factory=dict)      # made so far; several may have it in common
    kept: int = KEPT
    dependence: str | None = None

    @property
    def is_open(self) -> bool:
        return bool(self.usual)

    @property
    def graph(self) -> Graph:
        """For the usual extents."""
        return self.at(self.usual)

    @property
    def inputs(self) -> tuple[IoTensor, ...]:
        """As they are fed to engines: images may be pixels."""
        return fed(self.types, self.builder.config.pixels)

    def at(self, extents: Extents) -> Graph:
        """The optimised float graph for these numbers of the open extents, and these values of deciding inputs."""
        key = tuple(extents[name] for name in self.usual)
        graph = self.graphs.get(key)
        if graph is None:
            graph = self.made(extents)
            if len(self.graphs) > self.kept:
                oldest, *_ = (known for known in self.graphs if known != tuple(self.usual.values()))
                del self.graphs[oldest]
            self.graphs[key] = graph
        return graph

    def made(self, extents: Extents) -> Graph:
        """The same, made anew: of extents that may be counted."""
        if not self.usual:
            return self.builder.graph(self.source)
        shapes = shapes_for(self.types, extents)
        values = {name: np.array(extents[value_name(name)]).astype(self.types[name].dtype).reshape(
            _numbers(shapes.pop(name))) for name in self.deciding}
        decided = f"the values of {', '.join(values)} decide what is computed" if values else self.dependence
        graph = self.builder.graph(self.source.with_constants(values), shapes, decided)
        if values and not graph.dependence and any(graph.shape(name)[:1] == (BATCH,) for name in graph.inputs):
            graph = replace(graph, dependence=decided or "")
        return graph

    def extents_of(self, feed: Mapping[str, Array]) -> dict[str, Any]:
        """The open extents, and the values of deciding inputs, in a feed. Raises InputError."""
        found = extents_of_feed(self.source.name, self.inputs, self.deciding, feed)
        return {name: found[name] for name in self.usual}

    def of_feed(self, feed: Mapping[str, Array]) -> Graph:
        """The graph for the shapes of a feed."""
        return self.at(self.extents_of(feed)) if self.usual else self.graph


def _numbers(shape: Sequence[int | None]) -> list[int]:
    """The shape of a deciding input: where it has the batch, it is one item."""
    return [1 if extent is None else extent for extent in shape]


def fed(types: Mapping[str, TensorType], pixels: Pixels | None) -> tuple[IoTensor, ...]:
    """The inputs of engines for a model with inputs of these types."""
    if pixels:
        types = types_of_pixels(types, pixels)
    return tuple(IoTensor(name, kind.dtype.name, kind.shape) for name, kind in types.items())


def read_subject(builder: Builder, model: Model, seen: Seen = lambda inputs: None) -> Subject:
    """The model, with the extents that options and file leave open.

    seen: an item of the data, given the inputs as the model declares them; its shapes and values are the usual ones.

    A batch that cannot be left open, where nobody asked for one, is an open extent like the others. Raises ModelError.
    """
    config = builder.config
    source = read_model(model).with_constants(config.constants)
    types = open_types(source.name, source.declared(), config.shapes, config.max_batch is not None)
    alone = without_batch(types)
    if config.ragged:                   # what leads the other inputs counts items, but no input holds them one by one
        types = alone
    tries = [(types, True)]
    if any(kind.shape[:1] == (BATCH,) for kind in types.values()) and not builder.batch_is_asked_for:
        # Without a batch before less likely extents: for 1, say, it seems to be open where it is flattened with them.
        tries = [(types, False), (alone, False), (types, True), (alone, True)]
    reason: EngineError | None = None
    for each, whatever in tries:
        try:
            subject = _compilable(builder, source, each, seen, whatever)
            if len(tries) > 1 and any(subject.types[name].shape[:1] != (BATCH,) for name in subject.deciding):
                builder.forget()    # a value for all items: such a batch is neither cut nor merged, nor served as one
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
    """The subject with usual extents for which there is a graph: those of profiles or data, else likely ones; unlikely
    ones only if `whatever` there is a graph for will do."""
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
    """The subject, with the inputs that turn out to be deciding, and values of these for which there is a graph: those
    of the item, else likely ones. node: the one for whose sake they are. Raises UnknownValueError: shapes follow from
    the values of a large input, or there is no graph for likely ones."""
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
                raise           # else the values that were guessed are at fault: no axis, no size
            reason = reason or error
            subject.builder.forget()
    assert reason is not None
    if subject.deciding:
        raise UnknownValueError(str(reason), subject.deciding, node) from reason
    raise reason
