"""MatMul of two run-time tensors, compared with ONNX Runtime: one kernel, with Transposes and epilogues fused."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.engines.compiler.test_attention import MAX_BATCH, built, family
from tests.zoo import run_onnx

FLOAT = onnx.TensorProto.FLOAT
TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}

# (shape of a, shape of b, perm of a, perm of b); "N" is the batch
CASES: dict[str, tuple[Any, ...]] = {
    "matrices of a batch": (("N", 5, 7), ("N", 7, 9), None, None),
    "heads": (("N", 3, 5, 17), ("N", 3, 17, 21), None, None),
    "heads, right factor turned": (("N", 3, 5, 17), ("N", 3, 21, 17), None, (0, 1, 3, 2)),
    "heads behind the tokens": (("N", 5, 3, 17), ("N", 21, 3, 17), (0, 2, 1, 3), (0, 2, 3, 1)),
    "left factor turned": (("N", 17, 5), ("N", 17, 21), (0, 2, 1), None),
    "one right factor for all heads": (("N", 3, 5, 17), ("N", 1, 17, 21), None, None),
    "a right factor of fewer axes, without the batch": (("N", 3, 5, 17), (17, 21), None, None),
    "a right factor for each head, without the batch": (("N", 3, 5, 17), (3, 17, 21), None, None),
    "the batch is the rows": (("N", 17), (17, 21), None, None),
    "no batch": ((5, 17), (17, 21), None, None),
    "no batch, leading axes": ((2, 3, 5, 17), (3, 17, 70), None, None),
}


def product_model(a: tuple[Any, ...], b: tuple[Any, ...], a_perm: Any, b_perm: Any) -> onnx.ModelProto:
    """Return relu(a b * 2 + a constant per column); a and b follow a Sigmoid, so that they have a producer."""
    nodes, names = [], []
    for name, perm in (("a", a_perm), ("b", b_perm)):
        nodes.append(helper.make_node("Sigmoid", [name], [f"{name}.made"]))
        names.append(f"{name}.made")
        if perm:
            nodes.append(helper.make_node("Transpose", [names[-1]], [f"{name}.turned"], perm=perm))
            names[-1] = f"{name}.turned"
    columns = [b[axis] for axis in b_perm or range(len(b))][-1]
    bias = np.linspace(-9, 9, columns).astype(np.float32)
    nodes += [helper.make_node("MatMul", names, ["product"]), helper.make_node("Mul", ["product", "two"], ["doubled"]),
              helper.make_node("Add", ["doubled", "bias"], ["biased"]), helper.make_node("Relu", ["biased"], ["y"])]
    inputs = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in (("a", a), ("b", b))]
    graph = helper.make_graph(nodes, "product", inputs, [helper.make_tensor_value_info("y", FLOAT, None)],
                              [numpy_helper.from_array(np.float32(2), "two"), numpy_helper.from_array(bias, "bias")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_a_product_is_one_kernel_that_answers_as_onnx_runtime_does(name: str, precision: str, tmp_path: Path) -> None:
    a, b, *perms = CASES[name]
    model = product_model(a, b, *perms)
    batched = "N" in (*a, *b)
    engine = built(model, tmp_path, precision=precision, **({} if batched else {"max_batch": None}))
    random = np.random.default_rng(0)
    feeds = {key: random.standard_normal([MAX_BATCH - 1 if d == "N" else d for d in shape]).astype(np.float32)
             for key, shape in (("a", a), ("b", b))}
    expected, got = run_onnx(model, feeds)["y"], engine.run(feeds)["y"]
    assert np.abs(got - expected).max() < TOLERANCE[precision] * np.abs(expected).max()
    kernels = [family(step) for step in engine.plan.machine.steps]
    assert kernels.count("product") == 1 and "reference" not in kernels
    assert ("permute" in kernels) == (name == "left factor turned")      # its rows must lie in one piece


@pytest.mark.parametrize(("a", "b"), [(("N", 3, 5, 17), ("N", 3, 17, 21)), ((5, 17), (17, 21))], ids=str)
def test_a_product_of_computed_integers_is_one_kernel_and_exact(a: tuple[Any, ...], b: tuple[Any, ...],
                                                               tmp_path: Path) -> None:
    """Both factors and their zero points are computed at run time, as in dynamic quantisation."""
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, shape)
              for name, shape in {"a": a, "b": b, "za": (), "zb": ()}.items()]
    y = helper.make_tensor_value_info("y", onnx.TensorProto.INT32, (*a[:-1], b[-1]))
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["a", "b", "za", "zb"], ["y"])], "g", inputs, [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    engine = built(model, tmp_path, **({} if a[0] == "N" else {"max_batch": None}))
    random = np.random.default_rng(0)
    feeds = {key: random.integers(0, 256, [MAX_BATCH - 1 if d == "N" else d for d in shape]).astype(np.uint8)
             for key, shape in (("a", a), ("b", b))} | {"za": np.array(130, np.uint8), "zb": np.array(7, np.uint8)}
    np.testing.assert_array_equal(engine.run(feeds)["y"], run_onnx(model, feeds)["y"])
    assert [family(step) for step in engine.plan.machine.steps] == ["integer_product"]
