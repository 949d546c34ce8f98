"""ConvS2S (Gehring et al. 2017): translation by gated convolutions, and attention in every layer of the decoder.

As it translates English to German: 15 layers each of 512 to 2,048 features, embeddings of 768. Both sentences are
given, as when a translation is scored.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.zoo.architecture import network
from benchmarks.zoo.builder import Net, Tensor
from benchmarks.zoo.sequences.speech import dense

LAYERS = (*[(512, 3)] * 9, *[(1024, 3)] * 4, *[(2048, 1)] * 2)      # features and kernel of each
HALF = math.sqrt(0.5)


@network
def convs2s(net: Net, vocabulary: int = 42_000, embedded: int = 768, length: int = 32,
            layers: Sequence[tuple[int, int]] = LAYERS) -> Tensor:
    source = _embedding(net, "source", vocabulary, embedded, length)
    x = dense(net, source, net.scaled(layers[0][0]), "encoder.fc1")
    for index, (out, kernel) in enumerate(layers):
        x = _gated(net, x, net.scaled(out), kernel, (kernel // 2, kernel // 2), f"encoder.{index}")
    keys = dense(net, x, embedded, "encoder.fc2")
    values = net.mul(net.add(keys, source), net.scalar(HALF))
    keys = net.transpose(keys, 2, 1)

    target = _embedding(net, "target", vocabulary, embedded, length)
    x = dense(net, target, net.scaled(layers[0][0]), "decoder.fc1")
    for index, (out, kernel) in enumerate(layers):
        with net.scope(f"decoder.{index}"):
            before = x
            x = _gated(net, x, net.scaled(out), kernel, (kernel - 1, 0), "conv", joins=False)
            x = net.mul(net.add(x, _attended(net, x, target, keys, values)), net.scalar(HALF))
            x = _joined(net, before, x)
    return dense(net, dense(net, x, net.scaled(512), "decoder.fc2"), vocabulary, "decoder.fc3")


def _embedding(net: Net, name: str, vocabulary: int, features: int, length: int) -> Tensor:
    """Add word and position embeddings, initialised with small values as in the paper: attention is not scaled."""
    tables = [net.constant(net.draw(rows, features) * 0.1, f"{name}.{kind}")
              for rows, kind in ((vocabulary, "words"), (length, "places"))]
    tokens = net.op("Gather", tables[0], net.feed(name, length, below=vocabulary), shape=(length, features), axis=0)
    return net.add(tokens, net.op("Gather", tables[1], net.constant(np.arange(length)[None]), shape=(length, features)))


def _gated(net: Net, x: Tensor, out: int, kernel: int, pads: tuple[int, int], name: str, joins: bool = True) -> Tensor:
    """Add a gated linear unit: half of the features times the sigmoid of the other half."""
    with net.scope(name):
        length, features = x.shape
        weight = net.draw(2 * out, features, kernel) * np.float32(2 / math.sqrt(kernel * features))
        wide = net.op("Conv", net.transpose(x, 2, 1), net.constant(weight, "weight"),
                      net.constant(net.draw(2 * out) * 0.1, "bias"), shape=(2 * out, length), kernel_shape=[kernel],
                      pads=list(pads))
        half, gate = net.split(wide, 2)
        y = net.transpose(net.mul(half, net.act(gate, "sigmoid")), 2, 1)
        return _joined(net, x, y) if joins else y


def _joined(net: Net, x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape:
        x = dense(net, x, y.shape[-1], "project")
    return net.mul(net.add(x, y), net.scalar(HALF))


def _attended(net: Net, x: Tensor, target: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Add attention to the source; the query combines the decoder's state and the previous word."""
    length = values.shape[0]
    query = net.mul(net.add(dense(net, x, target.shape[-1], "query"), target), net.scalar(HALF))
    scores = net.op("MatMul", query, keys, shape=(x.shape[0], length))
    shares = net.op("Softmax", scores, shape=scores.shape, axis=2)
    attended = net.op("MatMul", shares, values, shape=query.shape)
    return dense(net, net.mul(attended, net.scalar(math.sqrt(length))), x.shape[-1], "found")
