"""What is built: a model as float graphs. There is one where the model's shapes are known but for the batch; else one
for each set of numbers that its open extents may have, made when it is asked for.

    subject = read_subject(builder, "m.onnx")
    subject.inputs                          # x float32 [batch, 3, H, W]
    subject.at({"H": 320, "W": 480})        # the optimised float graph for these
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engines.compiler.builder import Builder
from engines.errors import CompilerFault, ConfigError, EngineError, ModelError
from engines.frontend.extents import likely_extents, open_types, shapes_for, without_batch
from engines.frontend.onnx_file import Model, OnnxModel, read_model
from engines.ir.graph import BATCH, Array, Graph, TensorType
from engines.passes.pixels import Pixels, types_of_pixels
from engines.plan.extents import Bounds, Extents, Shapes, bounds_of, example, extents_of, open_extents, text
from engines.plan.plan import IoTensor

Seen = Callable[[Sequence[IoTensor]], Shapes | None]

KEPT = 4            # graphs of other extents, at most: each holds what its constants were folded to
GUESSES = (1, 64, 32, 16, 2)        # for all open extents, where the likely ones make no graph


@dataclass
class Subject:
    """A model, and the graphs that have been made of it.

    types       of the model's inputs: extents are numbers, the batch, or open ones by name
    usual       the numbers for which it is compiled first
    profiles    what each extent may be, and is compiled for at once; (): whatever comes
    """
    builder: Builder
    source: OnnxModel
    types: Mapping[str, TensorType]
    usual: Extents = field(default_factory=dict)
    profiles: tuple[Bounds, ...] = ()
    _graphs: dict[tuple[int, ...], Graph] = field(default_factory=dict)

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
        """The optimised float graph for these numbers of the open extents."""
        key = tuple(extents[name] for name in self.usual)
        if key not in self._graphs:
            shapes = shapes_for(self.types, extents) if self.usual else None
            graph = self.builder.graph(self.source, shapes)
            if len(self._graphs) > KEPT:
                oldest, *_ = (known for known in self._graphs if known != tuple(self.usual.values()))
                del self._graphs[oldest]
            self._graphs[key] = graph
        return self._graphs[key]

    def extents_of(self, shapes: Shapes) -> dict[str, int]:
        """The open extents in inputs of these shapes. Raises InputError."""
        found = extents_of(self.source.name, self.inputs, shapes)
        return {name: found[name] for name in self.usual}

    def of_feed(self, feed: Mapping[str, Array]) -> Graph:
        """The graph for the shapes of a feed."""
        return self.at(self.extents_of({name: array.shape for name, array in feed.items()})) if self.usual else \
            self.graph


def fed(types: Mapping[str, TensorType], pixels: Pixels | None) -> tuple[IoTensor, ...]:
    """The inputs of engines for a model with inputs of these types."""
    if pixels:
        types = types_of_pixels(types, pixels)
    return tuple(IoTensor(name, kind.dtype.name, kind.shape) for name, kind in types.items())


def read_subject(builder: Builder, model: Model, seen: Seen = lambda inputs: None) -> Subject:
    """The model, with the extents that options and file leave open.

    seen: the shapes that data have, given the inputs as the model declares them; these are then the usual ones.

    A batch that cannot be left open, where nobody asked for one, is an open extent like the others. Raises ModelError.
    """
    config = builder.config
    source = read_model(model).with_constants(config.constants)
    types = open_types(source.name, source.declared(), config.shapes, config.max_batch is not None)
    try:
        return _compilable(builder, source, types, seen)
    except EngineError as reason:
        batched = any(kind.shape[:1] == (BATCH,) for kind in types.values())
        if isinstance(reason, CompilerFault) or not batched or builder.batch_is_asked_for:
            raise
        builder.forget()
        try:
            subject = _compilable(builder, source, without_batch(types), seen)
        except EngineError:
            raise reason from None
        builder.notices.append("each number of items has a specialisation of its own, for the batch cannot be left "
                               f"open: {reason}")
        return subject


def _compilable(builder: Builder, source: OnnxModel, types: Mapping[str, TensorType], seen: Seen) -> Subject:
    """The subject with usual extents for which there is a graph: those of profiles or data, else likely ones."""
    inputs = fed(types, builder.config.pixels)
    names = open_extents(inputs)
    if not names:
        if builder.config.profiles:
            raise ConfigError(f"{source.name} has no open extents, so there are no profiles of shapes for it")
        subject = Subject(builder, source, types)
        subject.graph       # noqa: B018
        return subject
    profiles = tuple(bounds_of(source.name, inputs, profile) for profile in builder.config.profiles)
    builder.settle_batch(profiles)
    shapes = None if profiles else seen(inputs)
    if profiles:
        guesses = [{name: profiles[0][name][1] for name in names}]
    elif shapes is not None:
        found = extents_of(source.name, inputs, shapes)
        guesses = [{name: found[name] for name in names}]
    else:
        guesses = [likely_extents(types), *(dict.fromkeys(names, guess) for guess in GUESSES)]
    reason: EngineError | None = None
    for guess in guesses:
        subject = Subject(builder, source, types, guess, profiles)
        try:
            subject.graph       # noqa: B018
            return subject
        except CompilerFault:
            raise
        except EngineError as error:
            reason = reason or error
            builder.forget()
    assert reason is not None
    raise ModelError(f"{reason} (for {text(guesses[0])}; give shapes for which it works, as in "
                     f"{example(inputs, guesses[0])})") from reason
