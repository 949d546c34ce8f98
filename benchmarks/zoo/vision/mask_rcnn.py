"""Mask R-CNN (He et al. 2017) on a feature pyramid of ResNet-50 (Lin et al. 2017), one picture of 800 x 800 at a time.

Each level of the pyramid proposes its best boxes, which are pooled from that level by RoiAlign; of the boxes that the
second stage finds, those that score best get masks. nms: NonMaxSuppression decides which boxes stay, and their number
depends on the picture; without it, a fixed number does.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Net, Tensor
from benchmarks.zoo.vision.resnet import pyramid_base
from benchmarks.zoo.vision.ssd import decoded

ANCHORS = 3                 # at each position of a level
OVERLAP, MIN_SCORE = 0.5, 0.05


@architecture(size=800, batched=False)
def mask_rcnn(net: Net, x: Tensor, nms: bool = True, depths: tuple[int, ...] = (3, 4, 6, 3), proposals: int = 250,
              detections: int = 100) -> dict[str, Tensor]:
    side, pooled, proposed = x.shape[1], [], []
    levels = _pyramid(net, pyramid_base(net, x, depths))
    for index, level in enumerate(levels):
        with net.scope(f"rpn.{index}"):
            boxes = _proposed(net, level, side, min(proposals, ANCHORS * level.shape[1] * level.shape[2]))
            proposed.append(boxes)
            pooled.append(_pooled(net, level, boxes, 7, side))
    count = sum(boxes.shape[0] for boxes in proposed)
    boxes = net.op("Concat", *proposed, shape=(count, 4), axis=0)
    features = net.op("Concat", *pooled, shape=pooled[0].shape, axis=0)
    for layer in range(2):
        features = net.flatten(features) if not layer else features
        features = net.act(net.linear(features, net.scaled(1024), name=f"head.{layer}"), "relu")
    scores = net.op("Softmax", net.linear(features, net.classes, name="head.scores"), shape=(net.classes,), axis=1)
    offsets = net.linear(features, 4, name="head.offsets")      # one box per region, for the best class
    boxes = _moved(net, boxes, offsets)
    best = net.op("ReduceMax", net.slice(scores, 1, 1), shape=(), axes=[1], keepdims=0)
    selected = _selected(net, boxes, best, detections) if nms else _best(net, best, min(detections, count))
    boxes, scores = (net.op("Gather", value, selected, shape=value.shape[-1:], axis=0) for value in (boxes, scores))
    masks = _pooled(net, levels[1], boxes, 14, side)
    for layer in range(4):
        masks = net.act(net.conv(masks, net.scaled(256), 3, bias=True, name=f"mask.{layer}"), "relu")
    masks = net.act(net.conv_transpose(masks, net.scaled(256), 2, name="mask.up"), "relu")
    masks = net.act(net.conv(masks, net.classes, 1, bias=True, name="mask.logits"), "sigmoid")
    leading: str | int = "kept" if nms else min(detections, count)
    return {name: replace(value, leading=leading) for name, value in (
        ("boxes", boxes), ("scores", scores), ("masks", masks))}


def _pyramid(net: Net, stages: list[Tensor]) -> list[Tensor]:
    out = net.scaled(256)
    top = net.conv(stages[-1], out, 1, bias=True, name="fpn.top")
    inner = [top]
    for index in reversed(range(len(stages) - 1)):
        side = net.conv(stages[index], out, 1, bias=True, name=f"fpn.inner{index}")
        inner.insert(0, net.add(side, net.resize(inner[0], 2)))
    return [net.conv(x, out, 3, bias=True, name=f"fpn.layer{index}") for index, x in enumerate(inner)]


def _proposed(net: Net, x: Tensor, side: int, count: int) -> Tensor:
    """Return the `count` boxes of a pyramid level with the highest objectness, [count, 4]."""
    y = net.act(net.conv(x, x.channels, 3, bias=True, name="conv"), "relu")
    total = ANCHORS * x.shape[1] * x.shape[2]
    scores, offsets = (net.reshape(net.transpose(net.conv(y, ANCHORS * values, 1, bias=True, name=name), 2, 3, 1),
                                   total, values) for values, name in ((1, "scores"), (4, "offsets")))
    _, best = net.ops("TopK", net.op("Squeeze", scores, net.integers(0, 2), shape=(total,)), net.integers(count),
                      shapes=[(count,)] * 2, axis=0)
    random = np.random.default_rng(total)
    middles = random.uniform(0.1 * side, 0.9 * side, (total, 2))
    anchors = np.concatenate([middles, np.exp(random.uniform(-0.7, 0.7, (total, 2))) * 8 * side / x.shape[1]], 1)
    boxes = decoded(net, offsets, anchors.astype(np.float32), 0.1, 0.2)
    boxes = net.clip(net.op("Squeeze", boxes, net.integers(0), shape=(total, 4)), 0, side)
    return net.op("Gather", boxes, best, shape=(count, 4), axis=0)


def _pooled(net: Net, x: Tensor, boxes: Tensor, size: int, side: int) -> Tensor:
    """Add RoiAlign of each box on the one picture."""
    rows = net.op("Gather", net.op("Shape", boxes, shape=()), net.integers(0), shape=())
    which = net.op("Expand", net.integers(0), rows, shape=())
    return net.op("RoiAlign", x, boxes, which, shape=(x.channels, size, size), mode="avg", output_height=size,
                  output_width=size, sampling_ratio=2, spatial_scale=x.shape[1] / side)


def _moved(net: Net, boxes: Tensor, offsets: Tensor) -> Tensor:
    """Move the corners of boxes by the second stage's offsets, in units of ten pixels."""
    return net.add(boxes, net.mul(net.act(offsets, "tanh"), net.scalar(10.0)))


def _best(net: Net, scores: Tensor, count: int) -> Tensor:
    _, best = net.ops("TopK", scores, net.integers(count), shapes=[(count,)] * 2, axis=0)
    return best


def _selected(net: Net, boxes: Tensor, scores: Tensor, most: int) -> Tensor:
    """Return the indices of the boxes that NonMaxSuppression keeps; their number depends on the data."""
    each = net.op("Unsqueeze", boxes, net.integers(0), shape=boxes.shape)
    weights = net.op("Unsqueeze", scores, net.integers(0, 1), shape=())
    selected = net.op("NonMaxSuppression", each, weights, net.integers(most), net.scalar(OVERLAP),
                      net.scalar(MIN_SCORE), shape=(), name="nms")
    return net.op("Gather", selected, net.constant(np.array(2, np.int64)), shape=(), axis=1)
