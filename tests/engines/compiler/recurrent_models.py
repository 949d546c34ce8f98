"""Networks with recurrent layers, written as exporters write them: small, with seeded weights.

    model = MODELS["crnn"]()        # an onnx.ModelProto; its input "x" has the batch "N" in front
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


class Writer:
    """Builder of nodes with one output each, named after their operators."""

    def __init__(self, opset: int = 17) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.initialisers: list[onnx.TensorProto] = []
        self.opset = opset

    def __call__(self, op: str, *inputs: str, count: int = 1, **attrs: Any) -> Any:
        names = [f"{op}{len(self.nodes)}.{i}" for i in range(count)]
        self.nodes.append(helper.make_node(op, inputs, names, name=f"/{op}{len(self.nodes)}", **attrs))
        return names[0] if count == 1 else names

    def constant(self, array: Any) -> str:
        array = np.asarray(array)
        name = f"c{len(self.initialisers)}"
        self.initialisers.append(numpy_helper.from_array(array, name))
        return name

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def draw(self, *shape: int, scale: float = 1.0) -> str:
        return self.constant((self.random.standard_normal(shape) * scale).astype(np.float32))

    def layer(self, op: str, x: str, width: int, hidden: int, *, states: tuple[str, ...] = (), lengths: str = "",
              peepholes: bool = False, outputs: int = 0, **attrs: Any) -> list[str]:
        """Add a recurrent layer and return the names of Y, Y_h (and Y_c)."""
        count = 2 if attrs.get("direction") == "bidirectional" else 1
        rows = GATES[op] * hidden
        weights = [self.draw(count, rows, width, scale=width ** -0.5), self.draw(count, rows, hidden,
                                                                                   scale=hidden ** -0.5),
                   self.draw(count, 2 * rows, scale=0.2)]
        optional = [lengths, *states] if lengths or states else []
        if peepholes:
            optional = [*optional, *[""] * (3 - len(optional)), self.draw(count, 3 * hidden, scale=0.3)]
        found: list[str] = self(op, x, *weights, *optional, count=outputs or (3 if op == "LSTM" else 2),
                                hidden_size=hidden, **attrs)
        return found

    def zeros(self, x: str, count: int, hidden: int) -> str:
        """Add an initial state as PyTorch exports it: zeros for each item of x."""
        batch = self("Gather", self("Shape", x), self.constant(np.array(0, np.int64)), axis=0)
        shape = self("Concat", self.integers(count), self("Unsqueeze", batch, self.integers(0)),
                     self.integers(hidden), axis=0)
        return str(self("ConstantOfShape", shape, value=numpy_helper.from_array(np.zeros(1, np.float32))))

    def model(self, x: tuple[int | str, ...], lengths: bool = False,
              **outputs: tuple[str, tuple[int | str, ...]]) -> onnx.ModelProto:
        """Return the model with input "x", and "lengths" if asked; outputs map names to (tensor, shape)."""
        for name, (tensor, _) in outputs.items():
            self.nodes.append(helper.make_node("Identity", [tensor], [name], name=f"/{name}"))
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                 for name, shape in (("x", x), *((name, shape) for name, (_, shape) in outputs.items()))]
        if lengths:
            infos.insert(1, helper.make_tensor_value_info("lengths", TensorProto.INT32, x[:1]))
        opsets = [helper.make_opsetid("", self.opset)]
        inputs = 1 + lengths
        graph = helper.make_graph(self.nodes, "recurrent", infos[:inputs], infos[inputs:], self.initialisers)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets))
        onnx.checker.check_model(model, full_check=True)
        return model


def crnn(batch: str | int = "N", hidden: int = 20) -> onnx.ModelProto:
    """Return a CRNN (Shi et al. 2015) as it is widely exported.

    The columns of the convolution's image are steps, the linear of each layer reads [steps * batch, features], and the
    output is [steps, batch, classes].
    """
    w = Writer()
    y = w("Relu", w("Conv", "x", w.draw(16, 1, 3, 3, scale=0.4), w.draw(16, scale=0.1), kernel_shape=[3, 3],
                    pads=[1, 1, 1, 1]))
    y = w("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2])
    y = w("Relu", w("Conv", y, w.draw(24, 16, 4, 3, scale=0.1), w.draw(24, scale=0.1), kernel_shape=[4, 3],
                    pads=[0, 1, 0, 1]))
    steps, width = 12, 24
    y = w("Transpose", w("Squeeze", y, w.integers(2)), perm=[2, 0, 1])
    for out in (20, 11):
        states = (w.zeros("x", 2, hidden), w.zeros("x", 2, hidden))
        y = w.layer("LSTM", y, width, hidden, states=states, direction="bidirectional")[0]
        y = w("Reshape", w("Transpose", y, perm=[0, 2, 1, 3]), w.integers(0, 0, -1))
        rows = w("Reshape", y, w.integers(-1, 2 * hidden))
        rows = w("Gemm", rows, w.draw(out, 2 * hidden, scale=0.3), w.draw(out, scale=0.1), transB=1)
        y, width = w("Reshape", rows, w.integers(steps, -1, out)), out
    y = w("LogSoftmax", y, axis=2)
    return w.model((batch, 1, 8, 24), y=(y, (steps, batch, 11)))


def recogniser(batch: str | int = "N", hidden: int = 12) -> onnx.ModelProto:
    """Return a text recogniser with batch_first layers and output [batch, steps, classes]."""
    w = Writer()
    y = w("Relu", w("Conv", "x", w.draw(16, 1, 8, 3, scale=0.3), kernel_shape=[8, 3], pads=[0, 1, 0, 1],
                    strides=[1, 2]))
    y, width = w("Transpose", w("Squeeze", y, w.integers(2)), perm=[0, 2, 1]), 16
    for _ in range(2):
        y = w("Transpose", y, perm=[1, 0, 2])
        y = w.layer("LSTM", y, width, hidden, direction="bidirectional")[0]
        y = w("Reshape", w("Transpose", y, perm=[0, 2, 1, 3]), w.integers(0, 0, -1))
        y, width = w("Transpose", y, perm=[1, 0, 2]), 2 * hidden
        y = w("Add", w("MatMul", y, w.draw(width, 10, scale=0.3)), w.draw(10, scale=0.1))
        width = 10
    return w.model((batch, 1, 8, 24), y=(w("Softmax", y, axis=-1), (batch, 12, 10)))


def commands(batch: str | int = "N", layers: int = 2) -> onnx.ModelProto:
    """Return a keyword spotter: a stack of batch_first GRUs over frames of features, and a Gemm on the last state."""
    w = Writer()
    y, width, hidden = w("Transpose", "x", perm=[1, 0, 2]), 13, 32
    for _ in range(layers):
        full, last = w.layer("GRU", y, width, hidden, states=(w.zeros("x", 1, hidden),), linear_before_reset=1)
        y, width = w("Squeeze", full, w.integers(1)), hidden
    y = w("Gemm", w("Squeeze", last, w.integers(0)), w.draw(9, hidden, scale=0.3), w.draw(9, scale=0.1), transB=1)
    return w.model((batch, 15, 13), y=(y, (batch, 9)))


def signals(batch: str | int = "N") -> onnx.ModelProto:
    """Return convolutions over time with a shortcut and a depthwise one, then a bidirectional GRU."""
    w = Writer()

    def conv(x: str, cin: int, out: int, kernel: int, stride: int = 1, group: int = 1) -> str:
        weight = w.draw(out, cin // group, kernel, scale=(cin * kernel / group) ** -0.5)
        y = w("Conv", x, weight, w.draw(out, scale=0.1), kernel_shape=[kernel], pads=[kernel // 2] * 2,
              strides=[stride], group=group)
        return str(w("Relu", y))

    y = conv("x", 10, 24, 5, stride=2)
    y = w("Add", y, conv(conv(y, 24, 24, 3, group=24), 24, 24, 1))
    y = w("MaxPool", y, kernel_shape=[2], strides=[2])
    full = w.layer("GRU", w("Transpose", y, perm=[2, 0, 1]), 24, 18, direction="bidirectional")[0]
    y = w("Reshape", w("Transpose", full, perm=[2, 0, 1, 3]), w.integers(0, 0, -1))
    y = w("ReduceMean", y, axes=[1], keepdims=0)
    y = w("Gemm", y, w.draw(7, 36, scale=0.3), transB=1)
    return w.model((batch, 10, 40), y=(y, (batch, 7)))


def keras(op: str = "LSTM", batch: str | int = "N", sequences: bool = False) -> onnx.ModelProto:
    """Return a Keras layer as tf2onnx writes it, with a dense layer over the last step or every step."""
    w = Writer()
    y, last = w.layer(op, w("Transpose", "x", perm=[1, 0, 2]), 10, 24, outputs=2)
    if not sequences:
        y = w("MatMul", w("Squeeze", last, w.integers(0)), w.draw(24, 5, scale=0.3))
        return w.model((batch, 9, 10), y=(w("Softmax", y, axis=-1), (batch, 5)))
    y = w("Transpose", w("Squeeze", y, w.integers(1)), perm=[1, 0, 2])
    rows = w("Reshape", y, w.integers(-1, 24))
    rows = w("Relu", w("Add", w("MatMul", rows, w.draw(24, 5, scale=0.3)), w.draw(5, scale=0.1)))
    return w.model((batch, 9, 10), y=(w("Reshape", rows, w.integers(-1, 9, 5)), (batch, 9, 5)))


def both_ways(batch: str | int = "N", hidden: int = 12) -> onnx.ModelProto:
    """Return a bidirectional layer that is split and concatenated again, then a layer whose last step is used."""
    w = Writer()
    y = w.layer("LSTM", w("Transpose", "x", perm=[1, 0, 2]), 10, hidden, direction="bidirectional")[0]
    parts = [w("Squeeze", part, w.integers(1)) for part in w("Split", y, w.integers(1, 1), count=2, axis=1)]
    y = w("Tanh", w("Concat", *parts, axis=2))
    full = w("Squeeze", w.layer("GRU", y, 2 * hidden, hidden, direction="reverse")[0], w.integers(1))
    steps = w("Transpose", full, perm=[1, 0, 2])
    weights = w("Softmax", w("MatMul", steps, w.draw(hidden, 1)), axis=1)
    pooled = w("ReduceSum", w("Mul", steps, weights), w.integers(1), keepdims=0)
    last = w("Gather", steps, w.constant(np.array(-1, np.int64)), axis=1)
    y = w("MatMul", w("Concat", pooled, last, axis=1), w.draw(2 * hidden, 5, scale=0.3))
    return w.model((batch, 9, 10), y=(y, (batch, 5)))


def states(op: str, batch: str | int = "N", hidden: int = 13, **attrs: Any) -> onnx.ModelProto:
    """Return two layers, the second starting from the first one's states; all states are outputs."""
    w, count = Writer(), 2
    x = w("Transpose", "x", perm=[1, 0, 2])
    first = w.layer(op, x, 6, hidden, direction="bidirectional", **attrs)
    second = w.layer(op, x, 6, hidden, direction="bidirectional", states=tuple(first[1:]), **attrs)
    shapes = [(7, count, batch, hidden), *[(count, batch, hidden)] * (len(second) - 1)]
    return w.model((batch, 7, 6), **{f"y{i}": pair for i, pair in enumerate(zip(second, shapes, strict=True))})


