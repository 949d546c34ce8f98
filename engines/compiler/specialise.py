"""Plans of models with open extents: the plan of a build, and later specialisations made from its contents.

    plan = compiled(subject, recipe, metadata)      # has plan.open if the model has open extents
    specialiser = Specialiser(plan)
    specialiser.plan({"T": 77})                     # as a build with --shape would make it, without timing
    specialiser.symbolic({"T": 77})                 # the plan that a symbolic plan makes, with dynamic kernels
"""
from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from infer_server.engines.backends import backend_of, device_of
from infer_server.engines.backends.base import Progress
from infer_server.engines.capacity import trim
from infer_server.engines.compiler.agreement import agree
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.compiler.engine_cache import EngineCache
from infer_server.engines.compiler.guesses import foreseen
from infer_server.engines.compiler.subject import Subject, open_outputs
from infer_server.engines.compiler.symbolic import (
    CACHING,
    ORDINARY,
    SymbolicPlans,
    built_kernels,
    encoded,
    symbolic_plans_of,
)
from infer_server.engines.compiler.weight_only.scheme import WeightOnly
from infer_server.engines.errors import ConfigError, EngineError, PlanTargetError
from infer_server.engines.faults import faults_named
from infer_server.engines.frontend.onnx_file import OnnxModel
from infer_server.engines.ir.dtypes import dtype_named
from infer_server.engines.ir.graph import Graph, TensorType
from infer_server.engines.ir.recipe import Pixels, Recipe
from infer_server.engines.ir.symbolic import env_in
from infer_server.engines.machine import object_cache
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.passes.caches import Cache, caches_of
from infer_server.engines.passes.quantization.recipe import prepared
from infer_server.engines.plan.extents import CACHE_CAPACITY, CACHES, Extents, open_extents, text, value_name
from infer_server.engines.plan.plan import IoTensor, OpenOptions, OpenPart, Plan, graph_of
from infer_server.engines.plan.symbolic.plans import CompiledKernel, LateMachine
from infer_server.engines.plan.symbolic.traces import TracedGraph
from infer_server.engines.runtime.specialisation import Specialisation

log = logging.getLogger(__name__)


def compiled(subject: Subject, recipe: Recipe | None = None, metadata: Mapping[str, Any] | None = None) -> Plan:
    """Compile a model to a plan.

    If it has open extents, the plan also holds what later specialisations are made from, and a specialisation for the
    opt shapes of each profile.

    Parameters
    ----------
    subject : Subject
        The model.
    recipe : Recipe, optional
        Quantisation of an int8 build.
    metadata : mapping, optional
        Further metadata of the plan.

    Raises
    ------
    EngineError
    """
    plan = _plan(subject, recipe, subject.usual, metadata)
    if not subject.is_open:
        return plan
    subject.builder.take_over(plan)
    subject.dependence = plan.dependence
    caches = [cache.document() for cache in caches_of(subject.source)]
    usual = [{name: bounds[name][1] if name in bounds else value for name, value in subject.usual.items()}
             for bounds in subject.profiles]
    outputs = open_outputs(subject.source, subject.graph)
    subject.graphs.clear()          # a graph has all weights in float: one at a time
    trim()
    others = tuple(_plan(subject, recipe, extents)
                   for index, extents in enumerate(usual) if extents != subject.usual and extents not in usual[:index])
    config, source = subject.builder.config, subject.source
    options = OpenOptions(config.precision, config.max_batch, config.opt_batch, config.target, config.keep_float,
                          vars(config.pixels) if config.pixels else None, config.threads, config.float_type,
                          config.keep_fp32)
    declared = tuple(IoTensor(name, kind.dtype.name, kind.shape) for name, kind in subject.types.items())
    part = OpenPart(subject.inputs, outputs, declared, options, recipe, subject.profiles,
                    subject.deciding, subject.builder.timed, source.document(), source.weights, others)
    return replace(plan, open=part, metadata={**plan.metadata, **({CACHES: caches} if caches else {})})


