"""Load engines from plan files; a plan for another machine is compiled again for this one, or rejected."""
from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from infer_server.engines.backends import device_of
from infer_server.engines.backends.device import GpuInfo, OneOfSeveral
from infer_server.engines.errors import ConfigError, EngineError, InputError, PlanError, PlanTargetError
from infer_server.engines.plan.file import read_outline, read_plan
from infer_server.engines.plan.plan import GeneralKernel, IoTensor, Plan
from infer_server.engines.runtime.engine import Engine

if TYPE_CHECKING:
    from infer_server.engines.plan.extents import Extents
    from infer_server.engines.runtime.open_engine import SpecialisationMaker
    from infer_server.engines.runtime.program_engine import AnyEngine, ProgramEngine, SegmentEngine, SegmentMaker, Watch


ON_TRIAL = "on trial"


def load_engine(path: str | os.PathLike[str], threads: int = 1, on_target_mismatch: str = "relower",
                cpus: Sequence[int] | None = None, specialise: str = "",
                specialisations: int = 64, cache: str | os.PathLike[str] | bool = True, gpu: int = 0,
                retune: bool = False) -> AnyEngine:
    """Load a plan file into an engine.

    Parameters
    ----------
    path
        The plan file. It may be replaced or removed afterwards.
    threads
        Threads that share one request. For many requests at a time, one thread and several contexts give more.
    on_target_mismatch
        If this CPU lacks what the code needs, "relower" compiles the plan's graph again for this one (seconds; needs
        llvmlite), "refuse" raises PlanTargetError.
    cpus
        CPUs to which the threads of every context are pinned, one for each thread.
    specialise
        What happens at shapes that a plan with open extents has not met: "background" (the default), "wait" or "off";
        see OpenEngine. Segments of programs are specialised for shapes that come again (docs/internals/programs.md).
    specialisations
        The most that are kept in memory.
    cache
        Where plans that are compiled for this CPU or for new shapes are kept on disk: the user's engine cache (True), a
        folder, or nowhere (False).
    gpu
        The number of the GPU that a plan for GPUs runs on.
    retune
        Time the tactics of a plan for a GPU that was built without one (minutes, once per cache).

    Raises
    ------
    PlanCorruptError, PlanVersionError, PlanTargetError, ConfigError, OSError
    """
    if on_target_mismatch not in ("relower", "refuse"):
        raise ConfigError(f"on_target_mismatch='{on_target_mismatch}': choose 'relower' or 'refuse'")
    plan = read_plan(path)
    if retune:
        plan = _retuned(plan, cache, gpu)
    return engine_of(plan, threads, on_target_mismatch, cpus, str(path), specialise, specialisations, cache, gpu)


def gpus_of(path: str | os.PathLike[str]) -> Sequence[tuple[GpuInfo, str]]:
    """Return the GPUs of this machine, each with the reason why a plan file cannot run there ("" if it can).

    Returns () for a plan for CPUs. Raises PlanCorruptError, PlanVersionError, PlanTargetError, OSError.
    """
    plan = read_outline(path)
    device = device_of(plan.machine.backend)
    return device.gpus(plan) if isinstance(device, OneOfSeveral) else ()


@dataclass(frozen=True)
class Description:
    """Properties of an engine that are known without loading it; see Engine."""
    inputs: tuple[IoTensor, ...]
    outputs: tuple[IoTensor, ...]
    max_batch: int
    dependence: str
    metadata: Mapping[str, Any]


def describe(path: str | os.PathLike[str]) -> Description:
    """Read the description of a plan file's engine without its code and weights.

    Raises PlanCorruptError, PlanVersionError, OSError.
    """
    plan = read_outline(path)
    tensors = plan.open or plan
    return Description(tensors.inputs, tensors.outputs, plan.max_batch, plan.dependence, plan.metadata)


