"""Creation of the engine of a plan; a plan for another machine is compiled again for this one, or rejected."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from infer_server.engines.backends import device_of
from infer_server.engines.errors import PlanTargetError
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from infer_server.engines.runtime.load.options import LoadOptions
from infer_server.engines.runtime.load.recompile import LateSpecialiser, relowered, segment_maker
from infer_server.engines.runtime.policy import Policy
from infer_server.engines.runtime.segment import Segment

if TYPE_CHECKING:       # most plans are no programs
    from infer_server.engines.runtime.program import Program, SegmentMaker, Watch


def engine_of(plan: Plan, options: LoadOptions = LoadOptions(), name: str = "") -> Engine:    # noqa: B008
    """Create the engine of a plan in memory. name: used in messages; by default the plan's.

    Raises PlanTargetError, ConfigError.
    """
    executor = program_of(plan, options) if plan.program else _segment(plan, options, name or plan.name)
    return Engine(executor.plan, options.threads, executor=executor)


def program_of(plan: Plan, options: LoadOptions, maker: Callable[[], SegmentMaker] | None = None,
               watch: Watch | None = None) -> Program:
    """Load a program.

    Parameters
    ----------
    plan : Plan
        Plan with a program part.
    options : LoadOptions
        Options of its segments.
    maker : callable, optional
        Returns the compiler of further plans of segments.
    watch : callable, optional
        Called with all that segments are fed.
    """
    from infer_server.engines.runtime.program import Program  # imported here because most plans do not need it
    return Program(plan, lambda part: _segment(part, options, part.name),
                   maker or (lambda: segment_maker(plan)), watch)


def _segment(plan: Plan, options: LoadOptions, name: str) -> Segment:
    """Load a plan that is not a program."""
    plan = _for_this_machine(plan, options, name)
    is_final = plan.stripped and plan.open is None      # nothing can be compiled for it
    return Segment(plan, options.threads, options.cpus, options.gpu,
                   None if is_final else lambda: LateSpecialiser(plan, options.cache),
                   Policy(options.specialise, options.specialisations))


def _for_this_machine(plan: Plan, options: LoadOptions, name: str) -> Plan:
    """Return the plan, compiled again if this machine cannot run it. Raises PlanTargetError if it must not be."""
    mismatch = device_of(plan.machine.backend, options.gpu).mismatch(plan)
    if not mismatch:
        return plan
    if plan.stripped and not plan.open_part.model:
        raise PlanTargetError(f"{name}: {mismatch}; it is stripped (--strip), so it cannot be compiled again here: "
                              "build it here, or without --strip")
    if options.on_target_mismatch == "refuse":
        raise PlanTargetError(f"{name}: {mismatch}; build it here, or load it with on_target_mismatch='relower'")
    return relowered(plan, f"{name}: {mismatch}", options.cache, quietly=options.trial)
