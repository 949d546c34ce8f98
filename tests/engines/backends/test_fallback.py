"""Fallback steps among native ones: what they read and store."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer_server.engines.backends.fallback import to_real, to_stored
from infer_server.engines.errors import PlanCorruptError, PlanError
from infer_server.engines.ir.graph import Array, Node, QParams
from infer_server.engines.ir.serialize import node_to_json
from infer_server.engines.loading import load_engine
from infer_server.engines.plan.file import write_plan
from infer_server.engines.plan.plan import Buffer, Fallback, IoTensor, MachinePart, Plan, Step, TensorView
from infer_server.engines.runtime.engine import Engine
from tests.engines.tiny import executor, mix_plan, mixed, with_weights

pytestmark = pytest.mark.usefixtures("eager")


def negated_plan() -> Plan:
    """Return t1 = mix(x, x); t2 = -t1 on the reference; t3 = mix(t2, t1)."""
    plan = mix_plan([(0, 0), (1, 1), (2, 1)], [2, 3])
    views = [TensorView(f"t{i}", "int32", (6, 10), i, 0, (40, 4), 240) for i in range(3)]
    fallback = Fallback(node_to_json(Node("Neg", ("t1",), ("t2",))), (views[1],), (views[2],))
    step = Step("", (), rows_per_item=1, depends=(0,), fallback=fallback, name="neg", reason="a test")
    return plan.with_machine(steps=(plan.machine.steps[0], step, plan.machine.steps[2]))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_fallback_runs_between_native_steps(tmp_path: Path, threads: int) -> None:
    write_plan(negated_plan(), tmp_path / "m.plan")
    engine = load_engine(tmp_path / "m.plan", threads)
    for items in (1, 3, 6):
        x = np.random.default_rng(items).integers(-100, 100, (items, 6, 10), np.int32)
        got = engine.run({"x": x})
        np.testing.assert_array_equal(got["t2"], -mixed(x, x))
        np.testing.assert_array_equal(got["t3"], mixed(-mixed(x, x), mixed(x, x)))
    names = [step.name for step, _ in engine.create_context().profile()]
    assert names == ["mix_0", "neg", "mix_2"]
    engine.close()


def test_a_fallback_computes_with_what_quantised_tensors_and_constants_mean() -> None:
    quant_x, quant_w, quant_y = (QParams((s,), (z,), d) for s, z, d in
                                 ((0.5, 128, "uint8"), (0.25, 0, "int8"), (1.0, 10, "uint8")))
    x = TensorView("x", "uint8", (3,), 0, 0, (1,), 3, quant=quant_x)
    y = TensorView("y", "uint8", (2,), 1, 0, (1,), 2, quant=quant_y)
    w = np.array([[4, -4], [8, 0], [0, 12]], np.int8)
    fallback = Fallback(node_to_json(Node("MatMul", ("x", "w"), ("y",))), (x, "w"), (y,), (None, quant_w))
    machine = MachinePart("llvm", "", (x,), (y,), (Buffer("x", 6, -1, 0), Buffer("y", 4, 0, 1)),
                          (Step("", (), 1, fallback=fallback),), code=(executor(),))
    tensors = ((IoTensor("x", "uint8", ("batch", 3)),), (IoTensor("y", "uint8", ("batch", 2)),))
    plan = with_weights(Plan("m", "int8", 2, *tensors, machine), {"w": w})
    stored = np.array([[130, 128, 140], [0, 255, 1]], np.uint8)
    real = (stored.astype(float) - 128) * 0.5 @ (w * 0.25)
    want = np.clip(np.rint(real) + 10, 0, 255)
    assert want.min() == 0 and want.max() > 50
    np.testing.assert_array_equal(Engine(plan).run({"x": stored})["y"], want)


def test_a_fallback_that_cannot_be_read_is_found_at_load() -> None:
    plan = negated_plan()
    fallback = plan.machine.steps[1].fallback
    assert fallback is not None
    broken = replace(plan.machine.steps[1], fallback=replace(fallback, node={"op": "Neg"}))
    with pytest.raises(PlanCorruptError, match="a node that cannot be read"):
        Engine(plan.with_machine(steps=(plan.machine.steps[0], broken, plan.machine.steps[2])))


def failing_plan(node: Node, inputs: tuple[TensorView | str, ...], **changes: Any) -> Plan:
    """Return negated_plan() with another node, with constants w [6, 10] and s []."""
    plan = negated_plan()
    fallback = plan.machine.steps[1].fallback
    assert fallback is not None
    step = replace(plan.machine.steps[1], fallback=replace(fallback, node=node_to_json(node), inputs=inputs, **changes))
    plan = plan.with_machine(steps=(plan.machine.steps[0], step, plan.machine.steps[2]))
    return with_weights(plan, {"w": np.ones((6, 10), np.int8), "s": np.array(1, np.int8)})


@pytest.mark.parametrize(("node", "inputs"), [
    (Node("Nonsense", ("t1",), ("t2",)), ("w",)),
    (Node("MatMul", ("w", "w"), ("t2",)), ("w", "w")),              # the extents of w and w do not match
    (Node("Neg", ("s",), ("t2",)), ("s",)),                         # the scalar result would be broadcast
    (Node("Neg", ("t1",), ("t2", "t3")), ("w",)),
    (Node("Transpose", ("w",), ("t2",), {"perm": (5, 0)}), ("w",)),
])
def test_a_fallback_that_cannot_run_or_gives_other_extents_is_a_plan_error(node: Node, inputs: tuple[str, ...]) -> None:
    engine = Engine(failing_plan(node, inputs))
    with pytest.raises(PlanError, match=f"the reference cannot run {node.op} 't2' on these values"):
        engine.run({"x": np.zeros((1, 6, 10), np.int32)})


@pytest.mark.parametrize("quant", [QParams((0.5,) * 3, (0,) * 3, "int8", axis=0),
                                   QParams((0.5,), (0,), "int8", axis=7)])
def test_a_constant_that_is_not_quantised_as_the_plan_says_is_found_at_load(quant: QParams) -> None:
    with pytest.raises(PlanCorruptError, match="the constant 'w' of Neg"):
        Engine(failing_plan(Node("Neg", ("w",), ("t2",), name="neg"), ("w",), constant_quant=(quant,)))


@pytest.mark.parametrize(("dtype", "quant", "stored", "real"), [
    ("uint8", QParams((0.5,), (128,), "uint8"), [[0, 128, 255], [127, 129, 1]], [[-64, 0, 63.5], [-0.5, 0.5, -63.5]]),
    ("int8", QParams((1.0, 2.0, 4.0), (0, 0, 1), "int8", axis=1), [[1, 1, 1], [-1, -1, -1]], [[1, 2, 0], [-1, -2, -8]]),
    ("bfloat16", None, [[0x3F80, 0xC000, 0], [0x7F80, 0x4049, 1]], [[1, -2, 0], [np.inf, 3.140625, 2.0**-133]]),
    ("int64", None, [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
], ids=["uint8", "int8 per channel", "bfloat16", "int64"])
def test_what_is_stored_is_a_real_number_and_back(dtype: str, quant: QParams | None, stored: list[list[int]],
                                                  real: list[list[float]]) -> None:
    memory = np.array(stored, "uint16" if dtype == "bfloat16" else dtype)
    values = to_real(memory, quant, dtype)
    np.testing.assert_array_equal(values, np.array(real))
    assert not np.shares_memory(values, memory)
    np.testing.assert_array_equal(to_stored(values, quant, dtype), memory)


def test_storing_rounds_half_to_even_and_saturates() -> None:
    def stored(values: list[float], dtype: str, quant: QParams | None = None) -> list[int]:
        array: Array = np.array(values, np.float32)
        return list(map(int, to_stored(array, quant, dtype)))

    assert stored([0.25, 0.75, 1e9, -1e9], "uint8", QParams((0.5,), (10,), "uint8")) == [10, 12, 255, 0]
    assert stored([1.00390625, 1.01171875, float("nan")], "bfloat16") == [0x3F80, 0x3F82, 0x7FC0]
