"""Models with string inputs, as exported from scikit-learn."""
from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

COLOURS, SIZES = ["green", "red"], ["large", "medium", "small"]


def columns(categories: Sequence[Sequence[str]] = (COLOURS, SIZES), zeros: int = 0) -> onnx.ModelProto:
    """Return a OneHotEncoder of the columns of x [n, columns]; with zeros=0 unknown strings are errors."""
    nodes = []
    for place, words in enumerate(categories):
        nodes += [helper.make_node("ArrayFeatureExtractor", ["x", f"place{place}"], [f"column{place}"],
                                   domain="ai.onnx.ml"),
                  helper.make_node("OneHotEncoder", [f"column{place}"], [f"hot{place}"], f"encoder{place}",
                                   domain="ai.onnx.ml", cats_strings=list(words), zeros=zeros),
                  helper.make_node("Reshape", [f"hot{place}", f"shape{place}"], [f"flat{place}"])]
    nodes.append(helper.make_node("Concat", [f"flat{place}" for place in range(len(categories))], ["y"], axis=1))
    places = [helper.make_tensor(f"place{place}", TensorProto.INT64, [1], [place]) for place in range(len(categories))]
    shapes = [helper.make_tensor(f"shape{place}", TensorProto.INT64, [2], [-1, len(words)])
              for place, words in enumerate(categories)]
    graph = helper.make_graph(
        nodes, "columns", [helper.make_tensor_value_info("x", TensorProto.STRING, ["n", len(categories)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", sum(map(len, categories))])],
        [*places, *shapes])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)],
                             ir_version=8)


def joined() -> onnx.ModelProto:
    """Return columns() with an input for each column, joined by a Concat."""
    model = columns()
    del model.graph.input[:]
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.STRING, ["n", 1])
                             for name in ("colour", "size"))
    model.graph.node.insert(0, helper.make_node("Concat", ["colour", "size"], ["x"], axis=1))
    return model
