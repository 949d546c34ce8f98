"""Two models with negligible computation, whose inputs have 64 bytes and 600 KB."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.models import build

MAX_BATCH = 32
SHAPES = {"floats": (16,), "picture": (3, 224, 224)}        # shapes of the input x; the output y has ten values


def write_repository(folder: Path) -> None:
    for name, shape in SHAPES.items():
        source = folder / f"{name}.onnx"
        onnx.save(_model(name, shape), source)
        build(source, folder / name / "1" / "model.plan", "fp32", MAX_BATCH)
        source.unlink()


def _model(name: str, shape: tuple[int, ...]) -> onnx.ModelProto:
    if name == "floats":
        weights = np.linspace(-1, 1, 160, dtype=np.float32).reshape(16, 10)
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        constants = [numpy_helper.from_array(weights, "w")]
    else:
        nodes = [helper.make_node("Flatten", ["x"], ["flat"]),
                 helper.make_node("Slice", ["flat", "first", "end", "axis"], ["ten"]),
                 helper.make_node("Relu", ["ten"], ["y"])]
        constants = [numpy_helper.from_array(np.array([value], np.int64), name)
                     for name, value in (("first", 0), ("end", 10), ("axis", 1))]
    return helper.make_model(helper.make_graph(
        nodes, name, [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])], constants),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
