"""Set of templates of a model: symbolic plans, traced once and reused for other extents.

    templates = Templates(trace)            # trace: returns the plan for symbolic extents
    templates.plan({"T": 77})               # the plan for this extent; None if no template holds for it
"""
from __future__ import annotations

import copyreg
import io
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from infer_server.engines.capacity import too_large
from infer_server.engines.compiler.engine_cache import EngineCache
from infer_server.engines.ir.symbolic import NotSymbolic, ShapeEnv
from infer_server.engines.machine import object_cache
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.object_cache import ObjectCache
from infer_server.engines.plan.arena import check_memory
from infer_server.engines.plan.extents import Extents
from infer_server.engines.plan.plan import Plan
from infer_server.engines.plan.template import LateMachine, Template

MOST = 16           # maximum number of templates of a model; the last used are kept
CREDIT = 8          # traces before giving up: each template that serves a second shape earns another two

log = logging.getLogger(__name__)


class StoredTemplates:
    """Templates of a model in an object cache, whose entries are trusted as the machine code in it is."""

    def __init__(self, cache: ObjectCache, key: str) -> None:
        """key: of all that the templates depend on, see EngineCache.key."""
        self._cache, self._key = cache, key

    def load(self) -> list[tuple[Template, bool]]:
        """Return each template, and whether it has served only its traced shape."""
        content = self._cache.fetch(self._key)
        try:
            templates: list[tuple[Template, bool]] = pickle.loads(content) if content else []
        except Exception as error:      # of a library that has changed
            log.warning("stored templates cannot be read and are traced again: %s: %s", type(error).__name__, error)
            return []
        return templates

    def save(self, templates: Sequence[tuple[Template, bool]]) -> None:
        content = io.BytesIO()
        try:
            _Pickler(content).dump([*templates])
        except Exception as error:      # a part that pickle cannot write
            log.info("templates are not stored: %s: %s", type(error).__name__, error)
            return
        self._cache.store(self._key, content.getvalue())


def _proxy(mapping: Mapping[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(mapping)


class _Pickler(pickle.Pickler):
    """Pickler that also writes the read-only mappings of nodes."""
    dispatch_table = {**copyreg.dispatch_table, MappingProxyType: lambda proxy: (_proxy, (dict(proxy),))}


class Templates:
    """Templates of one model. Not thread-safe."""

    def __init__(self, trace: Callable[[ShapeEnv, Extents], Plan | None],
                 right: Callable[[Plan, Extents], bool] | None = lambda plan, extents: True,
                 stored: StoredTemplates | None = None) -> None:
        """Create a set of templates.

        Parameters
        ----------
        trace : callable
            Returns the plan for symbolic extents, or None if there are no such plans.
        right : callable
            Returns True if a plan is correct for extents; called for the second shape that each template serves. None:
            templates serve no second shape unless they have done so in an earlier process.
        stored : StoredTemplates, optional
            Templates of earlier processes, to which new ones are added.
        """
        self._trace, self._right, self._stored, self._credit = trace, right, stored, CREDIT
        loaded = stored.load() if stored else []
        self._known = [one for one, _ in loaded]    # the last used at the end
        self._first = {id(one) for one, is_first in loaded if is_first}     # those that served only their traced shape

    def plan(self, extents: Extents) -> Plan | None:
        """Return the plan for these extents; None if no template holds for them and none can be traced."""
        for template in reversed(self._known):
            if plan := _plan(template, extents):
                is_first = id(template) in self._first
                if is_first and not self._proven(template, plan, extents):
                    return None
                self._known.remove(template)
                self._known.append(template)
                vars(plan)["of_template"] = not is_first        # nobody else has it yet
                return plan
        made = self._traced(extents) if self._credit > 0 else None
        plan = _plan(made, extents) if made else None
        if made and plan:
            self._known = [*self._known[1 - MOST:], made]
            self._first = {id(made), *self._first.intersection(map(id, self._known))}
            self._save()
        return plan

    def _proven(self, template: Template, plan: Plan, extents: Extents) -> bool:
        """Verify a template's plan for the first shape other than the traced one; return True if it is correct.

        If it is not, all templates of the model are discarded, and no more are traced.
        """
        if dict(extents) == template.of_shape:
            return True
        if self._right is None:
            return False
        if not self._right(plan, extents):
            self._known.clear()
            self._save()
            self._credit = 0
            return False
        self._first.remove(id(template))
        self._save()
        self._credit = min(self._credit + 2, CREDIT)
        return True

    def _save(self) -> None:
        if self._stored:
            self._stored.save([(one, id(one) in self._first) for one in self._known])

    def _traced(self, extents: Extents) -> Template | None:
        """Return a new template, or None if tracing fails; an error recurs when the plan is made for the shape only."""
        self._credit -= 1
        env = ShapeEnv()
        fixed = {name: extent for name, extent in extents.items() if not isinstance(extent, int) or extent < 1}
        symbols = {name: env.extent(name, extent) for name, extent in extents.items() if name not in fixed}
        try:
            plan = self._trace(env, {name: symbols.get(name, extent) for name, extent in extents.items()})
            return Template(plan, env, extents, tuple(symbols), fixed) if plan else None
        except (NotSymbolic, Exception) as reason:       # a real fault recurs when the plan is made for the shape only
            log.info("there is no template for %s: %s: %s", dict(extents), type(reason).__name__, reason)
            return None


def stored_templates(plan: Plan, cache: EngineCache | None) -> StoredTemplates | None:
    """Return the templates of a plan in a cache; None without a cache, or for a plan that was not read from a file.

    $INFER_OBJECT_CACHE holds for them, too.
    """
    if cache is None or not plan.fingerprint:
        return None
    with object_cache.using(cache.objects):
        objects = object_cache.current()
    key = cache.key({"plan": plan.fingerprint}, {"templates of": detect().model})
    return StoredTemplates(objects, key) if objects else None


def _plan(template: Template, extents: Extents) -> Plan | None:
    """Return the plan of a template, or None. Raises ConfigError if it needs more memory than there is."""
    plan = template.plan(extents)
    if plan and isinstance(plan.machine, LateMachine) and too_large(plan.machine.buffer_bytes):
        check_memory(plan.name, plan.machine.buffers, plan.max_batch)
    return plan
