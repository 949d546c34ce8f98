"""An If with a data-dependent condition computes both branches if they are small."""
from __future__ import annotations

import numpy as np
import onnx
import pytest

from infer_server.engines import build_engine
from infer_server.engines.frontend.cutting.both import with_both_branches
from infer_server.engines.frontend.onnx_file import read_model
from tests.engines.compiler.open_models import by_onnx_runtime, node, random
from tests.engines.compiler.program_models import region
from tests.engines.compiler.small_models import small_model


def gated(condition: str = "x", other: str = "Neg x", rows: int | str = 1, width: int = 40) -> onnx.ModelProto:
    """Return an If: tanh(x w) if the sum of all elements is above 0, else another operator of x.

    The branches' tensors have the same names.
    """
    op, inputs = other.split(" ", 1)
    then = region("then", [node("MatMul", "x w", "p"), node("Tanh", "p", "q")], [], "q",
                  constants={"w": random(width, width)})
    otherwise = region("otherwise", [node(op, inputs, "p"), node("Identity", "p", "q")], [], "q")
    nodes = [node("Shape", "x", "shape"), node("Cast", "shape", "extents", to=1),
             node("ReduceSum", "x" if condition == "x" else "extents", "sum", keepdims=0),
             node("Greater", "sum zero", "above"), node("If", "above", "y", then_branch=then, else_branch=otherwise)]
    return small_model(nodes, {"x": [rows, width]}, ["y"], {"zero": np.array(0, np.float32)})


def test_both_branches_are_computed_and_the_right_one_is_taken() -> None:
    model, x = gated(), np.abs(random(1, 40))
    engine = build_engine(model, cache=False, timing=False).engine()
    assert engine.plan.program is None
    for feed in ({"x": x}, {"x": -x}):
        np.testing.assert_allclose(engine.run(feed)["y"], by_onnx_runtime(model, feed)["y"], 1e-5, 1e-5)


def reshaped_as_told() -> onnx.ModelProto:
    """Return an If whose other branch reshapes to a shape from an input, which may not fit if not taken."""
    model = gated(other="Reshape x told")
    model.graph.input.append(onnx.helper.make_tensor_value_info("told", onnx.TensorProto.INT64, [2]))
    (choice,) = (one for one in model.graph.node if one.op_type == "If")
    for attribute in choice.attribute:
        attribute.g.value_info.append(onnx.helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, [1, 40]))
    return model


def read_from_text() -> onnx.ModelProto:
    """Return an If whose other branch parses text, which may be no number if not taken."""
    model = gated()
    model.graph.input.append(onnx.helper.make_tensor_value_info("text", onnx.TensorProto.STRING, [1, 40]))
    (choice,) = (one for one in model.graph.node if one.op_type == "If")
    choice.attribute[1].g.node[0].CopyFrom(node("Cast", "text", "p", to=1))
    return model


@pytest.mark.parametrize("model", [
    gated("extents"), gated(other="ReduceSum x"), gated(other="Sum x"), gated(rows="N"), gated(width=600),
    reshaped_as_told(), read_from_text()],
    ids=["shapes tell", "another shape", "not known to be safe", "an open extent", "many weights", "a shape is told",
         "text"])
def test_other_ifs_stay(model: onnx.ModelProto) -> None:
    source = read_model(model)
    assert with_both_branches(source) is source