def learned(batch: str | int = "N", hidden: int = 14) -> onnx.ModelProto:
    """Return a layer with learned initial states, equal for all items."""
    w = Writer()
    batch_of = w("Gather", w("Shape", "x"), w.constant(np.array([0], np.int64)), axis=0)
    shape = w("Concat", w.integers(2), batch_of, w.integers(hidden), axis=0)
    first = tuple(w("Expand", w.draw(2, 1, hidden, scale=0.5), shape) for _ in range(2))
    y = w.layer("LSTM", w("Transpose", "x", perm=[1, 0, 2]), 6, hidden, states=first, direction="bidirectional")[0]
    return w.model((batch, 7, 6), y=(y, (7, 2, batch, hidden)))


def batch_major(batch: str | int = "N") -> onnx.ModelProto:
    """Return a reverse GRU with layout 1, where sequence_lens are all the whole length."""
    w = Writer()
    batch_of = w("Gather", w("Shape", "x"), w.constant(np.array([0], np.int64)), axis=0)
    lengths = w("Expand", w.constant(np.array([8], np.int32)), batch_of)
    y, h = w.layer("GRU", "x", 5, 16, lengths=lengths, layout=1, direction="reverse")
    return w.model((batch, 8, 5), y=(y, (batch, 8, 1, 16)), h=(h, (batch, 1, 16)))


MODELS: Mapping[str, Callable[..., onnx.ModelProto]] = {
    "crnn": crnn,
    "recogniser": recogniser,
    "commands": commands,
    "signals": signals,
    "both ways": both_ways,
    "keras lstm": keras,
    "keras gru": partial(keras, "GRU"),
    "keras rnn of sequences": partial(keras, "RNN", sequences=True),
    "lstm of states": partial(states, "LSTM", peepholes=True),
    "lstm of states, clipped": partial(states, "LSTM", clip=0.6),
    "gru of states": partial(states, "GRU"),
    "rnn of states": partial(states, "RNN", activations=["Relu", "Softsign"]),
    "learned states": learned,
    "batch major": batch_major,
}


def sequences_for(model: onnx.ModelProto, items: int, seed: int = 0) -> NDArray[np.float32]:
    """Return items for a model; a fixed batch overrides `items`."""
    batch, *shape = (d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim)
    return np.random.default_rng(seed).standard_normal((batch or items, *shape)).astype(np.float32)
