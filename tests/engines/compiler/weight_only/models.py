"""Small models with weights that a weight-only build quantises."""
from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, NDArray[Any]]
WORDS, DEPTH, WIDTH = 300, 260, 64      # DEPTH is not a multiple of a group


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def product(weight: NDArray[Any], rows: int = 5, **gemm: Any) -> onnx.ModelProto:
    """Return x [N, rows, K] by weights [K, N], or a Gemm with a bias if it has attributes."""
    transposed = bool(gemm.get("transB"))
    depth, width = weight.shape[::-1] if transposed else weight.shape
    constants = {"w": weight, **({"b": normal(width, seed=1)} if gemm else {})}
    node = helper.make_node("Gemm" if gemm else "MatMul", ["x", "w", *(["b"] if gemm else [])], ["y"], "layer", **gemm)
    shape: list[Any] = ["N", depth] if gemm else ["N", rows, depth]
    return model([node], {"x": (TensorProto.FLOAT, shape)}, {"y": ["N", *shape[1:-1], width]}, constants)


def encoder() -> onnx.ModelProto:
    """Return an embedding, a MatMul, a Gemm with transposed weights, and a small product that stays float."""
    constants = {"table": normal(WORDS, DEPTH), "first.w": normal(DEPTH, WIDTH, seed=1) / 14,
                 "second.w": normal(DEPTH, WIDTH, seed=2) / 10, "second.b": normal(DEPTH, seed=3),
                 "small.w": normal(DEPTH, 4, seed=4)}
    nodes = [helper.make_node("Gather", ["table", "ids"], ["embedded"], "embedding"),
             helper.make_node("Tanh", ["embedded"], ["x"], "tanh"),
             helper.make_node("MatMul", ["x", "first.w"], ["h"], "first"),
             helper.make_node("Relu", ["h"], ["r"], "relu"),
             helper.make_node("ReduceMean", ["r"], ["rows"], "mean", axes=[1], keepdims=0),
             helper.make_node("Gemm", ["rows", "second.w", "second.b"], ["z"], "second", transB=1),
             helper.make_node("MatMul", ["z", "small.w"], ["y"], "small")]
    return model(nodes, {"ids": (TensorProto.INT64, ["N", 7])}, {"y": ["N", 4]}, constants)


def ids(items: int = 3, seed: int = 0) -> Arrays:
    return {"ids": np.random.default_rng(seed).integers(0, WORDS, (items, 7))}


def model(nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[Any]]], outputs: dict[str, list[Any]],
          constants: Arrays) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def sqnr_db(expected: NDArray[Any], made: NDArray[Any]) -> float:
    error = np.square(expected - made, dtype=np.float64).sum()
    return float(10 * np.log10(np.square(expected, dtype=np.float64).sum() / error))
