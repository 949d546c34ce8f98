"""A symbolic plan gives for any extents the plan that a build for these extents gives."""
from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from infer_server.engines import build_engine
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.compiler import specialise, symbolic
from infer_server.engines.compiler.agreement import agree
from infer_server.engines.compiler.engine_cache import EngineCache
from infer_server.engines.compiler.specialise import Specialiser
from infer_server.engines.compiler.symbolic import SymbolicPlans, stored_symbolic_plans
from infer_server.engines.errors import ConfigError, ModelError
from infer_server.engines.ir.graph import Array
from infer_server.engines.machine import object_cache
from infer_server.engines.plan import arena
from infer_server.engines.plan.file import read_plan
from infer_server.engines.plan.plan import Operand, Plan
from infer_server.engines.runtime.specialisation import Specialisation
from tests.engines.compiler.open_models import (
    attention_net,
    growing_net,
    node,
    pairs_net,
    picture_net,
    random,
    recurrent_net,
    spans_net,
)
from tests.engines.compiler.small_models import small_model


def mixer() -> onnx.ModelProto:
    """Return a mixer whose position table depends on the number of rows."""
    return small_model(
        [node("Shape", "x", "s"), node("Gather", "s one", "n"), node("Range", "zero n one", "at"),
         node("Cast", "at", "place", to=1), node("Unsqueeze", "place last", "column"), node("Mul", "x w", "scaled"),
         node("Add", "scaled column", "h"), node("MatMul", "h v", "g"), node("Relu", "g", "r"),
         node("ReduceMean", "r middle", "y", keepdims=0)], {"x": ["N", "T", 8]}, ["y"],
        {"w": random(8), "v": random(8, 24), "zero": np.array(0), "one": np.array(1), "last": np.array([1]),
         "middle": np.array([1])})


def causal() -> onnx.ModelProto:
    """Return causal attention whose mask is computed from the number of rows."""
    return small_model(
        [node("Shape", "x", "s"), node("Gather", "s one", "n"), node("Range", "zero n one", "at"),
         node("Unsqueeze", "at last", "column"), node("Unsqueeze", "at first", "row"),
         node("LessOrEqual", "row column", "seen"), node("MatMul", "x w", "q"),
         node("Transpose", "x", "k", perm=[0, 2, 1]), node("MatMul", "q k", "scores"),
         node("Where", "seen scores hidden", "masked"), node("Softmax", "masked", "p", axis=-1),
         node("MatMul", "p x", "y")], {"x": ["N", "T", 16]}, ["y"],
        {"w": random(16, 16), "zero": np.array(0), "one": np.array(1), "first": np.array([0]), "last": np.array([1]),
         "hidden": np.array(-np.inf, np.float32)})


MODELS = {
    "a causal mask": (causal(), [{"T": n} for n in (20, 21, 30, 47)]),
    "a table of places": (mixer(), [{"T": n} for n in (50, 51, 77)]),
    "tokens": (attention_net(), [{"T": n} for n in (40, 41, 100)]),
    "a cache that grows": (growing_net(), [{"P": n} for n in (5, 6, 7, 31, 32, 33, 200)]),
    "spans": (spans_net(), [{"N": n, "E": n % 7 + 2} for n in (104, 168, 232)]),
    "steps": (recurrent_net(), [{"T": n} for n in (20, 21)]),
    "two extents": (pairs_net(), [{"rows": 20, "columns": n} for n in (40, 56, 72)]),
    "pictures": (picture_net(), [{"H": 64, "W": 96}, {"H": 128, "W": 96}])}


def built(model: onnx.ModelProto) -> Plan:
    plan: Plan = build_engine(model, cache=False, timing=False, symbolic_plans=False).plan
    return plan


def without_symbolic_plans(plan: Plan) -> Specialiser:
    specialiser = Specialiser(plan)
    specialiser._symbolic_plans = SymbolicPlans(lambda extents: None)
    return specialiser


def traced_alone(specialiser: Specialiser, extents: dict[str, int]) -> Plan:
    """Return the plan of a trace without symbolic extents, with the dynamic kernels compiled so far."""
    plan = specialiser._traced(extents)
    assert plan is not None
    return dataclasses.replace(plan, extents=extents)


