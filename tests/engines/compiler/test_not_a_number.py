"""NaN stays NaN through kernels, float64 nests and the reference; converted to an integer it is the smallest."""
from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from infer_server.engines.compiler.builder import BuildConfig, Builder
from infer_server.engines.runtime.engine import Engine
from tests.engines.compiler.small_models import node, small_model

# What limits its argument before it computes, or asks which of two is greater, of x [2, 5].
POINTWISE = {
    **{op: node(op, "x", op) for op in (
        "Relu", "Sigmoid", "Tanh", "Erf", "Exp", "Softplus", "Elu", "HardSigmoid", "Gelu", "Atan")},
    "Clip": node("Clip", "x low high", "Clip"), "Max of a number": node("Max", "high x", "MaxOfNumber"),
    "Max": node("Max", "x other", "Max"), "Max behind": node("Max", "other x", "MaxBehind"),
    "Min": node("Min", "x other", "Min"), "Min behind": node("Min", "other x", "MinBehind")}
IN_FLOAT64 = ("Clip", "HardSigmoid", "Softplus", "Max", "Max behind")
ROWS = {"Softmax": node("Softmax", "x", "Softmax"), "LogSoftmax": node("LogSoftmax", "x", "LogSoftmax"),
        "LpNormalization": node("LpNormalization", "x", "LpNormalization"),
        "Softmax of columns": node("Softmax", "columns", "turned", axis=0)}


def model() -> onnx.ModelProto:
    """Return a model of every formula; those in IN_FLOAT64 also on doubles."""
    nodes = [node("Cast", name, f"wide{name}", to=TensorProto.DOUBLE) for name in ("x", "other", "low", "high")]
    for name in IN_FLOAT64:
        one = POINTWISE[name]
        wide = node(one.op_type, " ".join(f"wide{i}" for i in one.input), f"wide{one.output[0]}")
        nodes += [wide, node("Cast", wide.output[0], f"{one.output[0]}64", to=TensorProto.FLOAT)]
    nodes += [*POINTWISE.values(), node("Transpose", "x", "columns"), *ROWS.values(),
              node("Transpose", "turned", "ColumnSoftmax")]
    outputs = [o.output[0] for o in nodes if not o.output[0].startswith(("wide", "columns", "turned"))]
    return small_model(nodes, {"x": [2, 5], "other": [2, 5]}, outputs,
                       {"low": np.float32(-1), "high": np.float32(0.5)}, opset=22)


@pytest.mark.parametrize("target", ["", "numpy"])
def test_no_kernel_makes_a_number_of_what_is_none(target: str) -> None:
    builder = Builder(BuildConfig(target=target, timing=False))
    engine = Engine(builder.plan(builder.graph(model())))
    x = np.array([[0.5, 0.25, np.nan, 0.125, 0.75], [0.5, 0.25, 0.5, 0.125, 0.75]], np.float32)
    made = engine.run({"x": x, "other": np.full((2, 5), 0.3, np.float32)})
    rows = {one.output[0] for one in ROWS.values()} | {"ColumnSoftmax"}
    for name, y in made.items():
        wanted = np.isnan(x).any(1, keepdims=True) if name in rows else np.isnan(x)
        np.testing.assert_array_equal(np.isnan(y), np.broadcast_to(wanted, x.shape), name)


@pytest.mark.parametrize("target", ["", "numpy"])
def test_what_is_no_number_is_quantised_to_the_least_integer(target: str) -> None:
    zeros = {"i8": np.int8(3), "u8": np.uint8(128)}
    nodes = [node("QuantizeLinear", f"x scale {name}", f"stored_{name}") for name in zeros]
    nodes += [node("QuantizeLinear", f"x scale {name}", f"again_{name}") for name in zeros]
    nodes += [node("DequantizeLinear", f"again_{name} scale {name}", f"real_{name}") for name in zeros]
    outputs = [f"{kind}_{name}" for kind in ("stored", "real") for name in zeros]
    builder = Builder(BuildConfig(target=target, timing=False))
    graph = builder.graph(small_model(nodes, {"x": [3]}, outputs, {"scale": np.float32(0.5), **zeros}))
    made = Engine(builder.plan(graph)).run({"x": np.array([np.nan, 1, -1000], np.float32)})
    for name, zero in zeros.items():
        least = np.iinfo(zero.dtype).min
        assert made[f"stored_{name}"].tolist() == [least, zero + 2, least]
        assert made[f"real_{name}"].tolist() == [(least - int(zero)) / 2, 1, (least - int(zero)) / 2]
