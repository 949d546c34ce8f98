"""Compilation of what a plan lacks on this machine; imports the compiler when it is called, if it is installed."""
from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from infer_server.engines.errors import EngineError, InputError, PlanError, PlanTargetError
from infer_server.engines.plan.extents import CACHE_CAPACITY
from infer_server.engines.plan.plan import Plan

if TYPE_CHECKING:
    from infer_server.engines.plan.extents import Extents
    from infer_server.engines.runtime.program import SegmentMaker
    from infer_server.engines.runtime.specialisation import Specialisation, SpecialisationMaker


@contextmanager
def _compiler_for(purpose: str) -> Iterator[None]:
    """Raise PlanTargetError, which names the purpose, if what is imported in the block is not installed."""
    try:
        yield
    except ImportError as error:
        raise PlanTargetError(f"{purpose}, install what is missing ({error})") from error


def relowered(plan: Plan, why: str, cache: str | os.PathLike[str] | bool, quietly: bool) -> Plan:
    """Compile the plan's graph again for this machine, or take the result from the engine cache.

    why: what keeps the plan from running, for messages. Raises PlanTargetError if the compiler is not installed or the
    graph cannot be compiled here.
    """
    if not quietly:
        import logging  # imported here to load matching plans a few milliseconds sooner
        logging.getLogger(__name__).warning("%s; compiling its graph again for this machine", why)
    with _compiler_for(f"{why}; to compile it again here"):
        from infer_server.engines.compiler.specialise import relowered as compiled_again
    try:
        return compiled_again(plan, _engine_cache(cache))
    except PlanError:
        raise
    except EngineError as error:
        raise PlanTargetError(f"{why}; its graph cannot be compiled again here: {error}") from error


def with_max_batch(plan: Plan, items: int) -> Plan:
    """Compile the plan for a larger batch.

    Raises PlanTargetError if the compiler is not installed, InputError if the plan cannot be compiled, e.g. because
    its file, which has the weights, is gone.
    """
    with _compiler_for(f"{plan.name}: items that depend on each other are not cut, and the plan is for "
                       f"{plan.max_batch}; to compile it for more"):
        from infer_server.engines.compiler.specialise import relower
    try:
        return relower(replace(plan, max_batch=items), plan.machine.target)
    except PlanError as error:
        raise InputError(f"{plan.name}: more than {plan.max_batch} items cannot be run in slices, for they depend on "
                         f"each other, and the plan cannot be compiled for {items} now: {error}") from error


def retuned(plan: Plan, cache: str | os.PathLike[str] | bool, gpu: int) -> Plan:
    """Return the plan with tactics timed here. Raises PlanTargetError if it is stripped or there is no compiler."""
    with _compiler_for(f"{plan.name}: to choose its tactics anew"):
        from infer_server.engines.compiler.specialise import retuned as timed
    return timed(plan, _engine_cache(cache), gpu)


def _engine_cache(cache: str | os.PathLike[str] | bool) -> Any:
    """Return the EngineCache that the argument of load_engine names, or None."""
    from infer_server.engines.compiler.engine_cache import EngineCache
    return None if cache is False else EngineCache("" if cache is True else cache)


def segment_maker(plan: Plan) -> SegmentMaker:
    """Return the compiler of a program's segments. Raises PlanTargetError if the compiler is not installed."""
    assert plan.program is not None
    with _compiler_for(f"{plan.name}: to run it on what it was not tried on"):
        from infer_server.engines.compiler.segments import SegmentMaker
    return SegmentMaker(plan.program)


class LateSpecialiser:
    """Specialiser that imports the compiler at the first shape for which no built or stored symbolic plan holds."""

    def __init__(self, plan: Plan, cache: str | os.PathLike[str] | bool) -> None:
        self.first: Specialisation | None = None
        self._plan = plan
        self._compiler: SpecialisationMaker | None = None
        self._importing = threading.Lock()
        self._cache = _engine_cache(cache) if plan.open else None
        # Built and stored symbolic plans, of caches in place (True) and of others; None: they do not suffice.
        self._stored: dict[bool, Any] = {}

    def _specialiser(self) -> SpecialisationMaker:
        """Return the compiler. Raises PlanTargetError if the plan is stripped or the compiler is not installed."""
        with self._importing:
            if self._compiler is None:
                with _compiler_for(f"{self._plan.name}: to run it at other shapes than it was built for"):
                    from infer_server.engines.compiler.specialise import Specialiser
                specialiser = Specialiser(self._plan, cache=self._cache)
                specialiser.first, self._compiler = self.first, specialiser
            return self._compiler

    def plan(self, extents: Extents, max_batch: int | None = None) -> Plan:
        if not self._plan.open:
            assert max_batch is not None
            return with_max_batch(self._plan, max_batch)
        return self._specialiser().plan(extents, max_batch)

    def symbolic(self, extents: Extents) -> Plan | None:
        in_place = CACHE_CAPACITY in extents
        if in_place not in self._stored:
            from infer_server.engines.compiler.symbolic import CACHING, ORDINARY, symbolic_plans_of
            self._stored[in_place] = symbolic_plans_of(self._plan, self._cache, CACHING if in_place else ORDINARY,
                                                       lambda extents: None, None)
        stored = self._stored[in_place]
        plan: Plan | None = stored.plan(extents) if stored else None
        if plan:
            return plan
        self._stored[in_place] = None       # the compiler reads them, too
        return self._specialiser().symbolic(extents)

    def encoded(self) -> bytes | memoryview:
        """Return the symbolic plans for a plan file: the plan's, and those that the compiler has made."""
        return self._compiler.encoded() if self._compiler else self._plan.open_part.symbolic
