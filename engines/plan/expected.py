"""Expected speed of a plan for a GPU and of its steps, from the build's timings or its cost model."""
from __future__ import annotations

from collections.abc import Sequence

from engines.plan.plan import Plan


def expected(plan: Plan) -> str:
    """Return the expected throughput and latency as a line of text, or "" if the build recorded none."""
    found = plan.machine.cpu.get("expected")
    if not found:
        return ""
    items, seconds = found["items"], found["seconds"]
    how = "as its kernels were timed there" if found["timed"] else "by the cost model: nothing was timed"
    return (f"expected on {plan.machine.cpu['model']}: {items / seconds:,.0f} items/s at batch {items} "
            f"({seconds * 1e3:.3g} ms), {how}")


def expected_us(plan: Plan) -> Sequence[float]:
    """Return the cost model's time of each step for one item in microseconds; () if the build recorded none."""
    found: Sequence[float] = plan.machine.cpu.get("expected", {}).get("steps_us", ())
    return found
