"""Builder: compiles models to plans for one configuration.

    builder = Builder(BuildConfig(precision="int8"))
    graph = builder.graph("m.onnx")                     # imported, simplified, fused; all float
    ranges = ...                                        # of builder.edges(graph), from calibration
    plan = builder.plan(graph, ranges)

A Builder keeps its kernels and their times: a second build with other ranges only repacks constants.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from infer_server.engines.backends import backend_of
from infer_server.engines.backends.base import Chosen, Progress, Session, TimedNode
from infer_server.engines.compiler.max_batch import DEFAULT_MAX_BATCH, has_batch, max_batch_of, usual_max_batch
from infer_server.engines.compiler.weight_only.scheme import WeightOnly
from infer_server.engines.errors import ConfigError, did_you_mean
from infer_server.engines.faults import faults_named
from infer_server.engines.frontend.inputs import Value, is_size
from infer_server.engines.frontend.onnx_file import Model
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.graph import BATCH, Graph
from infer_server.engines.ir.recipe import Pixels
from infer_server.engines.ir.serialize import graph_to_json
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.passes.outputs import show_in_float
from infer_server.engines.passes.pipeline import optimise, simplify
from infer_server.engines.passes.pixels import take_pixels
from infer_server.engines.passes.quantization.kept import kept_nodes
from infer_server.engines.passes.quantization.qdq import is_quantised, quantize_by_fake_quantize
from infer_server.engines.passes.quantization.quantize import (
    FLOAT_PRECISIONS,
    edges_to_calibrate,
    quantize,
    set_float_precision,
)
from infer_server.engines.plan.extents import Bounds
from infer_server.engines.plan.plan import IoTensor, Plan
from infer_server.engines.plan.symbolic.plans import CompiledKernel
from infer_server.engines.version import COMPILER_VERSION

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "best")
TRIAL_BATCH = 4             # maximum batch of the plans that calibration runs
Ranges = Mapping[str, tuple[float, float]]
Shapes = Mapping[str, tuple[int | None, ...]]       # shapes of inputs by name; None is the batch
Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]    # input -> (min, opt, max) shapes


@dataclass(frozen=True)
class BuildConfig:
    """The options of a build; all but the timing cache are part of the engine cache's key.

    Attributes
    ----------
    precision
        "fp32", "fp16", "bf16", "int8", or "best".
    max_batch
        The most items of one run. None: 32 if the model has a batch axis (see usual_max_batch).
    opt_batch
        Items with which tactics are timed. None: one, and more where several items share a tile.
    target
        Name of an instruction set or GPU; "" is this machine's best.
    shapes
        Fixed shapes of inputs that the model leaves open.
    profiles
        Least, usual and largest shapes of inputs that stay open; the usual ones are compiled at the build.
    constants
        Inputs that always have this value and are inputs no more.
    ragged
        Inputs that hold the elements of several items, one behind the other.
    optional
        Inputs with a value in the model that a run may leave out.
    pixels
        The image input takes uint8 [N, H, W, C] and normalises it in this way.
    keep_float
        ONNX nodes that an INT8 build leaves in float: names, patterns ("head/*"), "NODE..." for all that follows.
    float_type
        Precision of what an INT8 build leaves in float: "fp32", "bf16" or "fp16".
    keep_fp32
        ONNX nodes among those of keep_float that compute in float32 whatever the float_type is.
    weight_only
        Weights of a float build that are stored as INT8 or INT4: WeightOnly("int4"). None: as in the model.
    timing
        Time the tactics; False takes the cheapest by its cost.
    timing_cache
        A file of times; "" keeps times for this build only.
    symbolic_plans
        Make the symbolic plans of a model with open extents at the build, for the shapes that can be foreseen.
    threads
        Threads that run-engine takes by default.
    """
    precision: str = "fp32"
    max_batch: int | None = None
    opt_batch: int | None = None
    target: str = ""
    shapes: Shapes = field(default_factory=dict)
    profiles: tuple[Profile, ...] = ()
    constants: Mapping[str, Value] = field(default_factory=dict)
    ragged: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    pixels: Pixels | None = None
    keep_float: tuple[str, ...] = ()
    float_type: str = "fp32"
    keep_fp32: tuple[str, ...] = ()
    weight_only: WeightOnly | None = None
    timing: bool = True
    timing_cache: str = ""
    symbolic_plans: bool = True
    threads: int = 1

    def __post_init__(self) -> None:
        for name, known in (("precision", PRECISIONS), ("float_type", FLOAT_PRECISIONS)):
            if (chosen := getattr(self, name)) not in known:
                raise ConfigError(f"unknown {name} '{chosen}'{did_you_mean(str(chosen), known)}")
        if self.weight_only is not None:
            WeightOnly.checked(self.weight_only, self.precision)
        for name in ("max_batch", "opt_batch", "threads"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value > 0):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: it must be a whole number of at least 1")

    @staticmethod
    def of(options: Mapping[str, Any]) -> BuildConfig:
        """Return the configuration with these fields. Raises ConfigError for an unknown field."""
        known = [field.name for field in fields(BuildConfig)]
        if unknown := sorted(set(options) - set(known)):
            raise ConfigError(f"unknown option '{unknown[0]}'{did_you_mean(unknown[0], known)}")
        return BuildConfig(**options)


class Builder:
    """Compiler of models with one configuration, for any number of builds."""

    def __init__(self, config: BuildConfig, progress: Progress | None = None, fewer: bool = False) -> None:
        """Create the sessions of the target and of this machine.

        fewer: for specialisations of an open model: the maximum batch may be less than configured if items are large
        for this machine's memory.
        """
        self.config, self.progress, self._fewer = config, progress, fewer
        self.cache = TimingCache(config.timing_cache or None)
        backend = backend_of(config.target)
        self._session = backend.session(config.target, self.cache, config.timing)
        # Session for plans that the build itself runs: calibration, trials.
        self._here = backend.session_here(self.cache, self._session)
        self.log: list[Any] = []            # log of the passes, for build-engine -v
        self.notices: list[str] = []        # warnings and hints for the user, a line each
        self._is_open = False               # the current graph is of an open model

    @property
    def target(self) -> str:
        return self._session.target

    @property
    def processor(self) -> str:
        """Name of the processor on which tactics are timed."""
        return self._session.processor

    @property
    def backend(self) -> str:
        return backend_of(self.config.target).name

    @property
    def selects(self) -> bool:
        return backend_of(self.config.target).selects

    # ---- graphs
    @faults_named()
    def graph(self, model: Model, shapes: Shapes | None = None, dependence: str | None = None) -> Graph:
        """Import and optimise a model as one float graph.

        Parameters
        ----------
        model : path, bytes or onnx.ModelProto
        shapes : mapping, optional
            Shapes of the inputs; by default those of the configuration.
        dependence : str, optional
            Dependence of the items of a batch, if known from other shapes.

        Raises
        ------
        ModelError
            The model cannot be imported.
        """
        self._is_open = shapes is not None
        imported = graph_from_onnx(model, shapes=self.config.shapes if shapes is None else shapes,
                                   constants=self.config.constants, notices=self.notices,
                                   keep_batch=self.config.max_batch is not None and shapes is None)
        if self.config.pixels:
            imported = take_pixels(imported, self.config.pixels)
        graph = optimise(simplify(imported, self.log, dependence), self.log)
        if graph.dependence:
            self.notices.append("the items of a batch depend on each other, so it is neither cut nor merged with "
                                f"others: {graph.dependence}")
        if has_batch(graph) and not self.config.max_batch and (
                most := usual_max_batch(graph, self._is_open)) < DEFAULT_MAX_BATCH:
            self.notices.append(f"items are large for this machine's memory: a plan takes {most} at "
                                f"once, not {DEFAULT_MAX_BATCH}, and runs more in slices; --max-batch sets how many")
        return graph

    @property
    def declares_batch(self) -> bool:
        """True if the options declare a batch: max_batch, or an input shape with a symbolic leading extent."""
        leading = [shape[0] for shape in self.config.shapes.values() if shape]
        return self.config.max_batch is not None or any(not is_size(extent) for extent in leading)

    def forget(self) -> None:
        """Clear the log and notices of a graph that was discarded."""
        self.log.clear()
        self.notices.clear()

    def settle_batch(self, profiles: Sequence[Bounds]) -> None:
        """Set max_batch and opt_batch from the profiles unless the options set them."""
        batches = [bounds[BATCH] for bounds in profiles if BATCH in bounds]
        if batches:
            most, usual = max(most for _, _, most in batches), batches[0][1]
            self.config = replace(self.config, max_batch=self.config.max_batch or most,
                                  opt_batch=self.config.opt_batch or (usual if usual > 1 else None))

    def edges(self, graph: Graph) -> tuple[str, ...]:
        """Return the tensors whose ranges an int8 build needs."""
        return edges_to_calibrate(graph)

    @faults_named()
    def stored(self, graph: Graph, ranges: Ranges | None = None, log: list[Any] | None = None) -> Graph:
        """Return the graph with the stored dtype of every tensor and the arithmetic of every node decided.

        log: list to which notes about nodes that stay in float are appended; trials pass none.
        """
        precision = self.config.precision
        if is_quantised(graph):
            graph = quantize_by_fake_quantize(graph, self.config.keep_float, log)
            floats = {"int8": self.config.float_type, "best": "fp32"}
            return set_float_precision(graph, floats.get(precision, precision), keep_fp32=self.config.keep_fp32)
        if precision in ("int8", "best") and ranges is not None:
            graph = quantize(graph, ranges, keep_float=self.config.keep_float, log=log)
            return graph if self.config.float_type == "fp32" else set_float_precision(
                graph, self.config.float_type, keep_fp32=self.config.keep_fp32)
        if precision == "int8":
            raise ConfigError("an int8 build needs calibration: give --calib, or --calib-cache with a cache that "
                              "exists (from Python, calibration=Calibration(data, cache=...))")
        return set_float_precision(graph, "fp32" if precision == "best" else precision,
                                   packed=self.config.weight_only is not None)

    # ---- plans
    def take_over(self, plan: Plan, kernels: Sequence[CompiledKernel] = ()) -> None:
        """Prepare to build the plan's model for other shapes: see Session.take_over."""
        self._session.take_over(plan, kernels)

    @property
    def timed(self) -> Mapping[str, Mapping[str, float]]:
        """Measured times that later specialisations of a plan reuse: see Session.timed."""
        return self._session.timed

    @faults_named()
    def plan(self, graph: Graph, ranges: Ranges | None = None, metadata: Mapping[str, Any] | None = None) -> Plan:
        """Compile an optimised graph to a plan; precision int8 needs the ranges of its edges."""
        try:
            if self.config.precision == "best" and not is_quantised(graph):
                chosen = min(self._candidates(graph, ranges), key=_time_us)
            else:
                chosen = self._chosen(self.stored(graph, ranges, self.log))
            settled = self._session.settle(chosen, self.progress)
            return self._session.tuned(self._plan(self._session, settled, metadata=metadata))
        finally:
            self.cache.save()       # even if the build is interrupted, to keep minutes of timing

    @faults_named()
    def symbolic_plan(self, graph: Graph) -> Plan | None:
        """Return the plan with dynamic kernels of a graph whose extents may be symbolic (engines/ir/symbolic.py).

        The graph's stored dtypes are decided: see `stored`. None if the backend has no dynamic kernels. Raises
        NotSymbolic.
        """
        chosen = self._session.choose_symbolic(graph, *self._batches(graph))
        return self._plan(self._session, chosen, bare=True) if chosen else None

    @property
    def dynamic_kernels(self) -> Sequence[CompiledKernel] | None:
        """Dynamic kernels compiled so far: see Session.dynamic_kernels."""
        return self._session.dynamic_kernels

    def _candidates(self, graph: Graph, ranges: Ranges | None) -> list[Chosen]:
        """Return the candidates of precision "best": int8 mixed with float32, int8, and each float precision.

        In the mixed one, layers that are faster in float32 stay float. Their comparison ignores the conversions between
        int8 and float layers; the total time includes them.
        """
        floats = [self._chosen(set_float_precision(graph, precision)) for precision in ("fp32", "bf16", "fp16")]
        if ranges is None:
            return floats
        int8 = self._chosen(quantize(graph, ranges, keep_float=self.config.keep_float, log=self.log))
        float_us = {node.name: node.time_us for node in floats[0].times()}
        slower = [name for node in int8.times() if node.time_us > float_us.get(node.name, math.inf)
                  for name in node.fuses]
        mixed = quantize(graph, ranges, keep_float=(*self.config.keep_float, *slower))
        return [self._chosen(mixed), int8, *floats]

    def times(self, graph: Graph, ranges: Ranges) -> Mapping[str, Sequence[TimedNode]]:
        """Return the times of the kernels of an optimised graph in INT8, and in each precision of the target."""
        graphs = {name: set_float_precision(graph, name) for name in FLOAT_PRECISIONS
                  if name == "fp32" or name in self._session.arithmetic}
        graphs["int8"] = quantize(graph, ranges, keep_float=self.config.keep_float)
        return {name: self._chosen(one).times() for name, one in graphs.items()}

    @faults_named()
    def time_us(self, graph: Graph, ranges: Ranges) -> float:
        """Return the time of an optimised graph in INT8, all kernels in microseconds an item; 0 without timing."""
        return math.fsum(node.time_us for node in self._chosen(self.stored(graph, ranges)).times())

    def _chosen(self, graph: Graph) -> Chosen:
        max_batch, opt_batch = self._batches(graph)
        if (opt_batch or 1) > max(max_batch, 1):
            raise ConfigError(f"--opt-batch {self.config.opt_batch}: " + (
                f"the plan takes at most {max_batch} items; raise --max-batch" if max_batch else
                "the model's inputs have no symbolic batch axis, so it is timed in the shape that it declares"))
        chosen: Chosen = self._session.choose(graph, max_batch, opt_batch, self.progress)
        return chosen

    @property
    def arithmetic_note(self) -> str:
        """Notice if the target lacks arithmetic of the requested precision, else ""."""
        if self.config.precision in {"fp16", "bf16"}.difference(self._session.arithmetic):
            return (f"{self.target} has no {self.config.precision} arithmetic that this compiler uses: "
                    f"tensors and weights are stored in {self.config.precision}, sums are in float32")
        return ""

    @faults_named()
    def trial(self, graph: Graph, ranges: Ranges, tensors: Collection[str] = ()) -> Plan:
        """Compile an optimised graph for this machine without timing, to measure the effect of ranges on the results.

        tensors: inner tensors to return in addition to the outputs; see `showing`.
        """
        return self.showing(self.stored(graph, ranges), tensors)

    @faults_named()
    def showing(self, graph: Graph, tensors: Collection[str]) -> Plan:
        """Compile a graph whose stored types are decided for this machine, without timing.

        The plan also returns these inner tensors in float, under the names of
        infer_server.engines.passes.outputs.shown_name.
        """
        return self._compile_here(show_in_float(graph, tensors))

    @faults_named()
    def observable(self, graph: Graph, tensors: Collection[str]) -> Plan:
        """Compile a float graph in float32 with these tensors as further outputs, for calibration."""
        watched = tuple(name for name in tensors if name not in graph.outputs)
        shown = replace(graph, outputs=(*graph.outputs, *watched), watched=watched)
        return self._compile_here(set_float_precision(shown, "fp32"))

    def _compile_here(self, graph: Graph) -> Plan:
        """Compile a temporary plan for this machine, without its graph."""
        max_batch = min(self._max_batch(graph), TRIAL_BATCH)
        return self._plan(self._here, self._here.choose(graph, max_batch), bare=True)

    def _plan(self, session: Session, chosen: Chosen, metadata: Mapping[str, Any] | None = None,
              bare: bool = False) -> Plan:
        """Assemble a plan. bare: omit the graph (see Plan.bare), which is then not serialised."""
        graph, machine = chosen.graph, session.assemble(chosen)
        kept = sorted(kept_nodes(graph, self.config.keep_float))
        document, arrays = ({}, dict(graph.constants)) if bare and machine.code else graph_to_json(graph)
        plan = Plan(
            graph.name, self.config.precision, chosen.max_batch, io_tensors(graph, graph.inputs),
            io_tensors(graph, graph.outputs), machine, document, arrays, dependence=graph.dependence,
            metadata={"compiler": COMPILER_VERSION, "threads": self.config.threads,
                      **({"opt_batch": self.config.opt_batch} if self.config.opt_batch else {}),
                      **({"kept_float": kept} if kept else {}), **(metadata or {})})
        return plan.bare() if bare else plan

    def _batches(self, graph: Graph) -> tuple[int, int | None]:
        """Return the maximum batch, and the batch that tactics are timed with or None."""
        max_batch, opt_batch = self._max_batch(graph), self.config.opt_batch
        return max_batch, min(opt_batch, max_batch) if opt_batch and self._fewer and max_batch else opt_batch

    def _max_batch(self, graph: Graph) -> int:
        return max_batch_of(graph, self.config.max_batch, self._is_open, self._fewer)


def io_tensors(graph: Graph, names: Sequence[str]) -> tuple[IoTensor, ...]:
    """Return the declarations of a graph's inputs or outputs for its plan."""
    types = ((name, graph.types[name]) for name in names)
    return tuple(IoTensor(name, kind.dtype.name, kind.shape) for name, kind in types)


def _time_us(chosen: Chosen) -> float:
    return sum(node.time_us for node in chosen.times())