class Specialiser:
    """Compiler of specialisations of a plan with open extents, from the model in it.

    One thread at a time may call `plan`, and another one `symbolic` at the same time.
    """

    def __init__(self, plan: Plan, target: str | None = None, cache: EngineCache | None = None,
                 timing: bool = False) -> None:
        """Read the model of a plan.

        Parameters
        ----------
        plan : Plan
            Plan with open extents.
        target : str, optional
            Overrides the target of the plan.
        cache : EngineCache, optional
            Cache of the specialisations of a plan that was read from a file.
        timing : bool
            Time tactics.

        Raises
        ------
        PlanTargetError
            The plan is stripped of its model.
        """
        part = plan.open
        if part is None or not part.model:
            raise PlanTargetError(f"{plan.name}: stripped (--strip), so it has no model to make specialisations of")
        self._source = OnnxModel.from_document(plan.name, part.model, part.weights)
        self._part = part
        self._target = part.options.target if target is None else target
        self._plan, self._timing = plan, timing
        self._cache, self._fingerprint = cache, plan.fingerprint
        self._subjects: dict[tuple[str, int | None], Subject] = {}
        self._graphs: dict[tuple[Any, ...], Graph] = {}         # shared by these subjects
        self._importing = threading.Lock()
        self._caches = tuple(Cache(**document) for document in plan.metadata.get(CACHES, ()))
        self._traced_graphs: list[TracedGraph] | None = None    # None: not kept, for each has all weights in float
        self.first: Specialisation | None = None        # loaded plan, if there is one

    @cached_property
    def _symbolic_plans(self) -> SymbolicPlans:
        return symbolic_plans_of(self._plan, self._cache, ORDINARY, self._traced, self._is_right)

    @cached_property
    def _caching(self) -> SymbolicPlans:
        return symbolic_plans_of(self._plan, self._cache, CACHING, self._traced, self._is_right)

    def symbolic_plans(self, extents: Extents) -> SymbolicPlans:
        """Return the set of symbolic plans for extents like these: CACHE_CAPACITY is among them or not."""
        return self._caching if CACHE_CAPACITY in extents else self._symbolic_plans

    @property
    def has_dynamic_kernels(self) -> bool:
        """True if the target of the plan has dynamic kernels, which symbolic plans need."""
        return self._tracing.builder.dynamic_kernels is not None

    def reuse_graphs(self) -> None:
        """Import the model once for all traces to come for which its graph holds."""
        self._traced_graphs = []

    def encoded(self) -> bytes:
        """Return the verified symbolic plans for a plan file; b"" if there are none."""
        kernels = self._tracing.builder.dynamic_kernels
        if kernels is None:
            return b""
        for extents in (self._plan.extents, *(one.extents for one in self._part.others)):
            self._symbolic_plans.verify(extents)
        return encoded([*self._symbolic_plans.proven, *self._caching.proven], kernels, self._plan)

    def plan(self, extents: Extents, max_batch: int | None = None) -> Plan:
        """Return the specialisation for numbers of the open extents. Raises EngineError.

        max_batch: by default the plan's, or less if items are large; larger batches run in slices.
        """
        cache = self._cache
        if cache is None or not self._fingerprint:
            return self._compiled(self._target, extents, max_batch)
        key = cache.key({"plan": self._fingerprint}, {"extents": dict(extents), "target": self._target,
                                                      "cpu": detect().model, "max_batch": max_batch})
        return cache.kept(key, lambda: self._compiled(self._target, extents, max_batch))

    def symbolic(self, extents: Extents) -> Plan | None:
        """Return the plan with dynamic kernels for numbers of the open extents; None if the target has no such kernels.

        A symbolic plan makes it, or a trace of these numbers if none can be traced. With CACHE_CAPACITY among the
        extents, the plan appends to caches in place. If the compiler is not installed, the plan is for the NumPy
        backend, which is slow. Raises EngineError.
        """
        try:
            with object_cache.using(self._cache.objects if self._cache else None):
                plan = self.symbolic_plans(extents).plan(extents)
                if plan is None and (plan := self._traced(extents)):
                    plan = replace(plan, extents=dict(extents))
                return plan
        except ImportError as error:
            if CACHE_CAPACITY in extents:
                return None
            log.warning("%s: NumPy computes %s, slowly, for the compiler is not installed (%s)", self._plan.name,
                        dict(extents), error)
            return self._compiled("numpy", extents)

    def _is_right(self, plan: Plan, extents: Extents) -> bool:
        """Return True if what a symbolic plan made agrees with one made for these extents only."""
        specialised = next((one for one in (self._plan, *self._part.others) if one.extents == extents), None)
        alone = specialised or self._traced(extents)
        with self._importing:       # the symbolic plan needs no graphs, which have all weights in float
            self._graphs.clear()
        trim()
        is_right = bool(alone and agree(plan, alone, self.first or Specialisation(self._plan)))
        del specialised, alone
        trim()
        if is_right:
            symbolic = plan.machine.symbolic if isinstance(plan.machine, LateMachine) else None
            for traced in self._traced_graphs or ():
                traced.is_proven |= symbolic is not None and traced.is_of(symbolic.env)
            return True
        log.warning("%s: what was found for other extents does not hold for %s, so each is compiled alone from now on",
                    self._plan.name, dict(extents))
        return False

    def _traced(self, extents: Extents) -> Plan | None:
        """Return the plan with dynamic kernels for extents, which may be symbolic (engines/ir/symbolic.py).

        None if the target has no dynamic kernels, or is another one than the plan's.
        """
        builder = self._tracing.builder
        if builder.target != self._plan.machine.target or builder.dynamic_kernels is None:
            return None
        return builder.symbolic_plan(self._graph_at(extents))

    def _graph_at(self, extents: Extents) -> Graph:
        """Return the graph for extents, which may be symbolic, with stored dtypes: of an earlier trace if it holds.

        A graph with plain numbers, for a comparison, is taken only of traces that have passed one with an import.
        """
        is_symbolic = env_in(extents) is not None
        for traced in self._traced_graphs or ():
            if (is_symbolic or traced.is_proven) and (graph := traced.at(extents)):
                return graph
        subject, recipe = self._tracing, self._part.recipe
        with self._importing:
            graph = subject.import_graph(extents, self._caches if CACHE_CAPACITY in extents else ())
        if recipe:
            graph = prepared(graph, recipe, subject.builder.config.keep_float)
        graph = subject.builder.stored(graph, recipe.ranges if recipe else None)
        if is_symbolic and self._traced_graphs is not None:
            self._traced_graphs.append(TracedGraph(graph, extents))
        return graph

    def graph(self, extents: Extents) -> Graph:
        """Return the graph that a specialisation is lowered from, with stored dtypes decided."""
        subject, recipe = self._subject(self._target), self._part.recipe
        return subject.builder.stored(_graph(subject, recipe, extents), recipe.ranges if recipe else None)

    def float_graph(self, extents: Extents) -> Graph:
        """Return the optimised float graph for these extents, before stored dtypes are decided."""
        return self._subject(self._target).at(extents)

    def _compiled(self, target: str, extents: Extents, max_batch: int | None = None) -> Plan:
        with self._importing:
            subject = self._subject(target, max_batch)
            subject.at(extents)
        return _plan(subject, self._part.recipe, extents)

    def _subject(self, target: str, max_batch: int | None = None) -> Subject:
        """Return the subject of specialisations for a target."""
        key = target, max_batch
        if key not in self._subjects:
            self._subjects[key] = self._new_subject(target, max_batch)
        return self._subjects[key]

    @cached_property
    def _tracing(self) -> Subject:
        """Subject of traces, with a builder of its own: they run beside specialisations on another thread."""
        return self._new_subject(self._target, None, built_kernels(self._plan))

    def _new_subject(self, target: str, max_batch: int | None, kernels: Sequence[CompiledKernel] = ()) -> Subject:
        options = self._part.options
        config = BuildConfig(
            options.precision, max_batch or options.max_batch, options.opt_batch, target,
            keep_float=options.keep_float, pixels=Pixels(**options.pixels) if options.pixels else None,
            timing=self._timing, threads=options.threads, float_type=options.float_type,
            keep_fp32=options.keep_fp32,
            weight_only=WeightOnly.of(self._plan.metadata))
        types = {io.name: TensorType(dtype_named(io.dtype), io.shape) for io in self._part.declared}
        usual = dict.fromkeys((*open_extents(self._part.declared), *map(value_name, self._part.deciding)), 0)
        builder = Builder(config, fewer=max_batch is None)
        if builder.target == self._plan.machine.target:
            builder.take_over(self._plan, kernels)
        return Subject(builder, self._source, types, usual, (), self._part.deciding, self._graphs, kept=1,
                       dependence=self._plan.dependence)


