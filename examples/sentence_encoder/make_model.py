"""Make a small sentence encoder with seeded random weights.

    python make_model.py encoder.onnx

ids, mask int64 [N, T] -> embedding float32 [N, 64]: an attention block over word vectors, averaged over the mask and
normalised.
"""
import sys

import numpy as np
import onnx
from onnx import helper, numpy_helper

WORDS, WIDTH, HEADS = 1000, 64, 4


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    arrays = {name: (random.standard_normal((WIDTH, WIDTH)) * 0.3 / WIDTH ** 0.5).astype(np.float32)
              for name in ("query", "key", "value", "merge")}
    return arrays | {
        "table": random.standard_normal((WORDS, WIDTH)).astype(np.float32), "scale": np.ones(WIDTH, np.float32),
        "shift": np.zeros(WIDTH, np.float32), "heads": np.int64([0, 0, HEADS, WIDTH // HEADS]),
        "merged": np.int64([0, 0, WIDTH]), "root": np.float32((WIDTH // HEADS) ** -0.5), "one": np.float32(1),
        "far": np.float32(-1e4), "words": np.int64([1]), "last": np.int64([2]), "keys": np.int64([1, 2])}


def make() -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = []

    def node(op: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        return output

    def heads(name: str, order: list[int]) -> str:
        flat = node("Reshape", [node("MatMul", ["x", name], f"{name}_flat"), "heads"], f"{name}_heads")
        return node("Transpose", [flat], f"{name}_split", perm=order)

    node("Gather", ["table", "ids"], "x")
    node("Cast", ["mask"], "kept", to=onnx.TensorProto.FLOAT)
    products = node("MatMul", [heads("query", [0, 2, 1, 3]), heads("key", [0, 2, 3, 1])], "products")
    scores = node("Mul", [products, "root"], "scores")
    hidden = node("Mul", [node("Sub", ["one", "kept"], "gone"), "far"], "hidden")
    shares = node("Softmax", [node("Add", [scores, node("Unsqueeze", [hidden, "keys"], "hidden_keys")], "masked")],
                  "shares", axis=-1)
    mixed = node("Transpose", [node("MatMul", [shares, heads("value", [0, 2, 1, 3])], "mixed")], "mixed_back",
                 perm=[0, 2, 1, 3])
    change = node("MatMul", [node("Reshape", [mixed, "merged"], "together"), "merge"], "change")
    sums = node("Add", ["x", change], "sums")
    states = node("LayerNormalization", [sums, "scale", "shift"], "states", axis=-1)
    masked = node("Mul", [states, node("Unsqueeze", ["kept", "last"], "kept_last")], "kept_states")
    total = node("ReduceSum", [masked, "words"], "total", keepdims=0)
    node("LpNormalization", [total], "embedding", axis=-1, p=2)
    graph = helper.make_graph(
        nodes, "encoder", [helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["N", "T"])
                           for name in ("ids", "mask")],
        [helper.make_tensor_value_info("embedding", onnx.TensorProto.FLOAT, ["N", WIDTH])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights().items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


if __name__ == "__main__":
    onnx.save(make(), sys.argv[1])