def engine_of(plan: Plan, threads: int = 1, on_target_mismatch: str = "relower", cpus: Sequence[int] | None = None,
              name: str = "", specialise: str = "", specialisations: int = 64,
              cache: str | os.PathLike[str] | bool = False, gpu: int = 0) -> AnyEngine:
    """Create the engine of a plan in memory. name: used in messages; other parameters: see load_engine."""
    name = name or plan.name
    if plan.program is not None:
        return program_engine(plan, threads, lambda part: _graph_engine(
            part, threads, on_target_mismatch, cpus, part.name, specialise, specialisations, cache, gpu, segment=True))
    return _graph_engine(plan, threads, on_target_mismatch, cpus, name, specialise, specialisations, cache, gpu)


def _graph_engine(plan: Plan, threads: int = 1, on_target_mismatch: str = "relower",
                  cpus: Sequence[int] | None = None, name: str = "", specialise: str = "",
                  specialisations: int = 64, cache: str | os.PathLike[str] | bool = False, gpu: int = 0,
                  segment: bool = False) -> SegmentEngine:
    """Create the engine of a plan that is not a program.

    on_target_mismatch: ON_TRIAL relowers without a warning, for a build for another machine that runs its result once.
    segment: the plan is a segment of a program (see Policy).
    """
    if mismatch := device_of(plan.machine.backend, gpu).mismatch(plan):
        if plan.stripped and not (plan.open and plan.open.model):
            raise PlanTargetError(f"{name}: {mismatch}; it is stripped (--strip), so it cannot be compiled again here: "
                                  "build it here, or without --strip")
        if on_target_mismatch == "refuse":
            raise PlanTargetError(f"{name}: {mismatch}; build it here, or load it with on_target_mismatch='relower'")
        plan = _relower(plan, f"{name}: {mismatch}", cache, quietly=on_target_mismatch == ON_TRIAL)
    if plan.open is None:
        engine = Engine(plan, threads, cpus, gpu=gpu)
        if not plan.stripped:
            engine.larger = lambda items: Engine(_with_max_batch(plan, items), threads, cpus, gpu=gpu)
        return engine
    from infer_server.engines.runtime.open_engine import OpenEngine  # imported here because most plans do not need it
    from infer_server.engines.runtime.policy import Policy
    policy = Policy(specialise or "background", specialisations, segment=segment)
    return OpenEngine(plan, lambda: _LateSpecialiser(plan, cache), threads, cpus, policy, gpu)


def program_engine(plan: Plan, threads: int = 1, engine: Callable[[Plan], SegmentEngine] | None = None,
                   maker: Callable[[], SegmentMaker] | None = None, watch: Watch | None = None) -> ProgramEngine:
    """Create the engine of a program.

    Parameters
    ----------
    plan : Plan
        Plan with a program part.
    threads : int
        Threads that work on one request.
    engine : callable, optional
        Creates the engine of a segment's plan; by default one that waits for specialisations (ON_TRIAL).
    maker : callable, optional
        Returns the compiler of further plans of segments.
    watch : callable, optional
        Called with all that segments are fed.
    """
    from infer_server.engines.runtime.program_engine import ProgramEngine
    return ProgramEngine(plan, engine or (lambda part: _graph_engine(
        part, threads, ON_TRIAL, name=part.name, specialise="wait", segment=True)),
                         maker or (lambda: _segment_maker(plan)), threads, watch)


def _segment_maker(plan: Plan) -> SegmentMaker:
    """Return the compiler of segments. Raises PlanTargetError if the compiler is not installed."""
    assert plan.program is not None
    try:
        from infer_server.engines.compiler.segments import SegmentMaker
    except ImportError as error:
        raise PlanTargetError(f"{plan.name}: to run it on what it was not tried on, install what is missing ({error})"
                              ) from error
    maker: SegmentMaker = SegmentMaker(plan.program)
    return maker


