"""Models in float16 or bfloat16 are built in every precision: float32 inside, their own types outside."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.calibration.workflow import Calibration
from infer_server.engines.compiler.build import build_engine
from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops.reference import run
from infer_server.engines.plan.plan import Plan
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.half_models import DTYPES, halved
from tests.engines.compiler.recurrent_models import MODELS, sequences_for
from tests.zoo import TINY, images_for

TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
# Largest error as a share of the largest value: the model's own rounding of its weights, and the build's.
TOLERANCE = {"float16": 4e-3, "bfloat16": 4e-2, "fp32": 0.0, "fp16": 4e-3, "bf16": 4e-2, "int8": 0.12}
NETWORKS = {
    "convolutions": lambda: TINY["mobilenet_v1"](batch=2),
    "transposed convolutions": lambda: TINY["decoder"](batch=2),
    "recurrent layers": lambda: MODELS["both ways"](2),
    "states": lambda: MODELS["lstm of states"](2),
}


def built(model: onnx.ModelProto, precision: str) -> Plan:
    builder = Builder(BuildConfig(precision=precision, timing=False))
    graph = builder.graph(model)
    ranges = None
    if precision == "int8":
        feeds = feeds_of(model)
        watched = run(graph, feeds, builder.edges(graph))
        ranges = {name: (float(array.min()), float(array.max())) for name, array in watched.items()}
    return builder.plan(graph, ranges)


def feeds_of(model: onnx.ModelProto) -> dict[str, Any]:
    value = model.graph.input[0]
    made = images_for(model, 2) if len(value.type.tensor_type.shape.dim) == 4 else sequences_for(model, 2)
    return {value.name: made.astype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))}


def as_real(array: Any) -> Any:
    wide = array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array
    return wide.astype(np.float64)


HALF_IO = [(name, dtype, precision) for name in NETWORKS for dtype, precision in (
    ("float16", "fp32"), ("bfloat16", "fp32"), ("float16", "int8"))]
IN_16_BITS = [("convolutions", "float16", "fp16"), ("convolutions", "bfloat16", "bf16"),
              ("convolutions", "float16", "bf16"), ("recurrent layers", "float16", "fp16")]
FLOAT_IO = [(name, dtype, "fp32") for name in ("convolutions", "states") for dtype in TYPES]


@pytest.mark.parametrize("name, dtype, precision, keep_io", [
    *((*case, False) for case in (*HALF_IO, *IN_16_BITS)), *((*case, True) for case in FLOAT_IO)])
def test_a_half_model_computes_what_its_float32_twin_does(name: str, dtype: str, precision: str, keep_io: bool) -> None:
    model = NETWORKS[name]()
    half = halved(model, TYPES[dtype], keep_io)
    plan = built(half, precision)
    assert {tensor.dtype for tensor in (*plan.inputs, *plan.outputs)} == {"float32" if keep_io else dtype}
    assert not [step.name for step in plan.machine.steps if step.fallback]
    results = Engine(plan).run(feeds_of(half))
    for key, expected in run(graph_from_onnx(model), feeds_of(model)).items():
        error = np.abs(as_real(results[key]) - expected).max() / np.abs(expected).max()
        assert error <= TOLERANCE[dtype] + TOLERANCE[precision], f"{key}: {error}"


@pytest.mark.parametrize("dtype", TYPES)
def test_a_cast_to_fewer_bits_rounds_though_it_is_widened_again(dtype: str) -> None:
    x = np.linspace(-70000, 70000, 37, dtype=np.float32) + np.float32(1 / 3)
    nodes = [helper.make_node("Cast", ["x"], ["a"], to=TYPES[dtype]),
             helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT), helper.make_node("Neg", ["b"], ["y"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)])
    plan = built(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "fp32")
    assert len(plan.machine.steps) == 1
    with np.errstate(over="ignore"):
        expected = -x.astype(DTYPES[TYPES[dtype]]).astype(np.float32)
    np.testing.assert_array_equal(Engine(plan).run({"x": x})["y"], expected)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_float64_is_computed_in_float64(precision: str) -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((4, 32)) * 1e60, random.standard_normal((32, 24))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.DOUBLE, x.shape)],
                              [helper.make_tensor_value_info("y", TensorProto.DOUBLE, (4, 24))],
                              [numpy_helper.from_array(w, "w")])
    plan = built(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), precision)
    np.testing.assert_allclose(Engine(plan).run({"x": x})["y"], np.maximum(x @ w, 0), 1e-12)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_half_model_is_calibrated_with_float32_data_and_judged_by_numbers(dtype: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((64, 32)).astype(np.float32), random.standard_normal((32, 24)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 32))],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("N", 24))],
                              [numpy_helper.from_array(w, "w")])
    model = halved(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), TYPES[dtype])
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=x)
    said: list[str] = []
    plan = build_engine(tmp_path / "m.onnx", calibration=Calibration(tmp_path / "data.npz"), cache=False,
                        precision="int8", max_batch=4, timing=False, notify=said.append).plan
    assert any(step.precision == "int8" for step in plan.machine.steps)
    assert "dB" in " ".join(said)
    result = as_real(Engine(plan).run({"x": x.astype(DTYPES[TYPES[dtype]])})["y"])
    expected = np.maximum(x @ w, 0)
    assert np.abs(result - expected).max() / expected.max() <= 0.03
