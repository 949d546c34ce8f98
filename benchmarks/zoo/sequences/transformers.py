"""Tiny transformers in the forms that exporters write.

Sentence encoders (Devlin et al. 2019), ViT (Dosovitskiy et al. 2021), and a text recogniser of convolutions and
attention (SVTR, Du et al. 2022).

Options choose between equivalent forms of exporters: a layer norm as one operator or as its arithmetic, GELU by erf or
by tanh, a mask by arithmetic or by Where, q, k and v as three products or as one.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Net, Tensor

VOCABULARY = 50
LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Style:
    """Forms in which an exporter writes the parts of a transformer."""
    norm: str = "operator"          # "operator" (opset 17), "div", "reciprocal"
    gelu: str = "erf"               # "erf", "tanh"
    mask: str = "arithmetic"        # "arithmetic", "where", "none"
    together: bool = False          # q, k and v are slices of one product
    epsilon: float = 1e-5


class Transformer(Net):
    """Builder of transformer layers on [batch, tokens, features]; a Tensor's shape is (tokens, features)."""

    def __init__(self, *arguments: Any, style: Style, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.style = style

    def dense(self, x: Tensor, out: int, name: str) -> Tensor:
        with self.scope(name):
            weight = self.draw(x.shape[-1], out) / np.float32(math.sqrt(x.shape[-1]))
            y = self.op("MatMul", x, self.constant(weight), shape=(*x.shape[:-1], out))
            return self.op("Add", self.constant(self.draw(out) * 0.1, "bias"), y, shape=y.shape)

    def norm(self, x: Tensor, name: str) -> Tensor:
        with self.scope(name):
            width = x.shape[-1]
            scale = self.constant(1 + self.draw(width) * 0.2, "weight")
            bias = self.constant(self.draw(width) * 0.2, "bias")
            if self.style.norm == "operator":
                return self.op("LayerNormalization", x, scale, bias, shape=x.shape, axis=-1, epsilon=self.style.epsilon)
            one = (*x.shape[:-1], 1)
            centred = self.op("Sub", x, self.op("ReduceMean", x, shape=one, axes=[-1]), shape=x.shape)
            squares = self.op("Pow", centred, self.scalar(2), shape=x.shape)
            variance = self.op("ReduceMean", squares, shape=one, axes=[-1])
            root = self.op("Sqrt", self.add(variance, self.scalar(self.style.epsilon)), shape=one)
            if self.style.norm == "div":
                y = self.op("Div", centred, root, shape=x.shape)
            else:
                y = self.mul(centred, self.op("Reciprocal", root, shape=one))
            return self.add(self.mul(y, scale), bias)

    def gelu(self, x: Tensor) -> Tensor:
        if self.style.gelu == "erf":
            return self.act(x, "gelu")
        cube = self.op("Pow", x, self.scalar(3), shape=x.shape)
        inner = self.add(x, self.mul(cube, self.scalar(0.044715)))
        turned = self.op("Tanh", self.mul(inner, self.scalar(math.sqrt(2 / math.pi))), shape=x.shape)
        return self.mul(self.mul(x, self.scalar(0.5)), self.add(turned, self.scalar(1)))

    def heads(self, x: Tensor, heads: int, *order: int) -> Tensor:
        tokens, width = x.shape
        return self.transpose(self.reshape(x, tokens, heads, width // heads), *order)

    def attention(self, x: Tensor, heads: int, mask: Tensor | None) -> Tensor:
        tokens, width = x.shape
        scale = self.scalar(1 / math.sqrt(width // heads))
        if self.style.together:
            three = self.reshape(self.dense(x, 3 * width, "qkv"), tokens, 3, heads, width // heads)
            three = self.op("Transpose", three, shape=(), perm=[2, 0, 3, 1, 4])
            shape = (heads, tokens, width // heads)
            q, k, v = (self.op("Gather", three, self.constant(np.array(i, np.int64)), shape=shape, axis=0)
                       for i in range(3))
            q, k = self.mul(q, scale), self.transpose(k, 1, 3, 2)
        else:
            q = self.mul(self.heads(self.dense(x, width, "query"), heads, 2, 1, 3), scale)
            k = self.heads(self.dense(x, width, "key"), heads, 2, 3, 1)
            v = self.heads(self.dense(x, width, "value"), heads, 2, 1, 3)
        scores = self.op("MatMul", q, k, shape=(heads, tokens, tokens))
        if mask is not None and self.style.mask == "arithmetic":
            scores = self.add(scores, mask)
        elif mask is not None:
            scores = self.op("Where", mask, scores, self.scalar(LOWEST), shape=scores.shape)
        shares = self.op("Softmax", scores, shape=scores.shape, axis=-1 if self.opset >= 13 else 3)
        mixed = self.transpose(self.op("MatMul", shares, v, shape=(heads, tokens, width // heads)), 2, 1, 3)
        return self.dense(self.reshape(mixed, tokens, width), width, "output")

    def block(self, x: Tensor, heads: int, mask: Tensor | None, *, norm_first: bool, name: str) -> Tensor:
        with self.scope(name):
            if norm_first:
                x = self.add(x, self.attention(self.norm(x, "norm1"), heads, mask))
                return self.add(x, self.feed_forward(self.norm(x, "norm2")))
            x = self.norm(self.add(x, self.attention(x, heads, mask)), "norm1")
            return self.norm(self.add(self.feed_forward(x), x), "norm2")

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.dense(self.gelu(self.dense(x, 4 * x.shape[-1], "up")), x.shape[-1], "down")

    def clip_below(self, x: Tensor, low: float) -> Tensor:
        if self.opset < 11:
            return self.op("Clip", x, shape=x.shape, min=low)
        return self.op("Clip", x, self.scalar(low), shape=x.shape)

    def unsqueeze(self, x: Tensor, *axes: int, shape: tuple[int, ...]) -> Tensor:
        if self.opset < 13:
            return self.op("Unsqueeze", x, shape=shape, axes=list(axes))
        return self.op("Unsqueeze", x, self.integers(*axes), shape=shape)

    def split_last(self, x: Tensor, parts: int) -> list[Tensor]:
        """Split the last axis into equal parts."""
        size = x.shape[-1] // parts
        return self.ops("Split", x, self.integers(*[size] * parts), shapes=[(*x.shape[:-1], size)] * parts, axis=-1)

    def total(self, x: Tensor, axis: int, *, shape: tuple[int, ...], keepdims: int = 0) -> Tensor:
        if self.opset < 13:
            return self.op("ReduceSum", x, shape=shape, axes=[axis], keepdims=keepdims)
        return self.op("ReduceSum", x, self.integers(axis), shape=shape, keepdims=keepdims)


def sentence_encoder(*, style: Style = Style(), opset: int = 17, batch: str | int = "N", length: int = 12,
                     width: int = 32, heads: int = 4, layers: int = 2, pooling: str = "mean",
                     token_types: bool = False, seed: int = 0) -> onnx.ModelProto:
    """Build input_ids, attention_mask (and token_type_ids) -> last_hidden_state and embedding.

    pooling: "mean" over unmasked tokens, normalised to unit length; or "first", the first token through a tanh layer.
    """
    net = Transformer("encoder", (length,), style=style, opset=opset, batch=batch, seed=seed)
    ids, counts = Tensor("input_ids", (length,)), Tensor("attention_mask", (length,))
    names = ["input_ids", "attention_mask", *["token_type_ids"] * token_types]

    def table(rows: int, name: str) -> str:
        return net.constant(net.draw(rows, width) * 0.5, name)

    x = net.op("Gather", table(VOCABULARY, "words"), ids, shape=(length, width), axis=0)
    if token_types:
        kinds = net.op("Gather", table(2, "kinds"), Tensor("token_type_ids", (length,)), shape=(length, width), axis=0)
        x = net.add(x, kinds)
    positions = net.op("Gather", table(4 * length, "places"), net.constant(np.arange(length)[None]),
                       shape=(length, width))
    x = net.norm(net.add(x, positions), "norm")

    shares = net.op("Cast", counts, shape=(length,), to=TensorProto.FLOAT)
    mask = None
    if style.mask == "arithmetic":
        mask = net.unsqueeze(net.op("Sub", net.scalar(1), shares, shape=(length,)), 1, 2, shape=(1, 1, length))
        mask = net.mul(mask, net.scalar(LOWEST))
    elif style.mask == "where":
        mask = net.op("Greater", counts, net.constant(np.array(0, np.int64)), shape=(length,))
        mask = net.unsqueeze(mask, 1, 2, shape=(1, 1, length))
    for layer in range(layers):
        x = net.block(x, heads, mask, norm_first=False, name=f"layer.{layer}")

    if pooling == "first":
        first = net.op("Gather", x, net.constant(np.array(0, np.int64)), shape=(width,), axis=1)
        embedding = net.act(net.linear(first, width, name="pooler"), "tanh")
    else:
        each = net.unsqueeze(shares, 2, shape=(length, 1))
        embedding = net.op("Div", net.total(net.mul(x, each), 1, shape=(width,)),
                           net.clip_below(net.total(each, 1, shape=(1,)), 1e-9), shape=(width,))
        norm = net.clip_below(net.op("ReduceL2", embedding, shape=(1,), axes=[1], keepdims=1), 1e-12)
        embedding = net.op("Div", embedding, norm, shape=(width,))
    return with_integer_inputs(net.model({"last_hidden_state": x, "embedding": embedding}), names, [batch, length])


def with_integer_inputs(model: onnx.ModelProto, names: Sequence[str], shape: Sequence[str | int]) -> onnx.ModelProto:
    """Replace the model's image by int64 inputs of these names."""
    del model.graph.input[:]
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in names)
    return model


def tokens(model: onnx.ModelProto, count: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return inputs of `count` sentences of different lengths."""
    random = np.random.default_rng(seed)
    length = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    mask = (np.arange(length) < random.integers(2, length + 1, (count, 1))).astype(np.int64)
    feeds = {"input_ids": random.integers(0, VOCABULARY, (count, length)) * mask, "attention_mask": mask,
             "token_type_ids": random.integers(0, 2, (count, length))}
    return {value.name: feeds[value.name] for value in model.graph.input}


@architecture(size=32)
def vit(net: Net, x: Tensor) -> Tensor:
    """Build ViT: patches, a class token in front, position embeddings, and pre-norm blocks."""
    net = become(net, Style(together=True))
    width = 32
    x = net.conv(x, width, 8, stride=8, pads=0, bias=True, name="patches")
    count = x.shape[1] * x.shape[2]
    x = net.transpose(net.reshape(x, width, count), 2, 1)
    size = net.op("Gather", net.op("Shape", x, shape=()), net.constant(np.array([0], np.int64)), shape=())
    target = net.op("Concat", size, net.integers(-1, -1), shape=(), axis=0)
    minus = net.integers(-1, -1, -1)
    target = net.op("Where", net.op("Equal", target, minus, shape=()), net.integers(1, 1, 1), target, shape=())
    first = net.op("Expand", net.constant(net.draw(1, 1, width), "class_token"), target, shape=(1, width))
    x = net.op("Concat", first, x, shape=(count + 1, width), axis=1)
    x = net.add(x, net.constant(net.draw(1, count + 1, width) * 0.5, "places"))
    for block in range(2):
        x = net.block(x, 4, None, norm_first=True, name=f"blocks.{block}")
    x = net.op("Gather", net.norm(x, "norm"), net.constant(np.array(0, np.int64)), shape=(width,), axis=1)
    return net.linear(x, net.classes, name="head")


@architecture(size=32)
def recogniser(net: Net, x: Tensor, attends: bool = True) -> Tensor:
    """Build a text recogniser: rows are reduced to one, columns are the sequence, with a softmax over the alphabet."""
    net = become(net, Style(norm="div", together=True))
    act = "hardswish_by_clip"
    x = net.conv_bn_act(x, 8, 3, stride=2, act=act, name="stem")
    x = net.conv_bn_act(x, 8, 3, groups=8, act=act, name="depthwise")
    x = net.squeeze_excite(x, 4, gate="hardsigmoid", name="excite")
    x = net.conv_bn_act(x, 24, 1, act=act, name="pointwise")
    x = net.op("AveragePool", x, shape=(24, 1, x.shape[2] // 2), kernel_shape=[x.shape[1], 2], strides=[x.shape[1], 2])
    columns = x.shape[2]
    x = net.transpose(net.reshape(x, 24, columns), 2, 1)
    if attends:
        x = net.block(x, 4, None, norm_first=True, name="mixing")
    x = net.norm(x, "norm")
    x = net.dense(x, net.classes, "fc")
    return net.op("Softmax", x, shape=x.shape, axis=2)


def become(net: Net, style: Style) -> Transformer:
    """Return a Transformer that continues a net."""
    result = Transformer.__new__(Transformer)
    result.__dict__.update(net.__dict__)
    result.style = style
    return result
