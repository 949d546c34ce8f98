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
from infer_server.engines.plan.plan import DynamicKernel, IoTensor, Plan
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.policy import Policy
from infer_server.engines.runtime.segment import Segment

if TYPE_CHECKING:
    from infer_server.engines.plan.extents import Extents
    from infer_server.engines.runtime.program import Program, SegmentMaker, Watch
    from infer_server.engines.runtime.specialisation import Specialisation, SpecialisationMaker


ON_TRIAL = "on trial"


def load_engine(path: str | os.PathLike[str], threads: int = 1, on_target_mismatch: str = "relower",
                cpus: Sequence[int] | None = None, specialise: str = "",
                specialisations: int = 64, cache: str | os.PathLike[str] | bool = True, gpu: int = 0,
                retune: bool = False) -> Engine:
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
        see docs/howto/open-shapes.md. Segments of programs are specialised for shapes that come again.
    specialisations
        The most that are kept in memory.
    cache
        Where specialisations are kept on disk: the user's engine cache (True), a folder, or nowhere (False).
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
    tensors = plan.open_part
    return Description(tensors.inputs, tensors.outputs, plan.max_batch, plan.dependence, plan.metadata)


def engine_of(plan: Plan, threads: int = 1, on_target_mismatch: str = "relower", cpus: Sequence[int] | None = None,
              name: str = "", specialise: str = "", specialisations: int = 64,
              cache: str | os.PathLike[str] | bool = False, gpu: int = 0) -> Engine:
    """Create the engine of a plan in memory. name: used in messages; other parameters: see load_engine."""
    def load(one: Plan) -> Segment:
        return _segment(one, threads, on_target_mismatch, cpus, name or one.name if one is plan else one.name,
                        specialise, specialisations, cache, gpu, is_part=one is not plan)

    executor = program_of(plan, load) if plan.program else load(plan)
    return Engine(executor.plan, threads, executor=executor)


def _segment(plan: Plan, threads: int = 1, on_target_mismatch: str = "relower", cpus: Sequence[int] | None = None,
             name: str = "", specialise: str = "", specialisations: int = 64,
             cache: str | os.PathLike[str] | bool = False, gpu: int = 0, is_part: bool = False) -> Segment:
    """Load a plan that is not a program.

    on_target_mismatch: ON_TRIAL relowers without a warning, for a build for another machine that runs its result once.
    is_part: the plan is a segment of a program (see Policy).
    """
    if mismatch := device_of(plan.machine.backend, gpu).mismatch(plan):
        if plan.stripped and not plan.open_part.model:
            raise PlanTargetError(f"{name}: {mismatch}; it is stripped (--strip), so it cannot be compiled again here: "
                                  "build it here, or without --strip")
        if on_target_mismatch == "refuse":
            raise PlanTargetError(f"{name}: {mismatch}; build it here, or load it with on_target_mismatch='relower'")
        plan = _relower(plan, f"{name}: {mismatch}", quietly=on_target_mismatch == ON_TRIAL)
    is_final = plan.stripped and plan.open is None      # nothing can be compiled for it
    return Segment(plan, threads, cpus, gpu, None if is_final else lambda: _LateSpecialiser(plan, cache),
                   Policy(specialise or "background", specialisations, segment=is_part))


def program_of(plan: Plan, load: Callable[[Plan], Segment] | None = None,
               maker: Callable[[], SegmentMaker] | None = None, watch: Watch | None = None) -> Program:
    """Load a program.

    Parameters
    ----------
    plan : Plan
        Plan with a program part.
    load : callable, optional
        Loads the plan of a segment; by default as a segment that waits for specialisations (ON_TRIAL).
    maker : callable, optional
        Returns the compiler of further plans of segments.
    watch : callable, optional
        Called with all that segments are fed.
    """
    from infer_server.engines.runtime.program import Program  # imported here because most plans do not need it
    return Program(plan, load or (lambda part: _segment(
        part, on_target_mismatch=ON_TRIAL, name=part.name, specialise="wait", is_part=True)),
                   maker or (lambda: _segment_maker(plan)), watch)


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
    """Specialiser that imports the compiler at the first shape for which no stored symbolic plan holds."""

    def __init__(self, plan: Plan, cache: str | os.PathLike[str] | bool) -> None:
        self.first: Specialisation | None = None
        self._plan = plan
        self._made: SpecialisationMaker | None = None
        self._making = threading.Lock()
        if plan.open:
            from infer_server.engines.compiler.engine_cache import EngineCache
            from infer_server.engines.compiler.symbolic import SymbolicPlans, stored_symbolic_plans
            self._cache = None if cache is False else EngineCache("" if cache is True else cache)
            stored = stored_symbolic_plans(plan, self._cache)
            self._stored = SymbolicPlans(lambda env, extents: None, None, stored) if stored else None

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
        if not self._plan.open:
            assert max_batch is not None
            return _with_max_batch(self._plan, max_batch)
        return self._specialiser().plan(extents, max_batch)

    def symbolic(self, extents: Extents) -> Plan:
        stored = self._stored
        if stored and (plan := stored.plan(extents)):
            return plan
        self._stored = None         # the compiler reads them, too
        return self._specialiser().symbolic(extents)

    @property
    def dynamic_kernels(self) -> tuple[tuple[DynamicKernel, ...], tuple[bytes, ...]]:
        return self._made.dynamic_kernels if self._made else (self._plan.open_part.general, ())


def _retuned(plan: Plan, cache: str | os.PathLike[str] | bool, gpu: int) -> Plan:
    """Return the plan with tactics timed here. Raises PlanTargetError if it is stripped or there is no compiler."""
    try:
        from infer_server.engines.compiler.engine_cache import EngineCache
        from infer_server.engines.compiler.specialise import retuned
    except ImportError as error:
        raise PlanTargetError(f"{plan.name}: to choose its tactics anew, install what is missing ({error})") from error
    kept = None if cache is False else EngineCache("" if cache is True else cache)
    found: Plan = retuned(plan, kept, gpu)
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


def _relower(plan: Plan, why: str, quietly: bool) -> Plan:
    if not quietly:
        import logging  # imported here to load matching plans a few milliseconds sooner
        logging.getLogger(__name__).warning("%s; compiling its graph again for this machine", why)
    try:
        from infer_server.engines.compiler.specialise import relower
    except ImportError as error:
        raise PlanTargetError(f"{why}; to compile it again here, install what is missing ({error})") from error
    try:
        relowered: Plan = relower(plan)
    except PlanError:
        raise
    except EngineError as error:
        raise PlanTargetError(f"{why}; its graph cannot be compiled again here: {error}") from error
    return relowered
