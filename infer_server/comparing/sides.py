"""Sides of a comparison: a plan, or an ONNX file, which gives its outputs and its inner tensors for an item."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from infer_server.calibration.accuracy.oracle import Oracle, oracle_of
from infer_server.calibration.accuracy.sources import selections, selections_of_model
from infer_server.calibration.accuracy.verify import tested_inputs
from infer_server.calibration.data.generated import generated
from infer_server.calibration.data.items import CalibrationData, Feed, batched_inputs
from infer_server.engines.backends.device import Show
from infer_server.engines.backends.fallback import to_real
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.specialise import graph_at
from infer_server.engines.compiler.subject import Subject, read_subject
from infer_server.engines.errors import EngineError, InputError
from infer_server.engines.frontend.onnx_file import OnnxModel, outline_of, read_model
from infer_server.engines.ir.dtypes import BITS, as_named, is_float
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.loading import load_engine
from infer_server.engines.passes.outputs import shown_name
from infer_server.engines.passes.quantization.smoothing import is_smoothed
from infer_server.engines.plan.extents import extents_of_feed, value_name
from infer_server.engines.plan.file import read_outline
from infer_server.engines.plan.plan import IoTensor
from infer_server.engines.runtime.specialisation import Specialisation

VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
UNKNOWN_BYTES = 16 << 20        # assumed size of a tensor of unknown shape
Layers = Callable[[Feed, Show], None]       # runs an item and passes the inner tensors to `Show`


@dataclass(frozen=True)
class Generator:
    """Inputs of a side and their generation.

    inputs      inputs as the model declares them, with open extents
    usual       numbers of the open extents
    items       returns so many generated items
    """
    inputs: tuple[IoTensor, ...]
    usual: Mapping[str, Any]
    items: Callable[[int], CalibrationData]


class Side(Protocol):
    """One side of a comparison."""

    @property
    def name(self) -> str:
        """Name of the file and of the runtime that executes it, for reports."""

    @property
    def inputs(self) -> Mapping[str, str]:
        """Dtypes of the inputs that must be fed."""

    @property
    def outputs(self) -> tuple[str, ...]: ...

    @property
    def selected(self) -> frozenset[str]:
        """Outputs that a selection decides, such as TopK."""

    @property
    def tensors(self) -> Mapping[str, int]:
        """Bytes of the inner tensors of an item, in the order of the graph."""

    @property
    def views(self) -> Mapping[str, str]:
        """Tensors that hold the elements of another one, which is the value, in another shape or order."""

    @property
    def reason(self) -> str:
        """Reason why the side shows no inner tensors; "" if it does."""

    def fits(self, feed: Feed) -> bool:
        """Return True if inner tensors can be shown for the shapes of the feed."""

    def run(self, feed: Feed) -> dict[str, Any]:
        """Return the outputs, floats as real numbers; a sequence is a list."""

    def layers(self, names: Sequence[str]) -> Layers:
        """Return a function that shows these inner tensors in float. Raises EngineError."""

    def generator(self) -> Generator:
        """Return the generator of inputs. Raises EngineError."""


def side_of(path: str | Path) -> Side:
    """Open a plan, or an ONNX file, which is recognised by its suffix .onnx. Raises EngineError, OSError."""
    return OnnxSide(Path(path)) if Path(path).suffix == ".onnx" else PlanSide(Path(path))


class PlanSide:
    """Side of a plan. Inner tensors come from its graph, compiled for this machine with these shown in float."""

    def __init__(self, path: Path) -> None:
        self._engine = load_engine(path, specialise="off")
        self._plan = plan = self._engine.plan
        self.name = f"{path} ({plan.precision}, {plan.machine.target})"
        self.precision = plan.precision
        self.recorded: Mapping[str, Any] | None = plan.metadata.get("preprocess")   # preprocessing of the calibration
        self.outputs = tuple(io.name for io in self._engine.outputs)
        self.inputs = {io.name: io.dtype for io in self._engine.inputs}
        built_for = read_outline(path).machine.target
        self.built_for = built_for if built_for != plan.machine.target else ""  # target that this machine cannot run
        self.graph: Graph | None = None
        self.reason = ""
        try:
            self.graph = graph_at(plan)
        except EngineError as error:
            self.reason = f"{path}: {error}"

    @property
    def selected(self) -> frozenset[str]:
        return frozenset(selections(self.graph)) if self.graph else frozenset()

    @cached_property
    def tensors(self) -> Mapping[str, int]:
        graph = self.graph
        if graph is None:
            return {}
        names = [name for node in graph.nodes for name in node.outputs if name and name not in graph.outputs]
        return {name: _bytes(graph.shape(name)) for name in names
                if is_float(graph.types[name]) and not is_smoothed(graph, name)}

    @property
    def views(self) -> Mapping[str, str]:
        return {node.outputs[0]: node.inputs[0] for node in (self.graph.nodes if self.graph else ())
                if node.op in VIEWS}

    def fits(self, feed: Feed) -> bool:
        """Return True unless the plan has open extents and the feed has others than it was built for."""
        part = self._plan.open
        if part is None:
            return True
        extents = extents_of_feed(self._plan.name, part.inputs, part.deciding, feed)
        return all(extents[name] == number for name, number in self._plan.extents.items())

    def run(self, feed: Feed) -> dict[str, Any]:
        types = {io.name: io.dtype for io in self._engine.outputs}
        return {name: _readable(value, types[name]) for name, value in self._engine.run(feed).items()}

    def layers(self, names: Sequence[str]) -> Layers:
        graph = self.graph
        assert graph is not None
        engine = Specialisation(Builder(BuildConfig(timing=False)).showing(graph, names))
        shown = {shown_name(name): name for name in names}
        types = {name: str(graph.types[name].dtype) for name in names}

        def run(feed: Feed, show: Show) -> None:
            def pass_on(name: str, array: Array) -> None:
                if name in shown:
                    show(shown[name], to_real(array, None, types[shown[name]]))
            engine.show({name: feed[name] for name in graph.inputs}, pass_on)
        return run

    def generator(self) -> Generator:
        plan = self._plan
        return Generator(self._engine.inputs, plan.extents, self._items)

    def _items(self, count: int) -> CalibrationData:
        if self.graph is None:      # a program, or stripped: the inputs of a new context are likely ones
            context = self._engine.create_context()
            feed = {io.name: np.array(context.input(io.name)) for io in self._engine.inputs}
            return CalibrationData("inputs of the build", lambda: iter([feed]), 1, batched_inputs(self._engine.inputs))
        return _with(generated(tested_inputs(self._engine)[0], self.graph, count), self._engine.usual_values())


class OnnxSide:
    """Side of an ONNX file, run by ONNX Runtime if that is installed and supports it, else by the NumPy reference."""

    def __init__(self, path: Path) -> None:
        self._path = path
        outline = outline_of(path)
        self.inputs = {io.name: io.dtype for io in outline.inputs}
        self.optional = {io.name for io in outline.defaulted}
        self.outputs = tuple(io.name for io in outline.outputs)
        self.reason = ""
        self._oracles: dict[tuple[Any, ...], Oracle] = {}

    @property
    def name(self) -> str:
        ran = "; layers by ".join(dict.fromkeys(oracle.name for oracle in self._oracles.values()))
        return f"{self._path} ({ran})" if ran else str(self._path)

    @cached_property
    def _model(self) -> OnnxModel:
        return read_model(self._path)

    @property
    def selected(self) -> frozenset[str]:
        return frozenset(selections_of_model(self._model))

    @cached_property
    def tensors(self) -> Mapping[str, int]:
        outputs = {*self.outputs}
        return {name: 0 for node in self._model.proto.graph.node if node.op_type != "Constant"
                for name in node.output if name and name not in outputs}

    @property
    def views(self) -> Mapping[str, str]:
        return {node.output[0]: node.input[0] for node in self._model.proto.graph.node if node.op_type in VIEWS}

    def fits(self, feed: Feed) -> bool:
        return True

    def run(self, feed: Feed) -> dict[str, Any]:
        return self._answer(feed, ())

    def layers(self, names: Sequence[str]) -> Layers:
        def run(feed: Feed, show: Show) -> None:
            for name, array in self._answer(feed, tuple(names)).items():
                if name in requested:
                    show(name, array)
        requested = {*names}
        return run

    def _answer(self, feed: Feed, shown: tuple[str, ...]) -> dict[str, Any]:
        oracle = self._oracle(feed, shown)
        try:
            values = oracle.answer(feed)
        except EngineError:
            raise
        except Exception as error:      # ONNX Runtime raises a different class for each status
            raise InputError(f"{self._path}: {oracle.name} cannot run an item: {str(error).splitlines()[0]}") from error
        return {name: _readable(value, str(getattr(value, "dtype", ""))) for name, value in values.items()}

    def _oracle(self, feed: Feed, shown: tuple[str, ...]) -> Oracle:
        """Return the oracle for a feed. ONNX Runtime accepts any shapes; the reference needs a graph for each."""
        shapes = {name: array.shape for name, array in feed.items()}
        for key in ((shown,), (shown, *shapes.items())):
            if key in self._oracles:
                return self._oracles[key]
        oracle = oracle_of(self._path, shapes, shown=shown)
        while len(self._oracles) > 1:       # a session holds the weights: the outputs' one is kept, and one other
            del self._oracles[list(self._oracles)[1]]
        self._oracles[(shown, *shapes.items()) if oracle.slow else (shown,)] = oracle
        return oracle

    def generator(self) -> Generator:
        subject = read_subject(Builder(BuildConfig(timing=False, target="numpy")), self._path)
        return Generator(subject.inputs, subject.usual, lambda count: _items_of(subject, count))


def _items_of(subject: Subject, count: int) -> CalibrationData:
    """Generate items of a model for its usual shapes and values of deciding inputs."""
    inputs, usual = subject.inputs, subject.usual
    concrete = tuple(IoTensor(io.name, io.dtype, tuple(usual.get(str(extent), extent) for extent in io.shape))
                     for io in inputs)
    fixed = {io.name: np.array(usual[value_name(io.name)]).astype(io.dtype).reshape(io.shape_of(1))
             for io in concrete if value_name(io.name) in usual}
    return _with(generated(concrete, subject.graph, count), fixed)


def _readable(value: Any, dtype: str) -> Any:
    """Convert a tensor that NumPy lacks, or its bits as an engine gives them, to float32."""
    return as_named(value, dtype).astype(np.float32) if dtype in BITS else value


def _with(data: CalibrationData, fixed: Feed) -> CalibrationData:
    """Return the data with these inputs in place of the generated ones."""
    return CalibrationData(data.source, lambda: ({**feed, **fixed} for feed in data), data.count, data.batched)


def _bytes(shape: Sequence[int | str]) -> int:
    """Return the bytes of one item of a float32 tensor."""
    size = 4
    for extent in shape:
        size *= extent if isinstance(extent, int) else 1
    return size