class _LateSpecialiser:
    """Specialiser that imports the compiler at the first shape for which no template of an earlier process holds."""

    def __init__(self, plan: Plan, cache: str | os.PathLike[str] | bool) -> None:
        from infer_server.engines.compiler.template import Templates, stored_templates
        self.first: Engine | None = None
        self._plan, self._cache = plan, _engine_cache(cache)
        stored = stored_templates(plan, self._cache)
        self._stored = Templates(lambda counting, extents: None, None, stored) if stored else None
        self._made: SpecialisationMaker | None = None
        self._making = threading.Lock()

    def _specialiser(self) -> SpecialisationMaker:
        """Return the compiler. Raises PlanTargetError if the plan is stripped or the compiler is not installed."""
        with self._making:
            if self._made is None:
                try:
                    from infer_server.engines.compiler.specialise import Specialiser
                except ImportError as error:
                    raise PlanTargetError(f"{self._plan.name}: to run it at other shapes than it was built for, "
                                          f"install what is missing ({error})") from error
                specialiser: SpecialisationMaker = Specialiser(self._plan, cache=self._cache)
                specialiser.first, self._made = self.first, specialiser
            return self._made

    def plan(self, extents: Extents, max_batch: int | None = None) -> Plan:
        return self._specialiser().plan(extents, max_batch)

    def general(self, extents: Extents) -> Plan:
        stored = self._stored
        if stored and (plan := stored.plan(extents)):
            return plan
        self._stored = None         # the compiler reads them, too
        return self._specialiser().general(extents)

    @property
    def generals(self) -> tuple[tuple[GeneralKernel, ...], tuple[bytes, ...]]:
        return self._made.generals if self._made else (self._plan.open.general if self._plan.open else (), ())


def _retuned(plan: Plan, cache: str | os.PathLike[str] | bool, gpu: int) -> Plan:
    """Return the plan with tactics timed here. Raises PlanTargetError if it is stripped or there is no compiler."""
    try:
        from infer_server.engines.compiler.specialise import retuned
    except ImportError as error:
        raise PlanTargetError(f"{plan.name}: to choose its tactics anew, install what is missing ({error})") from error
    found: Plan = retuned(plan, _engine_cache(cache), gpu)
    return found


def _with_max_batch(plan: Plan, items: int) -> Plan:
    """Compile the plan for a larger batch.

    Raises PlanTargetError if the compiler is not installed, InputError if the plan cannot be compiled, e.g. because
    its file, which has the weights, is gone.
    """
    try:
        from infer_server.engines.compiler.specialise import relower
    except ImportError as error:
        raise PlanTargetError(f"{plan.name}: items that depend on each other are not cut, and more than "
                              f"{plan.max_batch} of them are compiled for: install what is missing ({error})"
                              ) from error
    try:
        larger: Plan = relower(replace(plan, max_batch=items), plan.machine.target)
    except PlanError as error:
        raise InputError(f"{plan.name}: more than {plan.max_batch} items cannot be run in slices, for they depend on "
                         f"each other, and the plan cannot be compiled for {items} now: {error}") from error
    return larger


def _relower(plan: Plan, why: str, cache: str | os.PathLike[str] | bool, quietly: bool) -> Plan:
    if not quietly:
        import logging  # imported here to load matching plans a few milliseconds sooner
        logging.getLogger(__name__).warning("%s; compiling its graph again for this machine", why)
    try:
        from infer_server.engines.compiler.specialise import relowered
    except ImportError as error:
        raise PlanTargetError(f"{why}; to compile it again here, install what is missing ({error})") from error
    try:
        found: Plan = relowered(plan, _engine_cache(cache))
    except PlanError:
        raise
    except EngineError as error:
        raise PlanTargetError(f"{why}; its graph cannot be compiled again here: {error}") from error
    return found


def _engine_cache(cache: str | os.PathLike[str] | bool) -> Any:
    """Return the EngineCache that the argument of load_engine names, or None."""
    from infer_server.engines.compiler.engine_cache import EngineCache
    return None if cache is False else EngineCache("" if cache is True else cache)
