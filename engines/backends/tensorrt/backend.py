"""TensorRT's compiler side. Its targets are NVIDIA's libraries; each builds and runs its own engines.

The graph is exported to ONNX: fused, and either quantised to INT8 with the calibrated ranges or converted to float16.
The plan stores the engine as its code, and the layers of the engine as its steps.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer_server.engines.backends import backend_of
from infer_server.engines.backends.base import Backend, Progress, Session, TimedNode
from infer_server.engines.backends.tensorrt.runtime.library import TARGETS, LibraryMissing, library
from infer_server.engines.capacity import gigabytes, too_large
from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.graph import BATCH, Graph
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.plan import Buffer, MachinePart, Plan, Step, TensorView
from infer_server.engines.plan.roofline import Peaks
from infer_server.engines.plan.symbolic.plans import CompiledKernel


@dataclass(frozen=True)
class TensorRtChosen:
    """Graph whose kernels TensorRT chooses."""
    graph: Graph
    max_batch: int
    opt_batch: int

    def times(self) -> Sequence[TimedNode]:
        return ()


class TensorRtSession:
    """Session that builds engines with one of NVIDIA's libraries."""
    arithmetic = ("fp32", "int8", "fp16")
    timed: Mapping[str, Mapping[str, float]] = {}
    dynamic_kernels: Sequence[CompiledKernel] | None = None

    def __init__(self, target: str, module: Any) -> None:
        self.target, self.module = target, module

    @property
    def processor(self) -> str:
        return detect().model

    def take_over(self, plan: Plan, dynamic: Sequence[CompiledKernel] = ()) -> None:
        """Do nothing: each engine has its own weights."""

    def choose(self, graph: Graph, max_batch: int, opt_batch: int | None = None,
               progress: Progress | None = None) -> TensorRtChosen:
        """Check that TensorRT can hold the inputs and outputs.

        Raises
        ------
        ConfigError
            The batch is not the first axis of an input or output, or the tensors exceed the memory.
        """
        views = [_view(graph, name, 0) for name in (*graph.inputs, *graph.outputs)]
        if late := [view.name for view in views if view.batch_axis]:
            raise ConfigError(f"{graph.name}: '{late[0]}' has its batch on an axis other than 0; plans for "
                              f"{self.target} need it on axis 0")
        if wrong := too_large(size := sum(_bytes(view, max_batch) for view in views)):
            raise ConfigError(f"{graph.name}: inputs and outputs take {gigabytes(size)}, {wrong}; lower --max-batch")
        return TensorRtChosen(graph, max_batch, opt_batch or max(max_batch, 1))

    def choose_symbolic(self, graph: Graph, max_batch: int, opt_batch: int | None = None) -> None:
        """Return None: an engine is limited to the shapes of its profile."""

    def settle(self, chosen: TensorRtChosen, progress: Progress | None = None) -> TensorRtChosen:
        return chosen

    def tuned(self, plan: Plan) -> Plan:
        return plan

    def assemble(self, chosen: TensorRtChosen) -> MachinePart:
        """Build the engine. Raises ConfigError if TensorRT rejects the model."""
        from infer_server.engines.backends.tensorrt.build import Layer, build
        from infer_server.engines.backends.tensorrt.model import halved, symmetric
        from infer_server.engines.frontend.onnx_export import onnx_from_graph
        graph, most = chosen.graph, max(chosen.max_batch, 1)
        precision = precision_of(graph)
        model = onnx_from_graph(graph)
        model = symmetric(model) if precision == "int8" else halved(model) if precision == "fp16" else model
        built = build(self.module, model.SerializeToString(), graph.name, (min(chosen.opt_batch, most), most),
                      exact=precision == "fp32")
        names = (*graph.inputs, *graph.outputs)
        views = [_view(graph, name, number) for number, name in enumerate(names)]
        layers = built.layers or (Layer(graph.name, "whole", "", ""),)     # if the log lists none
        split, last = len(graph.inputs), len(layers)
        buffers = tuple(Buffer(view.name, _bytes(view, chosen.max_batch), -1 if number < split else 0, last)
                        for number, view in enumerate(views))
        steps = tuple(Step(symbol=layer.name, operands=(), rows_per_item=0, name=layer.name, precision=precision,
                           tactic=f"{layer.kind}: {layer.tensors}") for layer in layers)
        return MachinePart("tensorrt", self.target, tuple(views[:split]), tuple(views[split:]), buffers, steps,
                           cpu={"model": f"{self.target} {self.module.__version__}"}, code=(built.engine,))


def precision_of(graph: Graph) -> str:
    """Return the precision ("int8", "fp16" or "fp32") that the graph was built for."""
    if any(kind.quant for kind in graph.types.values()):
        return "int8"
    return "fp16" if any(kind.dtype == "float16" for kind in graph.types.values()) else "fp32"


def _view(graph: Graph, name: str, buffer: int) -> TensorView:
    """Return the view of a dense tensor that fills its buffer."""
    kind = graph.types[name]
    shape = tuple(int(extent) for extent in kind.shape if extent != BATCH)
    size = kind.dtype.itemsize
    strides = tuple(size * math.prod(shape[axis + 1:]) for axis in range(len(shape)))
    batched = BATCH in kind.shape
    return TensorView(name, kind.dtype.name, shape, buffer, 0, strides, size * math.prod(shape), batched,
                      batch_axis=kind.shape.index(BATCH) if batched else 0)


def _bytes(view: TensorView, max_batch: int) -> int:
    return view.item_stride * (max(max_batch, 1) if view.batched else 1)


class TensorRtBackend:
    """Backend whose targets are the TensorRT libraries."""
    name = "tensorrt"
    targets = tuple(TARGETS)
    selects = False

    def session(self, target: str, cache: TimingCache, timing: bool) -> Session:
        """Return a session. Raises ConfigError if the library is not installed."""
        try:
            return TensorRtSession(target, library(target))
        except LibraryMissing as error:
            raise ConfigError(f"target '{target}': {error}") from error

    def session_here(self, cache: TimingCache, sibling: Session) -> Session:
        """Return a session of the default backend: this machine may have no GPU."""
        return backend_of("").session_here(cache, sibling)

    def peaks(self) -> Peaks:
        """Return the data-sheet peaks of this machine's GPU."""
        return backend_of("cuda").peaks()


BACKEND: Backend = TensorRtBackend()
