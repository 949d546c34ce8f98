"""Creation of the engine of a plan; a plan for another machine is compiled again for this one, or rejected."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from infer_server.engines.backends import device_of
from infer_server.engines.errors import PlanTargetError
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.load.options import LoadOptions
from infer_server.engines.runtime.load.recompile import (
    LateSpecialiser,
    relowered,
    segment_maker,
    with_max_batch,
)

if TYPE_CHECKING:
    from infer_server.engines.runtime.program_engine import AnyEngine, ProgramEngine, SegmentEngine, SegmentMaker, Watch


def engine_of(plan: Plan, options: LoadOptions = LoadOptions(), name: str = "") -> AnyEngine:    # noqa: B008
    """Create the engine of a plan in memory. name: used in messages; by default the plan's.

    Raises PlanTargetError, ConfigError.
    """
    if plan.program is not None:
        return program_engine(plan, options)
    return _graph_engine(plan, options, name or plan.name)


def program_engine(plan: Plan, options: LoadOptions, maker: Callable[[], SegmentMaker] | None = None,
                   watch: Watch | None = None) -> ProgramEngine:
    """Create the engine of a program.

    Parameters
    ----------
    plan : Plan
        Plan with a program part.
    options : LoadOptions
        Options of the engines of its segments, too.
    maker : callable, optional
        Returns the compiler of further plans of segments.
    watch : callable, optional
        Called with all that segments are fed.
    """
    from infer_server.engines.runtime.program_engine import ProgramEngine
    return ProgramEngine(plan, lambda part: _graph_engine(part, options, part.name, segment=True),
                         maker or (lambda: segment_maker(plan)), options.threads, watch)


def _graph_engine(plan: Plan, options: LoadOptions, name: str, segment: bool = False) -> SegmentEngine:
    """Create the engine of a plan that is not a program. segment: the plan is a segment of one (see Policy)."""
    plan = _for_this_machine(plan, options, name)
    threads, cpus, gpu = options.threads, options.cpus, options.gpu
    if plan.open is None:
        engine = Engine(plan, threads, cpus, gpu=gpu)
        if not plan.stripped:
            engine.larger = lambda items: Engine(with_max_batch(plan, items), threads, cpus, gpu=gpu)
        return engine
    from infer_server.engines.runtime.open_engine import OpenEngine  # imported here because most plans do not need it
    from infer_server.engines.runtime.policy import Policy
    policy = Policy(options.specialise, options.specialisations, segment=segment)
    return OpenEngine(plan, lambda: LateSpecialiser(plan, options.cache), threads, cpus, policy, gpu)


def _for_this_machine(plan: Plan, options: LoadOptions, name: str) -> Plan:
    """Return the plan, compiled again if this machine cannot run it. Raises PlanTargetError if it must not be."""
    mismatch = device_of(plan.machine.backend, options.gpu).mismatch(plan)
    if not mismatch:
        return plan
    if plan.stripped and not (plan.open and plan.open.model):
        raise PlanTargetError(f"{name}: {mismatch}; it is stripped (--strip), so it cannot be compiled again here: "
                              "build it here, or without --strip")
    if options.on_target_mismatch == "refuse":
        raise PlanTargetError(f"{name}: {mismatch}; build it here, or load it with on_target_mismatch='relower'")
    return relowered(plan, f"{name}: {mismatch}", options.cache, quietly=options.trial)
