"""Tensors of types that NumPy lacks: floats of up to 8 bits, integers of 4 and 2 bits."""
from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from onnx import TensorProto

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.ir.dtypes import dtype_named
from infer_server.engines.loading import load_engine
from infer_server.engines.plan.file import write_plan
from tests.engines.compiler.small_models import assert_right, node, small_model


def test_they_are_moved_by_kernels_and_converted_by_the_reference_in_a_plan_from_its_file(tmp_path: Path) -> None:
    """Output y is x in int4, transposed; z is its float value times float8 weights."""
    model = small_model(
        [node("Transpose", "x", "turned", perm=[0, 2, 1]), node("Flatten", "turned", "y", axis=2),
         node("Cast", "y", "real", to=TensorProto.FLOAT), node("CastLike", "c like", "w8"),
         node("Cast", "w8", "w", to=TensorProto.FLOAT), node("Mul", "real w", "z")],
        {"x": [2, 3, 4]}, ["y", "z"], {"c": np.float32([0.3] * 3), "like": np.zeros(1, ml_dtypes.float8_e5m2)},
        opset=21)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT4
    builder = Builder(BuildConfig(timing=False))
    write_plan(builder.plan(builder.graph(model)), tmp_path / "m.plan")
    engine = load_engine(tmp_path / "m.plan")
    x = np.random.default_rng(0).integers(-8, 8, (2, 3, 4)).astype(ml_dtypes.int4)
    for fed in (x, x.view(np.uint8)):
        made = engine.run({"x": fed})
        wanted = x.transpose(0, 2, 1).reshape(8, 3)
        assert made["y"].dtype == np.uint8 and made["y"].tobytes() == wanted.tobytes()
        np.testing.assert_array_equal(made["z"], wanted.astype(np.float32) * np.float32(0.3125))
    assert [step.name for step in engine.plan.machine.steps if step.fallback] == ["cast"]


def test_what_is_quantised_to_them_is_what_onnx_says() -> None:
    for name in ("float8_e4m3fn", "float4_e2m1fn", "int4", "uint4"):
        zero = np.zeros(4, dtype_named(name))
        assert_right(small_model(
            [node("QuantizeLinear", "x scale zero", "q", axis=1), node("Reshape", "q target", "r"),
             node("DequantizeLinear", "r one", "y")], {"x": [3, 4]}, ["y"],
            {"scale": np.float32([0.5, 0.25, 0.1, 3]), "zero": zero, "one": np.float32(0.5),
             "target": np.array([4, 3])}, opset=23))
