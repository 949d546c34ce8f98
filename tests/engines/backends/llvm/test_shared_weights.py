"""Weights that several nodes share are stored, packed and expanded once for each layout."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from infer_server.calibration.workflow import Calibration
from infer_server.engines import build_engine
from infer_server.engines.backends.llvm.constants import TAIL, PackedConstants
from infer_server.engines.backends.llvm.tuning.candidates import Candidate
from infer_server.engines.backends.llvm.tuning.layouts import layout, with_common_layouts
from infer_server.engines.ir.content import EqualArrays
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.open_models import node, random
from tests.engines.compiler.small_models import small_model

WIDTH = 48
COUNT = 6


def chain(op: str, weights: dict[str, np.ndarray[Any, Any]], names: Iterator[str], **attrs: Any) -> Any:
    """Return a model of COUNT products in sequence."""
    nodes, x = [], "x"
    for i in range(COUNT):
        y = "y" if i + 1 == COUNT else f"t{i}"
        nodes += [node(op, f"{x} {next(names)}", f"p{i}", **attrs), node("Tanh", f"p{i}", y)]
        x = y
    return small_model(nodes, {"x": ["N", WIDTH]}, ["y"], weights)


def packed_bytes(plan: Plan) -> int:
    return len(plan.machine.constants) - TAIL


def built(model: Any, **options: Any) -> Plan:
    return build_engine(model, cache=False, timing=False, target="avx2", **options).plan


def repeated(*names: str) -> Iterator[str]:
    return iter(names * COUNT)


WEIGHT = random(WIDTH, WIDTH) / 8


@pytest.mark.parametrize("model", [
    chain("MatMul", {"w": WEIGHT}, repeated("w")),
    chain("Gemm", {"w": WEIGHT}, repeated("w"), transB=1),
    chain("MatMul", {f"w{i}": WEIGHT.copy() for i in range(COUNT)}, iter([f"w{i}" for i in range(COUNT)])),
])
def test_a_plan_holds_a_weight_that_several_products_share_once(model: Any) -> None:
    plan = built(model)
    assert packed_bytes(plan) < 1.5 * WEIGHT.nbytes
    assert sum(array.nbytes for array in plan.weights.values()) < 1.5 * WEIGHT.nbytes
    x = random(3, WIDTH)
    np.testing.assert_allclose(Engine(plan).run({"x": x})["y"], _reference(x, model), atol=1e-5)


def _reference(x: np.ndarray[Any, Any], model: Any) -> np.ndarray[Any, Any]:
    turned = any(one.op_type == "Gemm" for one in model.graph.node)
    for _ in range(COUNT):
        x = np.tanh(x @ (WEIGHT.T if turned else WEIGHT))
    return x


def test_weights_that_differ_in_one_element_are_not_taken_for_equal() -> None:
    weights = {f"w{i}": WEIGHT.copy() for i in range(COUNT)}
    weights["w3"][7, 5] += 1
    plan = built(chain("MatMul", weights, iter(weights)))
    assert 2 * WEIGHT.nbytes <= packed_bytes(plan) < 2.5 * WEIGHT.nbytes


def test_equal_int8_weights_are_stored_once() -> None:
    model = chain("MatMul", {"w": WEIGHT}, repeated("w"))
    plan = built(model, precision="int8", calibration=Calibration([{"x": random(8, WIDTH)}]))
    assert sum(step.precision == "int8" for step in plan.machine.steps) >= COUNT - 1
    assert packed_bytes(plan) < COUNT * WEIGHT.size, "less than the copies; most of it are scales for each step"


def head(sizes: tuple[int, ...], channels: int = 16) -> tuple[Any, int]:
    """Return a model whose convolution is shared by images of several sizes, and the bytes of its weights."""
    weights = {"w": random(channels, channels, 3, 3), "b": random(channels)}
    nodes = [node("Conv", f"x{i} w b", f"y{i}", pads=[1, 1, 1, 1]) for i in range(len(sizes))]
    inputs = {f"x{i}": ["N", channels, size, size] for i, size in enumerate(sizes)}
    return small_model(nodes, inputs, [f"y{i}" for i in range(len(sizes))], weights), weights["w"].nbytes


def test_a_head_on_images_of_five_sizes_has_its_weights_in_two_layouts_at_most() -> None:
    """One layout is Winograd's, the other is for sizes at which Winograd is too slow."""
    model, nbytes = head((64, 32, 16, 8, 4))
    machine = built(model).machine
    assert len(machine.constants) - TAIL < 2.5 * nbytes
    assert len(machine.expanded) <= 1


def test_each_layout_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, pack = [], PackedConstants._pack
    monkeypatch.setattr(PackedConstants, "_pack",
                        lambda self, call, choice: packed.append(call) or pack(self, call, choice))
    built(chain("MatMul", {"w": WEIGHT}, repeated("w")))
    assert len(packed) == 1


def test_an_lstm_that_several_inputs_share_has_its_weights_once() -> None:
    hidden = 32
    weights = {"w": random(1, 4 * hidden, hidden), "r": random(1, 4 * hidden, hidden)}
    nodes = [node("LSTM", f"x{i} w r", f" h{i}", hidden_size=hidden) for i in range(3)]
    for one in nodes:
        one.output[:] = ["", one.output[-1]]
    inputs = {f"x{i}": [steps, 1, hidden] for i, steps in enumerate((5, 9, 4))}
    plan = built(small_model(nodes, inputs, ["h0", "h1", "h2"], weights))
    nbytes = sum(array.nbytes for array in weights.values())
    assert packed_bytes(plan) < 2 * nbytes


def test_a_common_layout_is_taken_within_the_tolerance_only() -> None:
    """Problems "a" and "b" share weights; a layout is a kernel's packing."""
    class Kernel:
        def packing(self, tactic: Any) -> Any:
            return tactic[0]

        def packing_anywhere(self, tactic: Any) -> None:
            return None

    def one(*tactic: Any) -> Any:
        return Candidate(kernel, tactic)    # type: ignore[arg-type]    # what of a kernel is asked here

    kernel = Kernel()
    wide, narrow, other = one("wide", 1), one("narrow", 2), one("narrow", 3)
    taken: Any = {"a": wide, "b": narrow, "c": other}
    scores: Any = {"a": {wide: 10.0, narrow: 10.2, other: 10.1}, "b": {narrow: 5.0, wide: 6.0}, "c": {other: 1.0}}
    groups: Any = [("a", "b")]
    assert with_common_layouts(taken, groups, scores, 1.03) == {"a": other, "b": narrow, "c": other}
    assert with_common_layouts(taken, groups, scores, 1.005) == taken
    assert with_common_layouts(taken, [], scores, 1.03) == taken
    assert layout(narrow) == layout(other) != layout(wide)


def test_equal_arrays_have_equal_numbers() -> None:
    numbers, zeros = EqualArrays(), np.zeros((40, 50), np.float32)
    other = zeros.copy()
    other[3, 7] = 1
    arrays = [zeros, zeros.copy(), other, zeros.reshape(50, 40), zeros.astype(np.int32), zeros, other.copy(), WEIGHT]
    assert [numbers.number(array) for array in arrays] == [0, 0, 1, 2, 3, 0, 1, 4]
    assert numbers.number(np.zeros((0, 3), np.float32)) == numbers.number(np.zeros((0, 3), np.float32)) == 5
