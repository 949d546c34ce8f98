"""Make a small YOLO-style detector that finds bright spots.

    python make_model.py yolo.onnx

images float32 [N, 3, 64, 64] of 0..1 -> predictions float32 [N, 5, 64]: x, y, width, height in pixels and a score, for
each of 8 x 8 cells.
"""
import sys

import numpy as np
import onnx
from onnx import helper, numpy_helper

CELLS, STRIDE = 8, 8


def weights() -> dict[str, np.ndarray]:
    """Channel 0 carries brightness from layer to layer; the others have seeded random filters, as a backbone would."""
    random = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for layer, (couts, cins) in enumerate(((8, 3), (16, 8), (16, 16))):
        kernel = random.standard_normal((couts, cins, 3, 3)).astype(np.float32) * 0.2
        kernel[0] = 0
        kernel[0, :3 if layer == 0 else 1] = 1 / 27 if layer == 0 else 1 / 9
        arrays[f"w{layer}"], arrays[f"b{layer}"] = kernel, np.zeros(couts, np.float32)
    head = random.standard_normal((5, 16, 1, 1)).astype(np.float32) * 0.02
    head[4, 0] = 20                                                    # the score follows brightness
    arrays |= {"head": head, "head_bias": np.float32([0, 0, 0, 0, -9]), "cells": np.int64([0, 5, CELLS * CELLS])}
    rows, columns = np.divmod(np.arange(CELLS * CELLS, dtype=np.float32), CELLS)
    return arrays | {"corners": np.stack([columns, rows])[None], "stride": np.float32(STRIDE), "anchor": np.float32(24),
                     "parts": np.int64([2, 2, 1])}


def make() -> onnx.ModelProto:
    nodes = []
    for layer in range(3):
        source = f"relu{layer - 1}" if layer else "images"
        nodes += [helper.make_node("Conv", [source, f"w{layer}", f"b{layer}"], [f"conv{layer}"], f"conv{layer}",
                                   strides=[2, 2], pads=[1, 1, 1, 1]),
                  helper.make_node("Relu", [f"conv{layer}"], [f"relu{layer}"], f"relu{layer}")]
    nodes += [helper.make_node("Conv", ["relu2", "head", "head_bias"], ["raw"], "head"),
              helper.make_node("Reshape", ["raw", "cells"], ["flat"], "reshape"),
              helper.make_node("Sigmoid", ["flat"], ["squashed"], "sigmoid"),
              helper.make_node("Split", ["squashed", "parts"], ["offset", "extent", "score"], "split", axis=1),
              helper.make_node("Add", ["offset", "corners"], ["place"], "place"),
              helper.make_node("Mul", ["place", "stride"], ["xy"], "xy"),
              helper.make_node("Mul", ["extent", "anchor"], ["wh"], "wh"),
              helper.make_node("Concat", ["xy", "wh", "score"], ["predictions"], "concat", axis=1)]
    graph = helper.make_graph(
        nodes, "detector", [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["N", 3, 64, 64])],
        [helper.make_tensor_value_info("predictions", onnx.TensorProto.FLOAT, ["N", 5, CELLS * CELLS])],
        [numpy_helper.from_array(array, name) for name, array in weights().items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


if __name__ == "__main__":
    onnx.save(make(), sys.argv[1])
