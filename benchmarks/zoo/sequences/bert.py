"""BERT (Devlin et al. 2019) that answers questions: the first and the last token of the answer, by their logits.

Large, as MLPerf runs it on SQuAD: 24 layers of 1,024 features and 16 heads, 384 tokens.
"""
from __future__ import annotations

import numpy as np
from onnx import TensorProto

from benchmarks.zoo.architecture import network
from benchmarks.zoo.builder import Net, Tensor
from benchmarks.zoo.sequences.transformers import LOWEST, Style, become

VOCABULARY, POSITIONS, KINDS = 30_522, 512, 2


@network
def bert(net: Net, layers: int = 24, features: int = 1024, heads: int = 16, length: int = 384,
         vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    net = become(net, Style(norm="div", epsilon=1e-12))
    ids, kinds, counts = (net.feed(name, length, below=below) for name, below in (
        ("input_ids", vocabulary), ("token_type_ids", KINDS), ("attention_mask", 2)))
    x = None
    for name, rows, indices in (("words", vocabulary, ids), ("kinds", KINDS, kinds),
                                ("places", POSITIONS, net.constant(np.arange(length)[None]))):
        table = net.constant(net.draw(rows, features) * 0.5, name)
        part = net.op("Gather", table, indices, shape=(length, features), axis=0)
        x = part if x is None else net.add(x, part)
    assert x is not None
    x = net.norm(x, "norm")
    shares = net.op("Cast", net.unsqueeze(counts, 1, 2, shape=(1, 1, length)), shape=(1, 1, length),
                    to=TensorProto.FLOAT)
    mask = net.mul(net.op("Sub", net.scalar(1), shares, shape=shares.shape), net.scalar(LOWEST))
    for layer in range(layers):
        x = net.block(x, heads, mask, norm_first=False, name=f"layer.{layer}")
    ends = net.split_last(net.dense(x, 2, "answers"), 2)
    return {name: net.reshape(end, length) for name, end in zip(("start", "end"), ends, strict=True)}
