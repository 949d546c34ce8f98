"""Completely masked rows of scores: the softmax of equal numbers, in every form of the mask."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.calibration.workflow import Calibration
from infer_server.engines import build_engine
from tests.engines.compiler.test_attention import FLOAT, Writer, family
from tests.zoo import run_onnx

HEADS, TOKENS, DEPTH, ITEMS = 2, 7, 8, 3
BOOL = onnx.TensorProto.BOOL

# The scores behind their mask; `hidden` is true for a score that is not seen, `bias` another mask.
FORMS: dict[str, Callable[[Writer, str, float], str]] = {
    "where(hidden, c, s)": lambda w, s, c: w("Where", "hidden", w.constant(c), s),
    "where(seen, s, c)": lambda w, s, c: w("Where", w("Not", "hidden"), s, w.constant([c])),
    "where(not not hidden, c, s)": lambda w, s, c: w("Where", w("Not", w("Not", "hidden")), w.constant(c), s),
    "where(hidden, c, s) * 2": lambda w, s, c: w("Mul", w("Where", "hidden", w.constant(c), s), w.constant(2.0)),
    "where(hidden, c, s * 0.3)": lambda w, s, c: w("Where", "hidden", w.constant(c), w("Mul", s, w.constant(0.3))),
    "where(hidden, c, s) / 100": lambda w, s, c: w("Div", w("Where", "hidden", w.constant(c), s), w.constant(100.0)),
    "s + c * hidden": lambda w, s, c: w("Add", s, w("Mul", w("Cast", "hidden", to=FLOAT), w.constant(c))),
    "where(hidden, c, s + bias)": lambda w, s, c: w("Where", "hidden", w.constant(c), w("Add", s, "bias")),
    "where(hidden, c, s) + bias": lambda w, s, c: w("Add", w("Where", "hidden", w.constant(c), s), "bias"),
    "causal, then where": lambda w, s, c: w("Where", "hidden", w.constant(c), w("Where", w.constant(
        np.triu(np.ones((TOKENS, TOKENS)), 1), bool), w.constant(c), s)),
    "where, then another number": lambda w, s, c: w("Where", w.constant(
        np.triu(np.ones((TOKENS, TOKENS)), 1), bool), w.constant(c - 3), w("Where", "hidden", w.constant(c), s)),
}
FUSED = {form for form in FORMS if form not in (
    "where(hidden, c, s) / 100", "where(hidden, c, s) + bias", "where, then another number")}


def masked_model(form: str, number: float, rows: int, mixes: bool = True) -> onnx.ModelProto:
    w = Writer()
    three = [w("Transpose", w("Reshape", w.linear("x", HEADS * DEPTH, HEADS * DEPTH), w.constant(
        [0, 0, HEADS, DEPTH], np.int64)), perm=perm) for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))]
    weights = w("Softmax", FORMS[form](w, w("MatMul", *three[:2]), number), axis=-1)
    w.nodes.append(helper.make_node("MatMul" if mixes else "Identity", [weights, three[2]][:1 + mixes], ["y"]))
    inputs = [helper.make_tensor_value_info("x", FLOAT, ["N", TOKENS, HEADS * DEPTH]),
              helper.make_tensor_value_info("hidden", BOOL, ["N", 1, rows, TOKENS]),
              helper.make_tensor_value_info("bias", FLOAT, ["N", 1, 1, TOKENS])]
    read = {name for node in w.nodes for name in node.input}
    graph = helper.make_graph(w.nodes, "masked", [value for value in inputs if value.name in read],
                              [helper.make_tensor_value_info("y", FLOAT, None)], w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def fed(model: onnx.ModelProto, rows: int, items: int = ITEMS, seed: int = 1) -> dict[str, Any]:
    """Return inputs whose first item masks all keys, and whose second item masks all keys for half of the queries."""
    random = np.random.default_rng(seed)
    hidden = random.random((items, 1, rows, TOKENS)) < 0.4
    hidden[0] = True
    hidden[1, :, :rows // 2] = True
    feeds = {"x": random.standard_normal((items, TOKENS, HEADS * DEPTH)).astype(np.float32), "hidden": hidden,
             "bias": np.where(random.random((items, 1, 1, TOKENS)) < 0.5, 0, -1e4).astype(np.float32)}
    return {value.name: feeds[value.name] for value in model.graph.input}


@pytest.mark.parametrize("number", [-1e4, -65504.0, -1e9, -1.5e38])
@pytest.mark.parametrize("form", FORMS)
def test_wholly_hidden_rows_are_the_mean_of_the_values(form: str, number: float) -> None:
    rows = 1 if number == -65504 else TOKENS
    model = masked_model(form, number, rows)
    feeds = fed(model, rows)
    expected = run_onnx(model, feeds)["y"]
    result = build_engine(model, timing=False, cache=False)
    np.testing.assert_allclose(result.engine(threads=1).run(feeds)["y"], expected, rtol=0, atol=1e-4)
    if form in FUSED:
        assert "attention" in map(family, result.plan.machine.steps)


@pytest.mark.parametrize("form", sorted(FUSED))
def test_the_numpy_target_agrees(form: str) -> None:
    model = masked_model(form, -1e4, TOKENS)
    feeds = fed(model, TOKENS)
    engine = build_engine(model, target="numpy", timing=False, cache=False).engine()
    np.testing.assert_allclose(engine.run(feeds)["y"], run_onnx(model, feeds)["y"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("precision", "least"), [("fp16", 55), ("bf16", 35), ("int8", 25)])
def test_every_precision_takes_the_mean(precision: Any, least: float) -> None:
    model = masked_model("where(seen, s, c)", -1e4, TOKENS)
    source = Calibration(lambda: iter([fed(model, TOKENS, 8, seed=2)]), "minmax") if precision == "int8" else None
    engine = build_engine(model, precision=precision, calibration=source, timing=False, cache=False).engine(threads=1)
    feeds = fed(model, TOKENS)
    expected, made = run_onnx(model, feeds)["y"], engine.run(feeds)["y"]
    for item in range(ITEMS):
        assert sqnr_db(expected[item], made[item]) > least


@pytest.mark.parametrize("form", ["where(hidden, c, s)", "where(hidden, c, s) + bias"])
def test_a_softmax_without_a_product_behind_it_is_one_of_equal_numbers(form: str) -> None:
    model = masked_model(form, -1e4, TOKENS, mixes=False)
    feeds = fed(model, TOKENS)
    engine = build_engine(model, timing=False, cache=False).engine(threads=1)
    np.testing.assert_allclose(engine.run(feeds)["y"], run_onnx(model, feeds)["y"], rtol=0, atol=1e-4)
