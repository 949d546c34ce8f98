"""Set of templates of a model: symbolic plans, traced once and reused for other extents.

    templates = Templates(trace)            # trace: returns the plan for symbolic extents
    templates.plan({"T": 77})               # the plan for this extent; None if no template holds for it
"""
from __future__ import annotations

import logging
from collections.abc import Callable

from engines.ir.counted import Counting, Pinned
from engines.lowering.buffers import check_plan_memory
from engines.plan.extents import Extents
from engines.plan.plan import Plan
from engines.plan.template import Template

MOST = 16           # maximum number of templates of a model; the last used are kept
CREDIT = 8          # traces before giving up: each template that serves a second shape earns another two

log = logging.getLogger(__name__)


class Templates:
    """Templates of one model. Not thread-safe."""

    def __init__(self, trace: Callable[[Counting, Extents], Plan | None],
                 right: Callable[[Plan, Extents], bool] = lambda plan, extents: True) -> None:
        """Create an empty set of templates.

        Parameters
        ----------
        trace : callable
            Returns the plan for symbolic extents, or None if there are no such plans.
        right : callable
            Returns True if a plan is correct for extents; called for the second shape that each template serves.
        """
        self._trace, self._right, self._credit = trace, right, CREDIT
        self._known: list[Template] = []            # the last used at the end
        self._first: set[int] = set()               # ids of templates that have served only their traced shape

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
        return plan

    def _proven(self, template: Template, plan: Plan, extents: Extents) -> bool:
        """Verify a template's plan for the first shape other than the traced one; return True if it is correct.

        If it is not, all templates of the model are discarded, and no more are traced.
        """
        if dict(extents) == template.of_shape:
            return True
        if not self._right(plan, extents):
            self._known.clear()
            self._credit = 0
            return False
        self._first.remove(id(template))
        self._credit = min(self._credit + 2, CREDIT)
        return True

    def _traced(self, extents: Extents) -> Template | None:
        """Return a new template, or None if tracing fails; an error recurs when the plan is made for the shape only."""
        self._credit -= 1
        counting = Counting()
        fixed = {name: extent for name, extent in extents.items() if not isinstance(extent, int) or extent < 1}
        counted = {name: counting.extent(name, extent) for name, extent in extents.items() if name not in fixed}
        try:
            plan = self._trace(counting, {name: counted.get(name, extent) for name, extent in extents.items()})
            return Template(plan, counting, extents, tuple(counted), fixed) if plan else None
        except (Pinned, Exception) as reason:       # a real fault recurs when the plan is made for the shape only
            log.info("there is no template for %s: %s: %s", dict(extents), type(reason).__name__, reason)
            return None


def _plan(template: Template, extents: Extents) -> Plan | None:
    """Return the plan of a template, or None. Raises ConfigError if it needs more memory than there is."""
    plan = template.plan(extents)
    if plan:
        check_plan_memory(plan)
    return plan