def feeds(plan: Plan, extents: dict[str, int]) -> dict[str, Array]:
    assert plan.open is not None
    made = {io.name: random(*io.shape_of(2, extents)) for io in plan.open.inputs}
    return {name: array - array.min() if name == "mask" else array for name, array in made.items()}


def differences(a: Any, b: Any, path: str = "plan") -> list[str]:
    """Return the differences of two plans, except for the positions of constants, which are never shared."""
    if isinstance(a, Operand) and a.constant and b.constant:
        return []
    if dataclasses.is_dataclass(a) and dataclasses.is_dataclass(b) and dataclasses.fields(a) == dataclasses.fields(b):
        skipped = ("constants", "expanded", "weight_offsets", "weights", "of_symbolic")
        return [one for field in dataclasses.fields(a) if field.name not in skipped
                for one in differences(getattr(a, field.name), getattr(b, field.name), f"{path}.{field.name}")]
    if isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
        return [one for i, (x, y) in enumerate(zip(a, b, strict=True)) for one in differences(x, y, f"{path}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} and {b!r}"]


@pytest.mark.parametrize("case", MODELS)
def test_the_plan_of_a_symbolic_plan_is_the_one_that_is_made_for_its_shape_alone(case: str) -> None:
    model, shapes = MODELS[case]
    plan = built(model)
    first, symbolics = Specialisation(plan, 1), Specialiser(plan)
    traces = 0
    for extents in shapes:
        before = symbolics._symbolic_plans._credit
        ours, theirs = symbolics.symbolic(extents), traced_alone(symbolics, extents)
        traces += symbolics._symbolic_plans._credit < before
        assert not differences(ours, theirs)
        made, expected = (Specialisation(one, 1, None, first).run(feeds(plan, extents)) for one in (ours, theirs))
        for name, array in expected.items():
            np.testing.assert_array_equal(made[name], array)
    assert len(symbolics._symbolic_plans._known) == traces < len(shapes)


@pytest.mark.parametrize("case", MODELS)
def test_tables_of_a_symbolic_plan_are_those_of_its_plan(case: str) -> None:
    model, shapes = MODELS[case]
    plan = built(model)
    first, specialiser, compared = LoadedPlan(plan), Specialiser(plan), 0
    for extents in (*shapes, *shapes):
        made = specialiser.symbolic(extents)
        if not made.of_symbolic:
            continue
        ours, theirs = (LoadedPlan(one, base=first) for one in (made, made.with_machine()))
        assert ours.program is LoadedPlan(made, base=first).program is not theirs.program
        for name in ("operand_offsets", "sizes"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        np.testing.assert_array_equal(ours.steps[:, 1:], theirs.steps[:, 1:])
        assert set(ours.zero_copy.operands) <= set(theirs.zero_copy.operands)
        assert [part.__dict__ for part in ours.segments] == [part.__dict__ for part in theirs.segments]
        compared += 1
    assert compared


def test_a_shape_for_which_the_guards_do_not_hold_gets_a_symbolic_plan_of_its_own() -> None:
    symbolics = Specialiser(built(attention_net()))._symbolic_plans
    for length, count in ((40, 1), (41, 1), (3, 2), (4, 2), (42, 2)):
        assert symbolics.plan({"T": length}) is not None
        assert len(symbolics._known) == count


def grouped_queries() -> onnx.ModelProto:
    """Return a decoder step with a growing past, grouped queries and rotary embeddings."""
    angles = np.arange(300)[:, None] * 0.3 ** np.arange(8)
    model = small_model(
        [node("ReduceSum", "mask one", "sum", keepdims=0), node("Sub", "sum one", "less"),
         node("Cast", "less", "lengths", to=6), node("Shape", "mask", "s"), node("Gather", "s one", "n"),
         node("Cast", "n", "total", to=6), node("MatMul", "x w", "q"), node("MatMul", "x v", "kv"),
         helper.make_node("GroupQueryAttention", ["q", "kv", "kv", "past.k", "past.v", "lengths", "total", "cos",
                                                   "sin"],
                          ["y", "present.k", "present.v"], domain="com.microsoft", num_heads=4, kv_num_heads=2,
                          do_rotary=1)],
        {"x": ["B", "S", 16], "mask": ["B", "T"], "past.k": ["B", 2, "P", 16], "past.v": ["B", 2, "P", 16]},
        ["y", "present.k", "present.v"],
        {"w": random(16, 64), "v": random(16, 32), "one": np.array([1]), "cos": np.cos(angles).astype(np.float32),
         "sin": np.sin(angles).astype(np.float32)})
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT64
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def test_a_decoder_with_grouped_queries_has_a_symbolic_plan_of_its_steps_and_one_of_its_prompts(
        caplog: pytest.LogCaptureFixture) -> None:
    model = grouped_queries()
    plan = built(model)
    specialiser, first = Specialiser(plan), Specialisation(plan, 1)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    with caplog.at_level(logging.INFO, symbolic.__name__):
        for new, past in ((1, 8), (1, 9), (1, 10), (1, 63), (7, 0), (9, 0), (1, 100), (20, 0), (1, 101)):
            extents = {"S": new, "P": past, "T": new + past}
            inputs = {"x": random(1, new, 16), "mask": np.ones((1, new + past), np.int64),
                      "past.k": random(1, 2, past, 16), "past.v": random(1, 2, past, 16)}
            made = Specialisation(specialiser.symbolic(extents), 1, None, first).run(inputs)
            for io, expected in zip(session.get_outputs(), session.run(None, inputs), strict=True):
                np.testing.assert_allclose(made[io.name], expected, rtol=1e-4, atol=1e-5)
    assert not [record.message for record in caplog.records if "there is no symbolic plan" in record.message]
    assert len(specialiser._symbolic_plans._known) <= 5


def test_what_is_for_one_shape_only_is_made_for_it_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Tracing stops at sizes computed in floats, and is not tried again after several failures."""
    model = small_model(
        [node("Shape", "x", "s"), node("Cast", "s", "floats", to=1), node("Mul", "floats factor", "larger"),
         node("Cast", "larger", "size", to=7), node("Resize", "x - - size", "y", mode="nearest")],
        {"x": ["N", 1, "H", 8]}, ["y"], {"factor": np.array([1, 1, 1.5, 1], np.float32)})
    plan = built(model)
    symbolics = Specialiser(plan)
    with caplog.at_level(logging.INFO, symbolic.__name__):
        for height in range(20, 24 + symbolic.CREDIT):
            ours = symbolics.symbolic({"H": height})
            assert ours.outputs[0].shape[2] == height * 3 // 2
    refused = [record for record in caplog.records if "there is no symbolic plan for {'H'" in record.message]
    assert len(refused) == symbolic.CREDIT and not symbolics._symbolic_plans._known


def test_values_of_inputs_that_decide_have_symbolic_plans_of_their_own() -> None:
    model = small_model(
        [node("Concat", "whole count", "shape", axis=0), node("Expand", "x shape", "y")],
        {"x": [2, "T", 1], "count": [1]}, ["y"], {"whole": np.array([1, 1])})
    model.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.INT64
    plan = built(model)
    assert plan.open is not None and plan.open.deciding == ("count",)
    symbolics = Specialiser(plan)
    for length, count in ((20, 3), (21, 3), (20, 5), (30, 5)):
        made = symbolics.symbolic({"T": length, "value of count": (count,)})
        assert made.outputs[0].shape == (2, length, count)
    fixed = [one.fixed for one in symbolics._symbolic_plans._known]
    assert fixed == [{"value of count": (3,)}, {"value of count": (5,)}]


def test_more_than_there_is_memory_for_is_refused_of_a_symbolic_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    symbolics = Specialiser(built(attention_net()))
    symbolics.symbolic({"T": 40})
    for module in (arena, symbolic):
        monkeypatch.setattr(module, "too_large", lambda size: "all of it" if size > 1 << 20 else "")
    assert symbolics.symbolic({"T": 41})
    with pytest.raises(ConfigError, match="all of it"):
        symbolics.symbolic({"T": 4000})


def test_a_small_shape_is_served_though_there_is_no_memory_for_so_many_items_of_the_usual_one(
        monkeypatch: pytest.MonkeyPatch) -> None:
    alone = without_symbolic_plans(built(attention_net()))
    monkeypatch.setattr(arena, "too_large", lambda size: "all of it" if size > 100_000 else "")
    assert alone.symbolic({"T": 3})


def test_a_constant_that_cannot_be_computed_leaves_the_word_to_the_model() -> None:
    """Longer inputs than the table's 512 rows are refused by the model itself."""
    symbolics = Specialiser(built(growing_net()))
    assert symbolics.symbolic({"P": 500}) and symbolics.symbolic({"P": 511})
    with pytest.raises(ModelError, match="the indices are in 512"):
        symbolics.symbolic({"P": 512})


def test_the_symbolic_plan_of_least_use_goes_first() -> None:
    plan = built(mixer())
    made: list[Any] = []

    def trace(extents: Any) -> Plan:
        made.append(extents["T"])
        assert extents["T"] == int(str(made[-1].hint))         # a guard that holds for one number only
        return plan

    symbolics = SymbolicPlans(trace)
    symbolics._credit = 2 * symbolic.MOST
    for length in range(1, symbolic.MOST + 2):
        assert symbolics.plan({"T": length}) is not None
    assert len(symbolics._known) == symbolic.MOST
    assert symbolics.plan({"T": 2}) is not None and len(made) == symbolic.MOST + 1
    assert symbolics.plan({"T": 1}) is not None and len(made) == symbolic.MOST + 2


def test_indices_that_follow_from_extents_are_checked_where_nothing_is_computed_of_them() -> None:
    """The indices select rows of an input with 64 rows."""
    every = small_model(
        [node("Shape", "x", "s"), node("Gather", "s one", "n"), node("Range", "zero n one", "at"),
         node("Gather", "rows at", "g"), node("Relu", "g", "y")],
        {"x": [2, "T"], "rows": [64, 4]}, ["y"], {"zero": np.array(0), "one": np.array(1)})
    last = small_model(
        [node("Shape", "x", "s"), node("Gather", "s one", "n"), node("Sub", "n one", "at"),
         node("Gather", "rows at", "g"), node("Relu", "g", "y")],
        {"x": [2, "T"], "rows": [64, 4]}, ["y"], {"one": np.array(1)})
    for model in (every, last):
        _checks_rows(built(model))


def _checks_rows(plan: Plan) -> None:
    (name,) = plan.extents
    symbolics = Specialiser(plan)
    assert symbolics.symbolic({name: 20}) and symbolics.symbolic({name: 64})
    assert len(symbolics._symbolic_plans._known) == 1
    with pytest.raises(ModelError, match="the indices are in .*64"):
        symbolics.symbolic({name: 65})


FACTORS: dict[str, tuple[str, int, Any]] = {
    "Mul": ("Div", 20, lambda x, n: x * np.float32(n / 20)), "Add": ("Sub", 20, lambda x, n: x + np.float32(n - 20)),
    "Pow": ("Div", 10, lambda x, n: np.abs(x) ** np.float32(n / 10))}


@pytest.mark.parametrize("op", FACTORS)
def test_a_number_that_changes_nothing_where_it_was_traced_does_elsewhere(op: str) -> None:
    """The factor is 1, the summand 0 and the exponent 2 at 20 rows."""
    made_by, by, expected = FACTORS[op]
    model = small_model(
        [node("Shape", "x", "s"), node("Gather", "s one", "n"), node("Cast", "n", "rows", to=1),
         node(made_by, "rows by", "number"), node("Abs", "x", "positive"),
         node(op, "positive number" if op == "Pow" else "x number", "y")], {"x": ["N", "T", 8]}, ["y"],
        {"one": np.array(1), "by": np.array(by, np.float32)})
    plan = built(model)
    first, symbolics = Specialisation(plan, 1), Specialiser(plan)
    symbolics._symbolic_plans._right = lambda plan, extents: True
    for rows in (20, 30, 7, 40):
        feed = feeds(plan, {"T": rows})
        found = Specialisation(symbolics.symbolic({"T": rows}), 1, None, first).run(feed)["y"]
        np.testing.assert_allclose(found, expected(feed["x"], rows), rtol=1e-5)


def test_a_small_integer_goes_round_where_its_dtype_ends() -> None:
    model = small_model(
        [node("Shape", "x", "s"), node("Gather", "s one", "n"), node("Cast", "n", "small", to=2),
         node("Cast", "small", "large", to=7), node("Cast", "large", "number", to=1), node("Add", "x number", "y")],
        {"x": ["N", "T", 8]}, ["y"], {"one": np.array(1)})
    plan = built(model)
    first, symbolics = Specialisation(plan, 1), Specialiser(plan)
    for rows in (40, 41, 255, 256, 300):
        feed = feeds(plan, {"T": rows})
        found = Specialisation(symbolics.symbolic({"T": rows}), 1, None, first).run(feed)["y"]
        np.testing.assert_allclose(found, feed["x"] + rows % 256, rtol=1e-5)


def test_a_model_with_a_symbolic_plan_that_is_wrong_has_none(monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    plan = built(attention_net())
    asked: list[dict[str, Any]] = []

    def agreed(ours: Plan, theirs: Plan, *_: object) -> bool:
        asked.append(dict(ours.extents))
        return False

    monkeypatch.setattr(specialise, "agree", agreed)
    symbolics = Specialiser(plan)
    for length in (40, 40, 41, 100, 42):
        assert not differences(symbolics.symbolic({"T": length}), traced_alone(symbolics, {"T": length}))
    assert asked == [{"T": 41}] and not symbolics._symbolic_plans._known
    assert "what was found for other extents does not hold for {'T': 41}" in caplog.text


def test_plans_agree_that_compute_the_same_and_no_others() -> None:
    def scaled(factor: float) -> onnx.ModelProto:
        return small_model([node("Mul", "x factor", "y"), node("ArgMax", "x", "at", axis=2, keepdims=0)],
                           {"x": ["N", "T", 8]}, ["y", "at"], {"factor": np.array(factor, np.float32)})

    plan, other, third = (built(scaled(factor)) for factor in (1.5, 1.51, 1.5))
    for precision, alike in (("fp32", False), ("int8", True)):
        steps = tuple(dataclasses.replace(step, precision=precision) for step in plan.machine.steps)
        made = plan.with_machine(steps=steps)
        assert agree(made, third, Specialisation(made))
        assert agree(made, other, Specialisation(other)) == alike


def test_symbolic_plans_are_stored_for_later_processes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    build_engine(grouped_queries(), cache=False, timing=False, symbolic_plans=False).save(tmp_path / "model.plan")
    plan, cache = read_plan(tmp_path / "model.plan"), EngineCache(tmp_path / "cache")
    monkeypatch.delenv(object_cache.VARIABLE, raising=False)
    stored = stored_symbolic_plans(plan, cache)
    assert stored is not None

    def plans(*pasts: int) -> list[Plan]:
        specialiser = Specialiser(plan, cache=cache)        # as a later process makes it
        return [specialiser.symbolic({"S": 1, "P": past, "T": past + 1}) for past in pasts]

    def fail(*_: object) -> None:
        raise AssertionError("traced or compiled again")

    plans(8)
    assert [is_first for _, is_first in stored.load()] == [True]
    alone = SymbolicPlans(lambda extents: None, None, stored)
    for past in (8, 9):         # 9 would have to be compared with a plan for this shape alone
        assert bool(alone.plan({"S": 1, "P": past, "T": past + 1})) == (past == 8)
    expected = plans(9, 10, 33)
    assert [is_first for _, is_first in stored.load()] == [False]
    with monkeypatch.context() as patched:
        patched.setattr(Specialiser, "_traced", fail)
        for made, other in zip(plans(9, 10, 33), expected, strict=True):
            assert made.of_symbolic and not differences(made, other)
            assert bytes(made.machine.constants) == bytes(other.machine.constants)

    stored._cache.store(stored._key, b"no pickle")
    with caplog.at_level(logging.WARNING, symbolic.__name__):
        plans(9, 10)
    assert "stored symbolic plans cannot be read and are traced again" in caplog.text and len(stored.load()) == 1
    monkeypatch.setenv(object_cache.VARIABLE, object_cache.OFF)
    assert stored_symbolic_plans(plan, cache) is None


def test_an_engine_at_a_shape_of_a_stored_symbolic_plan_imports_no_compiler(tmp_path: Path) -> None:
    build_engine(mixer(), cache=False, timing=False, symbolic_plans=False).save(tmp_path / "model.plan")
    run = ("import sys, numpy as np; from infer_server.engines.loading import load_engine; "
           f"engine = load_engine({str(tmp_path / 'model.plan')!r}, specialise='off', cache={str(tmp_path)!r}); "
           "print([float(engine.run({'x': np.ones((1, n, 8), np.float32)})['y'].sum()) for n in (50, 51)], "
           "'llvmlite' in sys.modules, 'onnx' in sys.modules)")
    env = {name: value for name, value in os.environ.items() if name != object_cache.VARIABLE}
    first, second = (subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True,
                                    env=env).stdout for _ in range(2))
    assert first.endswith("True True\n") and second == first.replace("True True", "False False")
