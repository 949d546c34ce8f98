"""load_engine: a plan file -> an engine; a plan for another machine is compiled again for this one, or refused."""
from __future__ import annotations

import os
from collections.abc import Sequence

from engines.backends import device_of
from engines.errors import ConfigError, EngineError, PlanError, PlanTargetError
from engines.plan.file import read_plan
from engines.plan.plan import Plan
from engines.runtime.engine import Engine


def load_engine(path: str | os.PathLike[str], threads: int = 1, on_target_mismatch: str = "relower",
                cpus: Sequence[int] | None = None) -> Engine:
    """The engine of a plan file.

    threads: that work on one request. For many requests at a time, one thread and several contexts give more.
    cpus: pins the threads of every context, one CPU for each; see Engine.create_context, which takes its own.
    on_target_mismatch: if this CPU lacks what the code needs, "relower" compiles the plan's graph again for this one
    (seconds; needs llvmlite), "refuse" raises PlanTargetError.

    Raises PlanCorruptError, PlanVersionError, PlanTargetError, ConfigError, OSError.
    """
    if on_target_mismatch not in ("relower", "refuse"):
        raise ConfigError(f"on_target_mismatch='{on_target_mismatch}': choose 'relower' or 'refuse'")
    return engine_of(read_plan(path), threads, on_target_mismatch, cpus, str(path))


def engine_of(plan: Plan, threads: int = 1, on_target_mismatch: str = "relower", cpus: Sequence[int] | None = None,
              name: str = "") -> Engine:
    """The engine of a plan at hand, as load_engine makes it; `name` is what errors call it."""
    name = name or plan.name
    if mismatch := device_of(plan.machine.backend).mismatch(plan):
        if plan.stripped:
            raise PlanTargetError(f"{name}: {mismatch}; it is stripped (--strip), so it cannot be compiled again here: "
                                  "build it here, or without --strip")
        if on_target_mismatch == "refuse":
            raise PlanTargetError(f"{name}: {mismatch}; build it here, or load it with on_target_mismatch='relower'")
        plan = _relower(plan, f"{name}: {mismatch}")
    return Engine(plan, threads, cpus)


def _relower(plan: Plan, why: str) -> Plan:
    import logging  # a plan that fits needs none, and starts a few milliseconds sooner
    logging.getLogger(__name__).warning("%s; compiling its graph again for this machine", why)
    try:
        from engines.compiler.builder import relower
    except ImportError as error:
        raise PlanTargetError(f"{why}; to compile it again here, install what is missing ({error})") from error
    try:
        relowered: Plan = relower(plan)
    except PlanError:
        raise
    except EngineError as error:
        raise PlanTargetError(f"{why}; its graph cannot be compiled again here: {error}") from error
    return relowered
