"""Set of symbolic plans of a model, traced once and reused for other extents.

    symbolics = SymbolicPlans(trace)            # trace: returns the plan for symbolic extents
    symbolics.plan({"T": 77})                   # the plan for this extent; None if no symbolic plan holds for it
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from infer_server.engines.capacity import too_large
from infer_server.engines.compiler.engine_cache import EngineCache
from infer_server.engines.errors import PlanError
from infer_server.engines.ir.symbolic import NotSymbolic, ShapeEnv
from infer_server.engines.machine import object_cache
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.object_cache import ObjectCache
from infer_server.engines.plan.arena import check_memory
from infer_server.engines.plan.extents import CACHE_CAPACITY, Extents
from infer_server.engines.plan.plan import Plan
from infer_server.engines.plan.symbolic.encoding import decode, decode_kernels, encode
from infer_server.engines.plan.symbolic.plans import CompiledKernel, LateMachine, SymbolicPlan

MOST = 16           # maximum number of symbolic plans of a model; the last used are kept
SMALLEST_LIMIT = 1 << 20        # bytes that the symbolic plans of a plan file may take in any case, and
LIMIT_SHARE = 1 / 8             # share of the bytes of its constants that they may take
CREDIT = 8          # traces before giving up: each symbolic plan that serves a second shape earns another two
# Kinds of stored symbolic plans.
ORDINARY, CACHING = "symbolic plans of", "symbolic plans with caches in place of"

log = logging.getLogger(__name__)


class StoredSymbolicPlans:
    """Symbolic plans of a model in an object cache, whose entries are trusted as the machine code in it is."""

    def __init__(self, cache: ObjectCache, key: str, plan: Plan) -> None:
        """Take the plan of the model.

        key: of all that the symbolic plans depend on, see EngineCache.key.
        """
        self._cache, self._key, self._plan = cache, key, plan

    def load(self) -> list[tuple[SymbolicPlan, bool]]:
        """Return each symbolic plan, and whether it has served only its traced shape."""
        content = self._cache.fetch(self._key) or b"\0"
        count = content[0]
        try:
            symbolics = decode(content[1 + count:], self._plan)
            return [*zip(symbolics, map(bool, content[1:1 + count]), strict=True)]
        except (PlanError, ValueError) as error:
            log.warning("stored symbolic plans cannot be read and are traced again: %s", error)
            return []

    def save(self, symbolics: Sequence[tuple[SymbolicPlan, bool]]) -> None:
        try:
            content = encode([one for one, _ in symbolics], self._plan)
        except PlanError as error:
            log.info("symbolic plans are not stored: %s", error)
            return
        self._cache.store(self._key, bytes([len(symbolics), *(is_first for _, is_first in symbolics)]) + content)


class SymbolicPlans:
    """Symbolic plans of one model. Not thread-safe."""

    def __init__(self, trace: Callable[[Extents], Plan | None],
                 right: Callable[[Plan, Extents], bool] | None = lambda plan, extents: True,
                 stored: StoredSymbolicPlans | None = None, built: Sequence[SymbolicPlan] = (),
                 usual: Extents = {}) -> None:      # noqa: B006
        """Create a set of symbolic plans.

        Parameters
        ----------
        trace : callable
            Returns the plan for symbolic extents, or None if there are no such plans.
        right : callable
            Returns True if a plan is correct for extents; called for the second shape that each symbolic plan serves.
            None: they serve no second shape unless they have done so in an earlier process.
        stored : StoredSymbolicPlans, optional
            Symbolic plans of earlier processes, to which new ones are added.
        built : sequence of SymbolicPlan
            Symbolic plans in the plan file, which the build has verified.
        usual : mapping
            Extents of the plan. Those that a shape has in common with it are fixed where no trace holds for others: a
            segment of a program leaves all extents open, those of its weights, too.
        """
        self._usual = usual
        self._trace, self._right, self._stored, self._credit = trace, right, stored, CREDIT
        loaded = stored.load() if stored else []
        self._built, self._unchecked = tuple(built), {id(one) for one in built}     # their first plans are checked
        self._known = [*built, *(one for one, _ in loaded)]     # the last used at the end
        self._first = {id(one) for one, is_first in loaded if is_first}     # those that served only their traced shape

    @property
    def proven(self) -> list[SymbolicPlan]:
        """Symbolic plans that are correct for other shapes than the traced one."""
        return [one for one in self._known if id(one) not in self._first]

    def verify(self, extents: Extents) -> None:
        """Verify at these extents the symbolic plans that hold for them and served only their traced shape."""
        for symbolic in [one for one in self._known if id(one) in self._first]:
            plan = symbolic.plan(extents)
            if plan and symbolic in self._known and not _is_too_large(plan):
                self._proven(symbolic, plan, extents)

    def plan(self, extents: Extents) -> Plan | None:
        """Return the plan for these extents; None if no symbolic plan holds for them and none can be traced.

        None, too, if the plan's largest batch needs more memory at these extents than there is: a plan that is compiled
        for them takes a smaller batch.
        """
        for symbolic in reversed(self._known):
            if plan := symbolic.plan(extents):
                if _is_too_large(plan):
                    return None
                is_first = id(symbolic) in self._first
                if is_first and not self._proven(symbolic, plan, extents):
                    return None
                self._known.remove(symbolic)
                self._known.append(symbolic)
                vars(plan)["of_symbolic"] = not (is_first or id(symbolic) in self._unchecked)   # nobody else has it yet
                self._unchecked.discard(id(symbolic))
                return plan
        made = self._traced(extents) if self._credit > 0 else None
        plan = _plan(made, extents) if made else None
        if made and plan:
            self._known = [*self._known[1 - MOST:], made]
            self._first = {id(made), *self._first.intersection(map(id, self._known))}
            self._save()
        return plan

    def _proven(self, symbolic: SymbolicPlan, plan: Plan, extents: Extents) -> bool:
        """Verify what a symbolic plan made for the first shape other than the traced one; return True if it is correct.

        If it is not, all symbolic plans of the model are discarded, and no more are traced.
        """
        if dict(extents) == symbolic.of_shape:
            return True
        if self._right is None:
            return False
        if not self._right(plan, extents):
            self._known.clear()
            self._save()
            self._credit = 0
            return False
        self._first.remove(id(symbolic))
        self._save()
        self._credit = min(self._credit + 2, CREDIT)
        return True

    def _save(self) -> None:
        if self._stored:
            self._stored.save([(one, id(one) in self._first) for one in self._known
                               if not any(one is built for built in self._built)])

    def _traced(self, extents: Extents) -> SymbolicPlan | None:
        """Return a new symbolic plan, or None if tracing fails; errors recur when the shape's own plan is made."""
        self._credit -= 1
        numbers = [name for name, extent in extents.items() if isinstance(extent, int) and extent >= 1]
        changed = [name for name in numbers if extents[name] != self._usual.get(name)]
        made = self._traced_with(numbers, extents)
        return self._traced_with(changed, extents) if made is None and 0 < len(changed) < len(numbers) else made

    def _traced_with(self, names: Sequence[str], extents: Extents) -> SymbolicPlan | None:
        """Return a symbolic plan in which these extents are symbolic, and the others fixed."""
        env = ShapeEnv()
        fixed = {name: extent for name, extent in extents.items() if name not in names}
        symbols = {name: env.extent(name, extents[name]) for name in names}
        try:
            plan = self._trace({name: symbols.get(name, extent) for name, extent in extents.items()})
            return SymbolicPlan(plan, env, extents, tuple(names), fixed) if plan else None
        except (NotSymbolic, Exception) as reason:       # a real fault recurs when the plan is made for the shape only
            log.info("there is no symbolic plan for %s: %s: %s", dict(extents), type(reason).__name__, reason)
            return None