def with_symbolic_plans(plan: Plan, progress: Progress | None = None) -> Plan:
    """Return a plan with symbolic plans for the shapes that can be foreseen, each verified at a second shape.

    Without such plans the first run at another shape than those of the build has to trace one. The plan is unchanged if
    it has no open extents or no dynamic kernels, or if this machine cannot run it.
    """
    part = plan.open
    if part is None or device_of(plan.machine.backend).mismatch(plan):
        return plan
    specialiser = Specialiser(plan)
    specialiser.reuse_graphs()
    kinds = foreseen(plan) if specialiser.has_dynamic_kernels else []
    for done, kind in enumerate(kinds, 1):
        symbolics = specialiser.symbolic_plans(kind[0])
        for extents in kind:
            with suppress(EngineError):     # these extents cannot be compiled
                symbolics.plan(extents)
            if any(one.holds(kind[1]) for one in symbolics.proven):
                break
        if progress:
            progress(done, len(kinds), text(kind[1]))
    content = specialiser.encoded()
    return replace(plan, open=replace(part, symbolic=content), fingerprint="") if content else plan


def graph_at(plan: Plan) -> Graph:
    """Return the graph that a plan, or its first specialisation, was lowered from.

    Raises PlanTargetError if it is stripped, ConfigError if it is a program, PlanCorruptError.
    """
    if plan.program is not None:
        raise ConfigError(f"{plan.name} is a program of {len(plan.program.segments)} segments (data decide about "
                          "extents or about what is computed), which has no one graph to write out")
    return Specialiser(plan).graph(plan.extents) if plan.open else graph_of(plan)


