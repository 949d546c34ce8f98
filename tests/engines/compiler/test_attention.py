"""Attention in the forms of exporters, compared with ONNX Runtime: one kernel, without copies around it."""
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from infer_server.calibration.accuracy.measures import sqnr_db
from infer_server.calibration.workflow import Calibration
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.frontend.onnx_export import onnx_from_graph
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ir.serialize import graph_from_json
from infer_server.engines.ops import reference
from infer_server.engines.plan.plan import Step
from infer_server.engines.runtime.engine import Engine
from tests.zoo import run_onnx

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
MAX_BATCH = 3
TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}       # relative to the largest value


@dataclass(frozen=True)
class Case:
    """Layer of self-attention x [batch, tokens, width], in one of the forms of exporters."""
    tokens: int = 19
    heads: int = 3
    depth: int = 10
    scale: str = "div scores"       # "mul scores", "mul q", "mul k", "both", "none"
    mask: str = ""                  # "tokens", "full", "causal", "where", "causal where"
    mask_first: bool = False        # before the scale
    one_projection: bool = False    # q, k and v sliced from one product

    @property
    def width(self) -> int:
        return self.heads * self.depth


class Writer:
    """Builder of a small ONNX graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attrs))
        return name

    def constant(self, array: Any, dtype: Any = np.float32) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def linear(self, x: str, inside: int, outside: int) -> str:
        weight = self.constant(self.random.standard_normal((inside, outside)) * 1.5 / math.sqrt(inside))
        return self("Add", self("MatMul", x, weight), self.constant(self.random.standard_normal(outside) * 0.1))


def attention_model(case: Case) -> onnx.ModelProto:
    w = Writer()
    parts = projections(w, case)
    scores = masked_scores(w, case, *parts[:2])
    mixed = w("MatMul", w("Softmax", scores, axis=-1), parts[2])
    merged = w("Reshape", w("Transpose", mixed, perm=(0, 2, 1, 3)), w.constant([0, 0, case.width], np.int64))
    w.nodes.append(helper.make_node("Identity", [w.linear(merged, case.width, case.width)], ["y"]))
    shape = ["batch", case.tokens, case.width]
    inputs = [helper.make_tensor_value_info("x", FLOAT, shape)]
    if case.mask in ("tokens", "full", "where"):
        full = ["batch", 1, 1 if case.mask == "tokens" else case.tokens, case.tokens]
        inputs.append(helper.make_tensor_value_info("mask", FLOAT, full))
    graph = helper.make_graph(w.nodes, "attention", inputs, [helper.make_tensor_value_info("y", FLOAT, shape)],
                              w.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def projections(w: Writer, case: Case) -> list[str]:
    """Add projections and return q [N, H, S, D], k [N, H, D, T] and v [N, H, T, D]."""
    split = w.constant([0, 0, case.heads, case.depth], np.int64)
    perms = ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
    if case.one_projection:
        wide = w("Reshape", w.linear("x", case.width, 3 * case.width),
                 w.constant([0, 0, 3, case.heads, case.depth], np.int64))
        moved = w("Transpose", wide, perm=(2, 0, 3, 1, 4))
        q, k, v = (w("Gather", moved, w.constant(i, np.int64), axis=0) for i in range(3))
        k = w("Transpose", k, perm=(0, 1, 3, 2))
    else:
        q, k, v = (w("Transpose", w("Reshape", w.linear("x", case.width, case.width), split), perm=perm)
                   for perm in perms)
    root = case.depth ** -0.5
    if case.scale in ("mul q", "both"):
        q = w("Mul", q, w.constant(root if case.scale == "mul q" else root ** 0.5))
    if case.scale in ("mul k", "both"):
        k = w("Mul", k, w.constant(root if case.scale == "mul k" else root ** 0.5))
    return [q, k, v]


def masked_scores(w: Writer, case: Case, q: str, k: str) -> str:
    scores = w("MatMul", q, k)
    for what in ("mask", "scale") if case.mask_first else ("scale", "mask"):
        if what == "scale" and case.scale == "div scores":
            scores = w("Div", scores, w.constant(case.depth ** 0.5))
        elif what == "scale" and case.scale == "mul scores":
            scores = w("Mul", w.constant([case.depth ** -0.5]), scores)
        elif what == "mask" and case.mask in ("tokens", "full"):
            scores = w("Add", scores, "mask")
        elif what == "mask" and case.mask == "causal":
            hidden = np.triu(np.full((case.tokens, case.tokens), -np.inf), 1)
            scores = w("Add", scores, w.constant(hidden[None, None]))
        elif what == "mask" and case.mask == "where":
            seen = w("Cast", "mask", to=onnx.TensorProto.BOOL)
            scores = w("Where", seen, scores, w.constant(-1e9))
        elif what == "mask" and case.mask == "causal where":
            hidden = w.constant(np.triu(np.ones((case.tokens, case.tokens)), 1), bool)
            scores = w("Where", hidden, w.constant(-np.inf), scores)
    return scores


def feeds_for(case: Case, batch: int, seed: int = 1) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    feeds = {"x": random.standard_normal((batch, case.tokens, case.width)).astype(np.float32)}
    if case.mask in ("tokens", "full", "where"):
        seen = random.random((batch, 1, 1 if case.mask == "tokens" else case.tokens, case.tokens)) < 0.7
        seen[..., 0] = True
        feeds["mask"] = (seen if case.mask == "where" else np.where(seen, 0, -1e4)).astype(np.float32)
    return feeds


def built(model: onnx.ModelProto, folder: Path, calibration: Any = None, **options: Any) -> Engine:
    """Build an engine. calibration: inputs for INT8."""
    onnx.save(model, folder / "model.onnx")
    source = None
    if calibration:
        np.savez(folder / "calibration.npz", **calibration)
        source = Calibration(folder / "calibration.npz", "minmax")
    options = {"max_batch": MAX_BATCH, "timing": False, **options}
    return Engine(build_engine(folder / "model.onnx", calibration=source, cache=False, **options).plan)


def family(step: Step) -> str:
    return step.tactic.split(":")[0]


CASES = {
    "as BERT": Case(mask="tokens"),
    "as BERT, longer than a panel": Case(tokens=130, mask="tokens"),
    "as ViT": Case(scale="mul scores"),
    "q scaled, sliced from one projection": Case(scale="mul q", one_projection=True),
    "q and k scaled, causal": Case(scale="both", mask="causal"),
    "k scaled, causal": Case(scale="mul k", mask="causal"),
    "a full mask before the scale": Case(scale="mul scores", mask="full", mask_first=True),
    "no scale, hidden by Where": Case(scale="none", mask="where"),
    "causal by Where": Case(mask="causal where"),
    "one head": Case(heads=1, depth=40),
    "one token": Case(tokens=1),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_one_kernel_that_answers_as_onnx_runtime_does(name: str, precision: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = attention_model(case)
    engine = built(model, tmp_path, precision=precision)
    feeds = feeds_for(case, MAX_BATCH - 1)
    expected, got = run_onnx(model, feeds)["y"], engine.run(feeds)["y"]
    assert np.abs(got - expected).max() < TOLERANCE[precision] * np.abs(expected).max()
    kernels = [family(step) for step in engine.plan.machine.steps]
    assert kernels.count("attention") == 1
    assert not {"permute", "take", "softmax"} & set(kernels)


def one_item_model(keys_of: str) -> onnx.ModelProto:
    """Return attention with tokens first and no batch, as in torch's MultiheadAttention."""
    w, (tokens, heads, depth) = Writer(), (21, 4, 6)
    width = heads * depth
    split = w.constant([tokens, heads, depth], np.int64)
    if keys_of == "learned queries":
        q = w.constant(w.random.standard_normal((heads, tokens, depth)))
    else:
        q = w("Transpose", w("Reshape", w.linear("x", width, width), split), perm=(1, 0, 2))
    if keys_of == "one head":
        one = w.constant([tokens, 1, depth], np.int64)
        k, v = (w("Reshape", w.linear("x", width, depth), one) for _ in range(2))
    else:
        k, v = (w("Reshape", w.linear("x", width, width), split) for _ in range(2))
    k, v = w("Transpose", k, perm=(1, 2, 0)), w("Transpose", v, perm=(1, 0, 2))
    scores = w("MatMul", w("Mul", q, w.constant(depth ** -0.5)), k)
    mixed = w("Transpose", w("MatMul", w("Softmax", scores, axis=-1), v), perm=(1, 0, 2))
    merged = w("Reshape", mixed, w.constant([tokens, 1, width], np.int64))
    w.nodes.append(helper.make_node("Identity", [w.linear(merged, width, width)], ["y"]))
    x, y = (helper.make_tensor_value_info(name, FLOAT, [tokens, 1, width]) for name in "xy")
    graph = helper.make_graph(w.nodes, "attention", [x], [y], w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("keys_of", ["x", "one head", "learned queries"])
def test_attention_without_a_batch_is_one_kernel_too(keys_of: str, tmp_path: Path) -> None:
    model = one_item_model(keys_of)
    engine = built(model, tmp_path, max_batch=None)
    feeds = {"x": np.random.default_rng(1).standard_normal((21, 1, 24)).astype(np.float32)}
    np.testing.assert_allclose(engine.run(feeds)["y"], run_onnx(model, feeds)["y"], rtol=1e-4, atol=1e-5)
    kernels = [family(step) for step in engine.plan.machine.steps]
    assert "attention" in kernels and not {"permute", "softmax", "reference"} & set(kernels)


def windows_model(batch: str | int, shifted: bool) -> onnx.ModelProto:
    """Return attention in four windows of 4x4 tokens (Swin, Liu et al. 2021), with merged leading axes."""
    w, (side, heads, depth) = Writer(), (4, 3, 8)
    width, tokens = heads * depth, side * side

    def shaped(x: str, *shape: int) -> str:
        return w("Reshape", x, w.constant([-1, *shape], np.int64))

    x = w("Transpose", shaped("x", 2, side, 2, side, width), perm=(0, 1, 3, 2, 4, 5))
    three = shaped(w.linear(shaped(x, tokens, width), width, 3 * width), tokens, 3, heads, depth)
    three = w("Transpose", three, perm=(2, 0, 3, 1, 4))
    q, k, v = (w("Gather", three, w.constant(i, np.int64), axis=0) for i in range(3))
    scores = w("MatMul", w("Mul", q, w.constant(depth ** -0.5)), w("Transpose", k, perm=(0, 1, 3, 2)))
    scores = w("Add", scores, w.constant(w.random.standard_normal((1, heads, tokens, tokens))))
    if shifted:
        hidden = np.where(w.random.random((1, 4, 1, tokens, tokens)) < 0.3, -100, 0)
        scores = w("Add", shaped(scores, 4, heads, tokens, tokens), w.constant(hidden))
        scores = shaped(scores, heads, tokens, tokens)
    mixed = w("Transpose", w("MatMul", w("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3))
    y = shaped(w.linear(shaped(mixed, tokens, width), width, width), 2, 2, side, side, width)
    y = shaped(w("Transpose", y, perm=(0, 1, 3, 2, 4, 5)), 2 * side, 2 * side, width)
    w.nodes.append(helper.make_node("Identity", [y], ["y"]))
    ends = [helper.make_tensor_value_info(name, FLOAT, [batch, 2 * side, 2 * side, width]) for name in "xy"]
    graph = helper.make_graph(w.nodes, "windows", ends[:1], ends[1:], w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("batch", ["N", 1, 2])
@pytest.mark.parametrize("shifted", [False, True])
def test_attention_in_windows_is_one_kernel_too(batch: str | int, shifted: bool, tmp_path: Path) -> None:
    model = windows_model(batch, shifted)
    engine = built(model, tmp_path, max_batch=MAX_BATCH if batch == "N" else None)
    items = 2 if batch == "N" else batch
    feeds = {"x": np.random.default_rng(1).standard_normal((items, 8, 8, 24)).astype(np.float32)}
    np.testing.assert_allclose(engine.run(feeds)["y"], run_onnx(model, feeds)["y"], rtol=1e-4, atol=1e-5)
    assert [family(step) for step in engine.plan.machine.steps] == [
        "permute", "contraction", "attention", "contraction", "permute"]     # into windows, and back


@pytest.mark.parametrize("name", ["as BERT", "q scaled, sliced from one projection", "q and k scaled, causal"])
def test_quantised_attention_computes_in_int8_and_exports_what_it_is(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = attention_model(case)
    engine = built(model, tmp_path, feeds_for(case, 16, seed=2), precision="int8")
    feeds = feeds_for(case, MAX_BATCH)
    expected, got = run_onnx(model, feeds)["y"], engine.run(feeds)["y"]
    assert sqnr_db(expected, got) > 28
    attention, = (step for step in engine.plan.machine.steps if family(step) == "attention")
    assert attention.precision == "int8"
    assert "permute" not in [family(step) for step in engine.plan.machine.steps]
    # The quantised graph has a float softmax; the kernel rounds its weights to bytes.
    graph = graph_from_json(engine.plan.graph, engine.plan.weights)
    meant = reference.run(graph, feeds)["y"]
    assert sqnr_db(meant, got) > 30
    # Not in ONNX Runtime: its own int8 kernels round otherwise than the model says.
    exported = graph_from_onnx(onnx_from_graph(graph))
    assert sqnr_db(meant, reference.run(exported, feeds)["y"]) > 50


def test_the_scores_are_not_read_from_outside(tmp_path: Path) -> None:
    """If the scores are a graph output, attention is not fused, and a note has the reason."""
    model = attention_model(Case())
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(helper.make_tensor_value_info(softmax.output[0], FLOAT, None))
    onnx.save(model, tmp_path / "model.onnx")
    result = build_engine(tmp_path / "model.onnx", cache=False, max_batch=MAX_BATCH, timing=False)
    assert any("other nodes read its softmax" in note.why for note in result.notes)
    feeds = feeds_for(Case(), 2)
    for output, value in Engine(result.plan).run(feeds).items():
        np.testing.assert_allclose(value, run_onnx(model, feeds)[output], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-5), ("bf16", 0.05), ("int8", 0.2)])
def test_a_query_that_sees_no_key_gets_zeros(precision: str, near: float, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((32, 32)).astype(np.float32) * 0.2
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["p"]),
             helper.make_node("Attention", ["p", "p", "p", "seen"], ["mixed"], q_num_heads=4, kv_num_heads=4),
             helper.make_node("MatMul", ["mixed", "weight"], ["y"])]
    graph = helper.make_graph(nodes, "m", [
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 6, 32]),
        helper.make_tensor_value_info("seen", onnx.TensorProto.BOOL, ["N", 1, 6, 6])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)], [numpy_helper.from_array(weight, "weight")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])

    def feeds(items: int) -> dict[str, Any]:
        seen = random.random((items, 1, 6, 6)) < 0.6
        seen[:, :, 0] = False
        return {"x": random.standard_normal((items, 6, 32)).astype(np.float32), "seen": seen}

    engine = built(model, tmp_path, feeds(8) if precision == "int8" else None, precision=precision)
    assert "attention" in map(family, engine.plan.machine.steps)
    given = feeds(3)
    y = engine.run(given)["y"]
    np.testing.assert_allclose(y, ReferenceEvaluator(model).run(None, given)[0], rtol=0, atol=near)
    np.testing.assert_allclose(y[:, 0], 0, atol=1e-5)