def encoded(symbolics: Sequence[SymbolicPlan], kernels: Sequence[CompiledKernel], plan: Plan) -> bytes:
    """Return symbolic plans for a plan file, without those that cannot be encoded or exceed the limits.

    kernels: dynamic kernels, of which those that the symbolic plans use are encoded, too.
    """
    limit, content = max(SMALLEST_LIMIT, int(len(plan.machine.constants) * LIMIT_SHARE)), b""
    kept: list[SymbolicPlan] = []
    for one in symbolics:
        if one.constant_bytes > limit:      # weights in another layout, which hardly compress
            log.info("%s: the symbolic plan of %s is not stored: it has packed weights of its own", plan.name,
                     one.of_shape)
            continue
        try:
            more = encode([*kept, one], plan, kernels)
        except PlanError as error:
            log.info("%s: the symbolic plan of %s is not stored: %s", plan.name, one.of_shape, error)
            continue
        if len(more) <= limit:
            kept, content = [*kept, one], more
    return content


def built_kernels(plan: Plan) -> list[CompiledKernel]:
    """Return the dynamic kernels of the symbolic plans in a plan file; [] if they cannot be read."""
    with suppress(PlanError):       # symbolic_plans_of reports it
        return decode_kernels(plan.open_part.symbolic, plan)
    return []


def symbolic_plans_of(plan: Plan, cache: EngineCache | None, kind: str,
                      trace: Callable[[Extents], Plan | None],
                      right: Callable[[Plan, Extents], bool] | None) -> SymbolicPlans:
    """Return the set of symbolic plans of a plan: those in its file, in a cache, and those that are traced.

    Parameters
    ----------
    plan : Plan
    cache : EngineCache, optional
    kind : str
        CACHING for those that append to caches in place, else ORDINARY.
    trace, right : callable
        See SymbolicPlans.
    """
    try:
        built = decode(plan.open_part.symbolic, plan)
    except PlanError as error:
        log.warning("%s; they are traced again", error)
        built = []
    return SymbolicPlans(trace, right, stored_symbolic_plans(plan, cache, kind),
                         [one for one in built if (CACHE_CAPACITY in one.of_shape) == (kind == CACHING)], plan.extents)


def stored_symbolic_plans(plan: Plan, cache: EngineCache | None, kind: str = ORDINARY) -> StoredSymbolicPlans | None:
    """Return the symbolic plans of a plan in a cache; None without a cache, or if the plan was not read from a file.

    $INFER_OBJECT_CACHE holds for them, too. kind: CACHING for those that append to caches in place.
    """
    if cache is None or not plan.fingerprint:
        return None
    with object_cache.using(cache.objects):
        objects = object_cache.current()
    key = cache.key({"plan": plan.fingerprint}, {kind: detect().model})
    return StoredSymbolicPlans(objects, key, plan) if objects else None


def _plan(symbolic: SymbolicPlan, extents: Extents) -> Plan | None:
    """Return the plan that a symbolic plan makes, or None. Raises ConfigError if it needs more memory than there is."""
    plan = symbolic.plan(extents)
    if plan and _is_too_large(plan):
        check_memory(plan.name, plan.machine.buffers, plan.max_batch)
    return plan


def _is_too_large(plan: Plan) -> bool:
    return isinstance(plan.machine, LateMachine) and bool(too_large(plan.machine.buffer_bytes))
