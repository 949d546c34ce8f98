"""A plan that contradicts itself is found out before it runs."""
from __future__ import annotations

from dataclasses import replace

import pytest

from engines.errors import PlanCorruptError
from engines.plan import Buffer, Operand, Plan
from engines.runtime import Engine
from engines.verification import verify
from tests.runtime.tiny import halo_plan, mix_plan


def with_operand(plan: Plan, operand: Operand) -> Plan:
    step = plan.steps[-1]
    return replace(plan, steps=(*plan.steps[:-1], replace(step, operands=(*step.operands[:-1], operand))))


PLAN = mix_plan([(0, 0), (1, 0), (2, 2)], [3])


@pytest.mark.parametrize(("plan", "message"), [
    (with_operand(PLAN, Operand(9)), "uses buffer 9, of 4"),
    (with_operand(PLAN, Operand(1)), "buffer 't1', which is alive in steps 0 to 1"),
    (with_operand(PLAN, Operand(3, 10**6)), "operand at byte 1000000"),
    (with_operand(PLAN, Operand(None, 64)), "operand at byte 64 of 0"),
    (replace(PLAN, steps=(replace(PLAN.steps[0], depends=(0,)), *PLAN.steps[1:])), r"'mix_0' depends on steps \[0\]"),
    (replace(PLAN, max_batch=5), "'t0' ends at byte 1200 of buffer 't0', which has 960"),
    (replace(halo_plan(), buffers=(Buffer("x", 96, -1, 0), Buffer("y", 100, 0, 1))), "'y' ends at byte 144"),
])
def test_what_does_not_fit_is_named(plan: Plan, message: str) -> None:
    assert verify(PLAN) is PLAN
    with pytest.raises(PlanCorruptError, match=message):
        Engine(plan)
