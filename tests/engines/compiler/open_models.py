"""Small models with dynamic shapes in the forms of exporters, and ONNX Runtime's results for them."""
from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from infer_server.engines.ir.graph import Array
from tests.engines.compiler.small_models import small_model


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> onnx.NodeProto:
    """Return a node named after its output; "-" is an absent input."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=f"make {outputs}", **attrs)


def random(*shape: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def picture_net(batch: str = "N") -> onnx.ModelProto:
    """Return convolutions on pictures of any size, resized to the input's size by shape arithmetic."""
    return small_model(
        [node("Conv", "x w", "c", pads=[1, 1, 1, 1], strides=[2, 2]), node("Relu", "c", "r"),
         node("Conv", "r v", "d", pads=[1, 1, 1, 1]), node("Shape", "x", "s"), node("Slice", "s two four zero", "hw"),
         node("Shape", "d", "t"), node("Slice", "t zero two zero", "nc"), node("Concat", "nc hw", "size", axis=0),
         node("Resize", "d - - size", "up", mode="nearest", coordinate_transformation_mode="asymmetric",
              nearest_mode="floor"),
         node("Sigmoid", "up", "y")], {"x": [batch, 3, "H", "W"]}, ["y"],
        {"w": random(8, 3, 3, 3), "v": random(4, 8, 3, 3), "zero": np.array([0]), "two": np.array([2]),
         "four": np.array([4])})


def attention_net() -> onnx.ModelProto:
    """Return a layer of self-attention with a mask, whose heads are split by Reshapes to shapes from Shape."""
    def heads(x: str, out: str) -> list[onnx.NodeProto]:
        return [node("Reshape", f"{x} split", f"{x}4"), node("Transpose", f"{x}4", out, perm=[0, 2, 1, 3])]

    return small_model(
        [node("Shape", "x", "s"), node("Slice", "s zero two zero", "nt"),
         node("Concat", "nt hd", "split", axis=0), node("Concat", "nt width", "whole", axis=0),
         node("MatMul", "x wq", "q"), node("MatMul", "x wk", "k"), node("MatMul", "x wv", "v"),
         *heads("q", "qh"), *heads("k", "kh"), *heads("v", "vh"),
         node("Transpose", "kh", "kt", perm=[0, 1, 3, 2]), node("MatMul", "qh kt", "scores"),
         node("Unsqueeze", "mask axes", "mask4"), node("Add", "scores mask4", "masked"),
         node("Softmax", "masked", "p", axis=-1), node("MatMul", "p vh", "mixed"),
         node("Transpose", "mixed", "back", perm=[0, 2, 1, 3]), node("Reshape", "back whole", "merged"),
         node("MatMul", "merged wo", "o"), node("Add", "o x", "y")],
        {"x": ["N", "T", 16], "mask": ["N", "T"]}, ["y"],
        {**{name: random(16, 16, seed=i) / 4 for i, name in enumerate(("wq", "wk", "wv", "wo"))},
         "zero": np.array([0]), "two": np.array([2]), "hd": np.array([4, 4]), "width": np.array([16]),
         "axes": np.array([1, 2])})


def growing_net() -> onnx.ModelProto:
    """Return a decoder step: attention with a growing KV cache, and a table row for each position."""
    def heads(x: str, out: str) -> list[onnx.NodeProto]:
        return [node("Reshape", f"{x} split", f"{x}4"), node("Transpose", f"{x}4", out, perm=[0, 2, 1, 3])]

    return small_model(
        [node("Shape", "keys", "s"), node("Gather", "s two", "past"), node("Add", "past one", "end"),
         node("Range", "past end one", "at"), node("Gather", "table at", "place"), node("Add", "x place", "h"),
         node("MatMul", "h wq", "q"), node("MatMul", "h wk", "k"), node("MatMul", "h wv", "v"),
         *heads("q", "qh"), *heads("k", "kh"), *heads("v", "vh"),
         node("Concat", "keys kh", "keys_out", axis=2), node("Concat", "values vh", "values_out", axis=2),
         node("Transpose", "keys_out", "kt", perm=[0, 1, 3, 2]), node("MatMul", "qh kt", "scores"),
         node("Softmax", "scores", "p", axis=-1), node("MatMul", "p values_out", "mixed"),
         node("Transpose", "mixed", "back", perm=[0, 2, 1, 3]), node("Reshape", "back whole", "merged"),
         node("MatMul", "merged wo", "o"), node("Add", "o x", "y")],
        {"x": ["N", 1, 16], "keys": ["N", 4, "P", 4], "values": ["N", 4, "P", 4]}, ["y", "keys_out", "values_out"],
        {**{name: random(16, 16, seed=i) / 4 for i, name in enumerate(("wq", "wk", "wv", "wo"))},
         "table": random(512, 16), "one": np.array(1), "two": np.array(2), "split": np.array([0, 0, 4, 4]),
         "whole": np.array([0, 0, 16])})


def recurrent_net() -> onnx.ModelProto:
    """Return an LSTM over any number of steps."""
    return small_model(
        [node("Transpose", "x", "t", perm=[1, 0, 2]), node("LSTM", "t w r b", "h", hidden_size=5),
         node("Squeeze", "h one", "s"), node("Transpose", "s", "y", perm=[1, 0, 2])], {"x": ["N", "T", 4]}, ["y"],
        {"w": random(1, 20, 4), "r": random(1, 20, 5), "b": random(1, 40), "one": np.array([1])})


def pairs_net() -> onnx.ModelProto:
    """Return a model of two dynamic extents without a batch: each row of one input paired with each of the other."""
    return small_model([node("Transpose", "b", "t", perm=[1, 0]), node("MatMul", "a t", "y")],
                       {"a": ["rows", 6], "b": ["columns", 6]}, ["y"])


def by_onnx_runtime(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def spans_net() -> onnx.ModelProto:
    """Return a model that marks the elements of x in each of several spans, whose ends and sizes are inputs."""
    return small_model(
        [node("Shape", "x", "n"), node("Squeeze", "n", "count"), node("Cast", "count", "most", to=1),
         node("Range", "zero most one", "at"), node("Unsqueeze", "ends axis", "to"),
         node("Unsqueeze", "sizes axis", "size"), node("Sub", "to size", "from"),
         node("GreaterOrEqual", "at from", "behind"), node("Less", "at to", "before"),
         node("And", "behind before", "mine"), node("Cast", "mine", "y", to=1)],
        {"x": ["N"], "ends": ["E"], "sizes": ["E"]}, ["y"],
        {"zero": np.array(0, np.float32), "one": np.array(1, np.float32), "axis": np.array([1])})
