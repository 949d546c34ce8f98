"""How fast a plan and its steps are expected to be, where the build says it: of a GPU's, by its times or by the model
of its card."""
from __future__ import annotations

from collections.abc import Sequence

from engines.plan.plan import Plan


def expected(plan: Plan) -> str:
    """A line; "" if the build does not say it."""
    found = plan.machine.cpu.get("expected")
    if not found:
        return ""
    items, seconds = found["items"], found["seconds"]
    how = "as its kernels were timed there" if found["timed"] else "by the cost model: nothing was timed"
    return (f"expected on {plan.machine.cpu['model']}: {items / seconds:,.0f} items/s at batch {items} "
            f"({seconds * 1e3:.3g} ms), {how}")


def expected_us(plan: Plan) -> Sequence[float]:
    """Of each step, for one item, by the model; () where the build has timed them, or has no model."""
    found: Sequence[float] = plan.machine.cpu.get("expected", {}).get("steps_us", ())
    return found
