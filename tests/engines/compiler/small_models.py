"""ONNX models of a few nodes, and engines of them compared with the onnx package's reference evaluator."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.runtime.engine import Engine

Inputs = Mapping[str, Sequence[Any]]        # name -> shape, of float32
MAX_BATCH = 4


def small_model(nodes: Sequence[onnx.NodeProto], inputs: Inputs, outputs: Sequence[str],
                constants: Mapping[str, Any] | None = None, opset: int = 18) -> onnx.ModelProto:
    arrays = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    graph = helper.make_graph(nodes, "small", [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                                               for name, shape in inputs.items()],
                              [helper.make_empty_tensor_value_info(name) for name in outputs], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> onnx.NodeProto:
    """Return a node named after its operator in lower case."""
    return helper.make_node(op, inputs.split(), outputs.split(), name=op.lower(), **attrs)


def engine_of(model: onnx.ModelProto, precision: str = "fp32") -> Engine:
    open_batch = any(value.type.tensor_type.shape.dim[:1] and value.type.tensor_type.shape.dim[0].dim_param
                     for value in model.graph.input)
    builder = Builder(BuildConfig(precision=precision, max_batch=MAX_BATCH if open_batch else None, timing=False))
    return Engine(builder.plan(builder.graph(model)))


def feeds_of(model: onnx.ModelProto, batch: int = 3) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(0)
    shapes = {value.name: [d.dim_value if d.HasField("dim_value") else batch for d in value.type.tensor_type.shape.dim]
              for value in model.graph.input}
    return {name: np.asarray(random.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def assert_right(model: onnx.ModelProto, precision: str = "fp32", tolerance: float = 1e-5) -> Engine:
    """Compare outputs with the reference's in shape, dtype and values, and return the engine."""
    engine, feeds = engine_of(model, precision), feeds_of(model)
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(model).run(None, feeds)
    for output, result in zip(engine.outputs, expected, strict=True):
        made = engine.run(feeds)[output.name]
        assert (made.shape, made.dtype) == (result.shape, result.dtype)
        np.testing.assert_allclose(made, result, tolerance, tolerance)
    return engine