@faults_named()
def relower(plan: Plan, target: str = "", timing: bool = False) -> Plan:
    """Compile a plan again for this machine or another target, from the graph or model in it.

    Takes seconds without timing, and needs neither the ONNX file nor calibration data. Quantised values are
    bit-identical.

    Parameters
    ----------
    plan : Plan
    target : str
        Name of an instruction set; "" is this machine's best.
    timing : bool
        Time tactics.

    Raises
    ------
    EngineError
    """
    if plan.program is not None:
        segments = tuple(replace(segment, plans=tuple(relower(one, target, timing) for one in segment.plans))
                         for segment in plan.program.segments)
        options = replace(plan.program.options, target=target)
        return replace(plan, program=replace(plan.program, segments=segments, options=options), fingerprint="")
    if plan.open is None:
        graph = graph_of(plan)
        session = backend_of(target).session(target, TimingCache(), timing)
        chosen = session.settle(session.choose(graph, plan.max_batch, plan.metadata.get("opt_batch")))
        return session.tuned(replace(plan, machine=session.assemble(chosen), fingerprint=""))
    specialiser = Specialiser(plan, target, timing=timing)
    first, *others = (specialiser.plan(one.extents, one.max_batch or None) for one in (plan, *plan.open.others))
    options = replace(plan.open.options, target=target)
    part = replace(plan.open, others=tuple(others), options=options, symbolic=b"")     # compiled for the target, too
    return replace(first, metadata=plan.metadata, open=part)


def retuned(plan: Plan, cache: EngineCache | None = None, gpu: int = 0) -> Plan:
    """Return the plan with its tactics timed on this machine; unchanged if they were timed or it cannot run here.

    Parameters
    ----------
    plan : Plan
    cache : EngineCache, optional
        Cache of the result for a plan that was read from a file.
    gpu : int
        Index of the GPU.
    """
    device = device_of(plan.machine.backend, gpu)
    if any(step.time_us for step in plan.machine.steps) or device.mismatch(plan):
        return plan
    if cache is None or not plan.fingerprint:
        return relower(plan, plan.machine.target, timing=True)
    key = cache.key({"plan": plan.fingerprint}, {"tuned on": device.name})
    return cache.kept(key, lambda: relower(plan, plan.machine.target, timing=True))


def relowered(plan: Plan, cache: EngineCache | None = None) -> Plan:
    """Return relower(plan) for this machine, from the cache if the plan was read from a file."""
    if cache is None or not plan.fingerprint:
        return relower(plan)
    return cache.kept(cache.relowered_key(plan.fingerprint), lambda: relower(plan))


def _graph(subject: Subject, recipe: Recipe | None, extents: Extents) -> Graph:
    graph = subject.at(extents)
    return prepared(graph, recipe, subject.builder.config.keep_float) if recipe else graph


def _plan(subject: Subject, recipe: Recipe | None, extents: Extents, metadata: Mapping[str, Any] | None = None) -> Plan:
    plan = subject.builder.plan(_graph(subject, recipe, extents), recipe.ranges if recipe else None, metadata)
    return replace(plan, extents=dict(extents)).bare() if extents else plan
