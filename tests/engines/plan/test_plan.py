"""A plan with contradictions is refused before it runs."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infer_server.engines.errors import PlanCorruptError
from infer_server.engines.ir.graph import QParams
from infer_server.engines.plan.plan import Buffer, Fallback, Fill, ItemMajorRun, Operand, Plan, TensorView
from infer_server.engines.plan.verification import verify
from infer_server.engines.runtime.engine import Engine
from tests.engines.tiny import halo_plan, mix_plan


def with_operand(plan: Plan, operand: Operand) -> Plan:
    step = plan.machine.steps[-1]
    return plan.with_machine(steps=(*plan.machine.steps[:-1], replace(step, operands=(*step.operands[:-1], operand))))


def with_step(**changes: Any) -> Plan:
    return PLAN.with_machine(steps=(replace(PLAN.machine.steps[0], **changes), *PLAN.machine.steps[1:]))


def with_buffer(**changes: Any) -> Plan:
    return PLAN.with_machine(buffers=(replace(PLAN.machine.buffers[0], **changes), *PLAN.machine.buffers[1:]))


def with_input(**changes: Any) -> Plan:
    return replace(PLAN, inputs=(replace(PLAN.inputs[0], **changes),))


def with_input_view(**changes: Any) -> Plan:
    return PLAN.with_machine(inputs=(replace(PLAN.machine.inputs[0], **changes),))


def with_fallback(inputs: tuple[TensorView | str, ...], shape: tuple[int, ...] = (6, 10),
                  constant_quant: tuple[None, ...] = ()) -> Plan:
    view = replace(PLAN.machine.outputs[0], buffer=1, shape=shape)
    return with_step(symbol="", operands=(), reads=(), writes=(),
                     fallback=Fallback({}, inputs, (view,), constant_quant))


PLAN = mix_plan([(0, 0), (1, 0), (2, 2)], [3])
FILL = Fill(TensorView("y", "int32", (2, 6), 1, 0, (24, 4), 48), -7, ((0, 0), (1, 1)))


@pytest.mark.parametrize(("plan", "message"), [
    (with_operand(PLAN, Operand(9)), "uses buffer 9, of 4"),
    (with_operand(PLAN, Operand(1)), "buffer 't1', which is alive in steps 0 to 1"),
    (with_operand(PLAN, Operand(3, 10**6)), "operand at byte 1000000"),
    (with_operand(PLAN, Operand(None, 64)), "operand at byte 64 of 0"),
    (with_step(depends=(0,)), r"'mix_0' depends on steps \[0\]"),
    (replace(PLAN, max_batch=5), "'t0' ends at byte 1200 of buffer 't0', which has 960"),
    (halo_plan().with_machine(buffers=(Buffer("x", 96, -1, 0), Buffer("y", 100, 0, 1))), "'y' ends at byte 144"),
    (replace(PLAN, max_batch=-1), "batches of up to -1"),
    (replace(PLAN, max_batch=0), "'x' .* has no batch on axis 0"),
    (PLAN.with_machine(cpu={"features": 5}), "cpu features 5"),
    (replace(PLAN, metadata={"threads": "two"}), "built for 'two' threads"),
    (with_buffer(bytes=-1), "'t0' has -1 bytes"),
    (with_buffer(bytes=1 << 62), "more bytes than a process"),
    (PLAN.with_machine(item_major=(ItemMajorRun(0, 1), ItemMajorRun(0, 2))), "steps 0 to 1 are to run item by item"),
    (PLAN.with_machine(item_major=(ItemMajorRun(2, 9),)), "steps 2 to 8 are to run item by item"),
    (replace(PLAN.with_machine(inputs=PLAN.machine.inputs * 2), inputs=PLAN.inputs * 2), "two inputs of one name"),
    (with_input(shape=("batch", 6)), r"'x' \['batch', 6\] lies as \[6, 10\]"),
    (with_input(shape=(4, 6, 10)), "has no batch on axis 0"),
    (with_input(dtype="int16"), "'x' is int16, but stored as int32"),
    (with_input_view(dtype="int64x"), "'t0' has dtype 'int64x'"),
    (with_input_view(dtype="object"), "'t0' has dtype 'object'"),
    (with_input_view(dtype="<i4"), "'t0' has dtype '<i4'"),
    (with_input_view(strides=(40,)), r"'t0' has extents \[6, 10\] and strides \[40\]"),
    (with_input_view(strides=(-40, 4)), r"strides \[-40, 4\]"),
    (with_input_view(shape=(6, -10)), r"extents \[6, -10\]"),
    (with_input_view(offset=-4), "ends at byte 956 of buffer"),
    (with_input_view(item_stride=0), "items 0 bytes apart"),
    (with_input_view(batch_axis=3), "its batch on axis 3"),
    (with_input_view(buffer=7), "'t0' lies in buffer 7, of 4"),
    (with_input_view(quant=QParams((0.5,), (0,), "uint8")), "is int32, but quantised to uint8"),
    (halo_plan().with_machine(fills=(replace(FILL, value=1e10),)), "'y' of int32 is filled with"),
    (halo_plan().with_machine(fills=(replace(FILL, halo=((0, 0),)),)), r"'y' \[2, 6\] has cells"),
    (with_step(symbol=""), "has neither a kernel nor a fallback"),
    (with_step(rows_per_item=-1), "a grid of -1 or 0 rows"),
    (with_step(row_step=0), "rows by 0"),
    (with_step(columns=-2), "and -2 columns"),
    (with_step(reads=(replace(PLAN.machine.steps[0].reads[0], period=0),)), "touches bytes 0 to 240 of buffer 0"),
    (with_step(writes=(replace(PLAN.machine.steps[0].writes[0], stride=-8),)), "then -8 further"),
    (with_fallback(("nothing",)), "reads 'nothing', which is none of the constants"),
    (with_fallback((), shape=(6, 11)), "ends at byte 964 of buffer 't1'"),
    (with_fallback(("w",), constant_quant=(None,) * 3), "says how 3 are stored"),
])
def test_what_does_not_fit_is_named(plan: Plan, message: str) -> None:
    assert verify(PLAN) is PLAN
    with pytest.raises(PlanCorruptError, match=message):
        Engine(plan)
