"""DLRM (Naumov et al. 2019) with the sizes for Criteo's Kaggle data.

Bags of embeddings, a bottom and a top MLP, and the products of all pairs of features between them. Tables have at most
100,000 rows.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.zoo.architecture import network
from benchmarks.zoo.builder import Net, Tensor

ROWS = 100_000
# categories of each feature of that data set
CATEGORIES = (1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992,
              5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572)


@network
def dlrm(net: Net, features: int = 16, dense: int = 13, bag: int = 4, rows: int = ROWS,
         bottom: Sequence[int] = (512, 256, 64), top: Sequence[int] = (512, 256)) -> Tensor:
    numbers = _mlp(net, net.feed("dense", dense), (*bottom, features), "bottom")
    vectors = [net.reshape(numbers, 1, features)]
    for index, categories in enumerate(CATEGORIES):
        count = min(categories, rows)
        indices = net.feed(f"sparse{index}", bag, below=count)
        table = net.constant(net.draw(count, features) * 0.5, f"table{index}")
        looked_up = net.op("Gather", table, indices, shape=(bag, features), axis=0)
        vectors.append(net.op("ReduceSum", looked_up, net.integers(1), shape=(1, features), keepdims=1))
    count = len(vectors)
    stacked = net.op("Concat", *vectors, shape=(count, features), axis=1)
    products = net.op("MatMul", stacked, net.transpose(stacked, 2, 1), shape=(count, count))
    below = np.flatnonzero(np.tri(count, k=-1))
    pairs = net.op("Gather", net.reshape(products, count * count), net.constant(below), shape=(len(below),), axis=1)
    joined = net.op("Concat", numbers, pairs, shape=(features + len(below),), axis=1)
    return net.act(net.linear(_mlp(net, joined, top, "top"), 1, name="click"), "sigmoid")


def _mlp(net: Net, x: Tensor, widths: Sequence[int], name: str) -> Tensor:
    for index, width in enumerate(widths):
        x = net.act(net.linear(x, width, name=f"{name}.{index}"), "relu")
    return x
