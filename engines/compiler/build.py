"""build_engine: compile a model to a plan, or fetch the plan from the engine cache.

    build = build_engine("m.onnx", precision="int8", calibration=Calibration("photos/", preprocess="imagenet"))
    build.save("m.plan")
    build.engine(threads=2).run({"input": array})

Calibration is passed in (infer_server.Calibration): the compiler only knows the interface of a source of ranges.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from infer_server.engines.capacity import trim
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.engine_cache import EngineCache, model_digest
from infer_server.engines.compiler.programs import plan_of
from infer_server.engines.compiler.ranges import Calibrated, Notify, Progress, RangeSource
from infer_server.engines.compiler.segments import Watched
from infer_server.engines.compiler.specialise import compiled, with_symbolic_plans
from infer_server.engines.compiler.subject import Subject
from infer_server.engines.compiler.weight_only.quantise import quantise_weights, to_nearest
from infer_server.engines.errors import ConfigError, ModelError
from infer_server.engines.frontend.onnx_file import Model, OnnxModel, read_model
from infer_server.engines.frontend.weight_only.layers import Layer, Rounder, with_initializers
from infer_server.engines.ir.graph import Array, Graph
from infer_server.engines.ir.recipe import Recipe
from infer_server.engines.machine import object_cache
from infer_server.engines.passes.quantization.kept import check_kept, kept_nodes
from infer_server.engines.passes.quantization.qdq import is_quantised
from infer_server.engines.plan.coverage import Coverage, coverage_of
from infer_server.engines.plan.file import write_plan
from infer_server.engines.plan.plan import DEFAULTS, IoTensor, Plan
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.load.create import engine_of
from infer_server.engines.runtime.load.options import LoadOptions
from infer_server.engines.summary import Summarised, Summary, listed, summary

MOST_VALUES = 1 << 16   # maximum elements of an optional input's default, which the plan's manifest holds
MOST_ITEMS = 32         # number of items on which a program is calibrated; each may have other shapes


@dataclass(frozen=True, repr=False)
class EngineBuild(Summarised):
    """The result of `build_engine`.

    Attributes
    ----------
    plan
        The plan. Its `metadata` records the choices: "calibrator", "calibrators" (the error of each), "preprocess", ...
    notices
        Lines that the user should read.
    notes
        What the passes did and refused, printable as lines; empty for a plan from the cache.
    cached
        The file of the engine cache that the plan was taken from; None if it was built.
    entry
        The file of the engine cache that holds the plan now; None if it is not kept.
    """
    plan: Plan
    notices: tuple[str, ...] = ()
    notes: tuple[Any, ...] = ()
    cached: Path | None = None
    entry: Path | None = None

    @property
    def coverage(self) -> Coverage:
        """Report of how much of the plan is compiled and why the rest runs by reference."""
        return coverage_of(self.plan)

    def summary(self) -> Summary:
        """Return what a notebook shows of the build."""
        return summary("Build", self.plan, ("cached", [str(self.cached)] if self.cached else []),
                       ("notices", listed(self.notices)))

    def save(self, path: str | os.PathLike[str], strip: bool = False) -> None:
        """Write the plan file for load_engine, run-engine and infer-server.

        strip: omit the graph's weights, up to half of the file; the plan can then run on its own target only.
        """
        write_plan(self.plan.strip() if strip else self.plan, path)

    def engine(self, threads: int = 1) -> Engine:
        """Return the engine of the plan, compiled again first if it was built for another CPU."""
        return engine_of(self.plan, LoadOptions(threads))


def _ignore(*what: object) -> None:
    """Do nothing: default of callbacks."""


def build_engine(model: Model, *, calibration: RangeSource | None = None,
                 cache: EngineCache | str | os.PathLike[str] | bool = True, progress: Progress = _ignore,
                 notify: Notify = _ignore, **options: Any) -> EngineBuild:
    """Compile an ONNX model for this machine, or for the `target` among the options.

    Parameters
    ----------
    model
        Path of an ONNX file, its bytes, or an `onnx.ModelProto`.
    calibration
        An `infer_server.Calibration`, for precision "int8" (unless the model is quantised already) and "best". For
        "fp16" its items tell which tensors exceed float16's range; with `weight_only` they decide how weights are
        rounded.
    cache
        True: the user's engine cache. A path or an EngineCache: that one. False: build in any case.
    progress
        Called with (stage, done, of, what). The stage is "calibrating", "quantising", "searching", "evaluating",
        "ranking", "growing", "narrowing", "closing", "pruning", "widening", "compiling" or "tracing"; `of` is 0 where
        the total is unknown.
    notify
        Called with each notice when it comes; the result has all of them.
    **options
        Fields of `BuildConfig`: precision, max_batch, opt_batch, target, shapes, keep_float, timing, ...

    Raises
    ------
    EngineError
        The model, the options or the data are at fault; the message says what to do. Exceptions of the caller's own
        data and callbacks come through unchanged.
    """
    config = BuildConfig.of(options)
    _check(model, config, calibration)
    work = _Build(model, calibration, Builder(config, partial(progress, "compiling")), progress, notify)
    if cache is False:
        return work.built()
    return work.looked_up(cache if isinstance(cache, EngineCache) else EngineCache("" if cache is True else cache))


def _check(model: Model, config: BuildConfig, calibration: RangeSource | None) -> None:
    """Check the arguments before anything is read. Raises ModelError, ConfigError."""
    if isinstance(model, str | os.PathLike):
        if not Path(model).is_file():
            raise ModelError(f"there is no model file {model}")
    elif not isinstance(model, bytes) and not hasattr(model, "graph"):
        raise ModelError(f"a model is a path, the bytes of an ONNX file or an onnx.ModelProto; this is a "
                         f"{type(model).__name__}")
    if calibration is not None and not hasattr(calibration, "calibrate"):
        raise ConfigError(f"calibration is a {type(calibration).__name__}; wrap the data: "
                          "infer_server.Calibration(data, ...)")
    if config.float_type != "fp32" and config.precision != "int8":
        raise ConfigError(f"float_type is the precision of what int8 leaves in float; this build is {config.precision}")
    if config.keep_fp32 and config.float_type == "fp32":
        raise ConfigError("keep_fp32 names what stays in float32 where float_type is bf16 or fp16; this build's is "
                          "fp32")
    if calibration is not None and not config.weight_only and config.precision not in ("int8", "best", "fp16"):
        raise ConfigError(f"calibration is for int8, best, fp16 and weight_only; this build is {config.precision}")


def _default_of(plan: Plan, name: str, array: Array) -> Any:
    """Return the default of an optional input for the plan's metadata.

    Raises ModelError if its dtype differs, it is not the value of one item, or it is too large.
    """
    io = next(io for io in plan.inputs if io.name == name)
    if io.dtype != array.dtype.name or array.dtype.kind not in "biuf":
        raise ModelError(f"optional input '{name}': the model takes {io.dtype}, and its value is of {array.dtype}")
    if io.batched and (io.batch_axis or len(array) != 1):
        raise ModelError(f"optional input '{name}' {list(io.shape)}: its value of shape {list(array.shape)} is not "
                         "that of one item")
    if not 1 <= array.size <= MOST_VALUES:      # nested lists cannot express the shape of an empty array
        raise ModelError(f"optional input '{name}': its value has {array.size} elements; 1 to {MOST_VALUES} may be "
                         "left out, so build it without --optional")
    return array.tolist()


@dataclass
class _Build:
    """State of one call of build_engine."""
    model: Model
    calibration: RangeSource | None
    builder: Builder
    progress: Progress
    notify: Notify
    notices: list[str] = field(default_factory=list)

    def add_notice(self, notice: str) -> None:
        self.notices.append(notice)
        self.notify(notice)

    def built(self) -> EngineBuild:
        builder, calibration = self.builder, self.calibration
        pixels = builder.config.pixels is not None
        given = read_model(self.model).with_constants(builder.config.constants).with_ragged(builder.config.ragged)
        trim()      # the file's content has been copied into arrays
        source, weights = self._with_quantised_weights(given.with_optional(builder.config.optional))
        plan = plan_of(builder, source, lambda inputs: calibration.first(inputs, pixels) if calibration else None,
                       self.add_notice, self._of_graph, self._watched())
        name = Path(self.model).name if isinstance(self.model, str | os.PathLike) else source.name
        extra: dict[str, Any] = weights | ({} if "notices" in plan.metadata else {"notices": list(self.notices)})
        if builder.config.optional:
            extra[DEFAULTS] = {name: _default_of(plan, name, given.weights[name]) for name in builder.config.optional}
        plan = replace(plan, metadata={"model": name, **plan.metadata, **extra})
        if builder.config.symbolic_plans:
            plan = with_symbolic_plans(plan, partial(self.progress, "tracing"))
        return EngineBuild(plan, tuple(self.notices), tuple(builder.log))

    def _with_quantised_weights(self, source: OnnxModel) -> tuple[OnnxModel, dict[str, Any]]:
        """Return the model with packed weights if the options ask for them, and the report for the plan's metadata."""
        config, calibration = self.builder.config, self.calibration
        if config.weight_only is None:
            return source, {}
        source = with_initializers(source)

        def rounder(layers: tuple[Layer, ...]) -> Rounder:
            return calibration.rounder(source, config, layers, self.add_notice, self.progress) if (
                calibration) else to_nearest

        packed, report = quantise_weights(source, config.weight_only, config.keep_float, rounder,
                                   partial(self.progress, "quantising"))
        return packed, {"weights": report}

    def _of_graph(self, subject: Subject) -> Plan:
        """Return the plan of a model that is one graph."""
        builder, calibration = self.builder, self.calibration
        for notice in (*dict.fromkeys(builder.notices), *filter(None, [builder.arithmetic_note])):
            self.add_notice(notice)
        self._check_kept(subject.graph)
        if builder.config.weight_only and is_quantised(subject.graph):
            raise ConfigError(f"{subject.source.name} is quantised already, by QuantizeLinear nodes: build it without "
                              "--weight-only")
        metadata: dict[str, Any] = {"notices": list(self.notices)}
        recipe = None
        if calibration and is_quantised(subject.graph):
            self.add_notice("the model is quantised already: it is compiled as it is, and not calibrated")
        elif calibration and builder.config.precision == "fp16":
            warnings = calibration.float16_warnings(builder.stored(subject.graph), subject.inputs,
                                                    builder.config.pixels is not None)
            for warning in warnings:
                self.add_notice(warning)
            metadata = {"notices": [*metadata["notices"], *warnings]}
        elif calibration and not builder.config.weight_only:
            found = calibration.calibrate(subject, self.add_notice, self.progress)
            recipe = self._usable(found, subject)
            builder.config = replace(builder.config, float_type=found.float_type or builder.config.float_type,
                                     keep_float=(*builder.config.keep_float, *found.keep_float),
                                     keep_fp32=(*builder.config.keep_fp32, *found.keep_fp32))
            metadata = {"notices": [*metadata["notices"], *found.warnings], **found.report}
        return compiled(subject, recipe, metadata)

    def _check_kept(self, graph: Graph) -> None:
        """Raise ConfigError if keep_float names nothing, or the build quantises nothing."""
        config, quantised = self.builder.config, is_quantised(graph)
        if config.weight_only:      # the names were checked in the model before it was optimised
            return
        if config.keep_float and config.precision not in ("int8", "best") and not quantised:
            raise ConfigError(f"keep_float is for int8, best and weight_only; this build is {config.precision}")
        check_kept(graph, config.keep_float, quantised)
        for entry in config.keep_fp32:
            names = kept_nodes(graph, [entry])
            if not names or not names <= kept_nodes(graph, config.keep_float):
                raise ConfigError(f"keep_fp32: '{entry}' is not among the nodes that keep_float names; add it there")

    def _usable(self, calibrated: Calibrated, subject: Subject) -> Recipe | None:
        """Return the recipe, or None if INT8 is too inexact for "best" to choose it."""
        if not calibrated.poor or subject.builder.config.precision != "best":
            return calibrated.recipe
        self.add_notice(f"{subject.source.name}: INT8 is too inexact, so the fastest float precision is taken")
        return None

    def _watched(self) -> Watched | None:
        """Return the functions that calibrate a program; None without calibration and for fp16."""
        calibration = self.calibration
        if calibration is None or self.builder.config.precision == "fp16" or self.builder.config.weight_only:
            return None

        def plan(subject: Subject, feeds: Sequence[Mapping[str, Array]]) -> Plan:
            name = subject.source.name
            found = calibration.of(feeds).calibrate(subject, lambda note: self.add_notice(f"{name}: {note}"),
                                                    self.progress)
            return compiled(subject, self._usable(found, subject), found.report)

        def items(inputs: Sequence[IoTensor]) -> Sequence[Mapping[str, Array]]:
            feeds = calibration.items(inputs, MOST_ITEMS)
            for warning in calibration.warnings(inputs, feeds):
                self.add_notice(warning)
            return feeds

        return Watched(items, plan)

    def looked_up(self, cache: EngineCache) -> EngineBuild:
        """Return the plan from the cache, or build and store it; other builders of the same engine wait meanwhile."""
        key = self._keys(cache)
        with cache.lock(key(), lambda: self.notify("another process builds the same engine: waiting for it")):
            before = key()      # the builder that held the lock may have written the calibration cache
            plan = cache.fetch(before) if self._has_its_files() else None
            if plan is not None:
                for notice in plan.metadata.get("notices", ()):
                    self.add_notice(notice)
                return EngineBuild(plan, tuple(self.notices), cached=cache.entry(before), entry=cache.entry(before))
            with object_cache.using(cache.objects):
                build = self.built()
            after = key()                       # the build may have changed the calibration cache
            cache.store(after, build.plan)
            return replace(build, entry=cache.entry(after))

    def _has_its_files(self) -> bool:
        """Return True if the timing and calibration caches that the user names exist; otherwise a build writes them."""
        named = (self.builder.config.timing_cache, self.calibration.cache if self.calibration else "")
        return all(Path(file).exists() for file in named if file)

    def _keys(self, cache: EngineCache) -> Callable[[], str]:
        """Return a function that computes the key with the current content of the calibration cache.

        All else is read once. The content of the timing cache does not count: it affects the speed of an engine only.
        """
        calibration, config = self.calibration, self.builder.config
        model = model_digest(self.model)
        facts = {**vars(config), "timing_cache": "", "target": self.builder.target, "cpu": self.builder.processor,
                 "calibration": calibration.facts() if calibration else None}
        ranges = Path(calibration.cache) if calibration and calibration.cache else None
        return lambda: cache.key(model, {**facts, "ranges": ranges and ranges.is_file() and
                                         ranges.read_text(errors="replace")})
