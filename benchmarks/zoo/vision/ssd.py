"""Single shot detectors (Liu et al. 2016) of the MLPerf suites.

ResNet-34 on pictures of 1200 x 1200 (data centre), and MobileNet v1 on pictures of 300 x 300 (edge).

Heads at six scales give offsets to anchors and scores; boxes are decoded, and (nms) NonMaxSuppression keeps the best.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.zoo.architecture import architecture
from benchmarks.zoo.builder import Net, Tensor, windows
from benchmarks.zoo.vision.mobile import BLOCKS, depthwise_separable
from benchmarks.zoo.vision.resnet import basic_block, stem

CENTRE_VARIANCE, SIZE_VARIANCE = 0.1, 0.2
MAX_BOXES, OVERLAP, MIN_SCORE = 200, 0.5, 0.05


@architecture(size=1200)
def ssd_resnet34(net: Net, x: Tensor, nms: bool = True, depths: tuple[int, ...] = (3, 4, 6),
                 extra: int = 5) -> dict[str, Tensor]:
    x = stem(net, x)
    for stage, depth in enumerate(depths):
        for block in range(depth):
            with net.scope(f"layer{stage + 1}.{block}"):
                x = basic_block(net, x, net.scaled(64 << stage), 2 if stage == 1 and not block else 1)
    scales = [x]
    further = ((512, 2, 1), (512, 2, 1), (256, 2, 1), (256, 2, 0), (256, 1, 0))
    for index, (out, stride, pads) in enumerate(further[:extra]):
        with net.scope(f"extra.{index}"):
            middle = net.conv_bn_act(scales[-1], net.scaled(out // 2), 1, name="0")
            scales.append(net.conv_bn_act(middle, net.scaled(out), 3, stride=stride, pads=pads, name="1"))
    anchors = (4, 6, 6, 6, 4, 4)[:len(scales)]
    locations, scores = zip(*(_head(net, scale, count, 3, 3, f"head{index}")
                              for index, (scale, count) in enumerate(zip(scales, anchors, strict=True))), strict=True)
    return _detections(net, locations, scores, "softmax", nms)


@architecture(size=300)
def ssd_mobilenet(net: Net, x: Tensor, nms: bool = True, blocks: Sequence[int] = BLOCKS,
                  extra: Sequence[int] = (512, 256, 256, 128)) -> dict[str, Tensor]:
    *_, middle, _, last = depthwise_separable(net, x, blocks)
    scales = [middle, last]
    for index, out in enumerate(extra):
        with net.scope(f"extra.{index}"):
            middle = net.conv_bn_act(scales[-1], net.scaled(out // 2), 1, act="relu6", name="0")
            scales.append(net.conv_bn_act(middle, net.scaled(out), 3, stride=2, act="relu6", name="1"))
    locations, scores = zip(*(_head(net, scale, 6 if index else 3, 1, 1, f"head{index}")
                              for index, scale in enumerate(scales)), strict=True)
    return _detections(net, locations, scores, "sigmoid", nms)


def _head(net: Net, x: Tensor, anchors: int, kernel: int, stride: int, name: str) -> tuple[Tensor, Tensor]:
    """Return offsets [anchors, 4] and scores [anchors, classes] of all positions."""
    rows, cols = windows(x.shape, kernel, stride, kernel // 2)
    outputs = []
    for values, part in ((4, "location"), (net.classes, "score")):
        y = net.conv(x, anchors * values, kernel, stride=stride, bias=True, name=f"{name}.{part}")
        outputs.append(net.reshape(net.transpose(y, 2, 3, 1), rows * cols * anchors, values))
    return outputs[0], outputs[1]


def _detections(net: Net, locations: Sequence[Tensor], scores: Sequence[Tensor], gate: str,
                nms: bool) -> dict[str, Tensor]:
    count = sum(x.shape[0] for x in locations)
    offsets = net.op("Concat", *locations, shape=(count, 4), axis=1)
    logits = net.op("Concat", *scores, shape=(count, net.classes), axis=1)
    boxes = decoded(net, offsets, _anchors(net, count), CENTRE_VARIANCE, SIZE_VARIANCE)
    shares = (net.op("Softmax", logits, shape=logits.shape, axis=2) if gate == "softmax" else net.act(logits, gate))
    by_class = net.transpose(net.slice(shares, 2, 1), 2, 1)        # the first class is the background
    if not nms:
        return {"boxes": boxes, "scores": by_class}
    selected = net.op("NonMaxSuppression", boxes, by_class, net.integers(MAX_BOXES), net.scalar(OVERLAP),
                      net.scalar(MIN_SCORE), shape=(3,), name="nms")
    return {"boxes": boxes, "scores": by_class, "kept": replace(selected, leading="kept", integers=True)}


def _anchors(net: Net, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return boxes [count, (x, y, width, height)] that cover a picture of extent 1."""
    random = np.random.default_rng(count)
    return np.concatenate([random.uniform(0.1, 0.9, (count, 2)), random.uniform(0.05, 0.6, (count, 2))],
                          1).astype(np.float32)


def decoded(net: Net, offsets: Tensor, anchors: np.ndarray[tuple[int, int], np.dtype[np.float32]], centre: float,
            size: float) -> Tensor:
    """Decode boxes to corners: centres shifted by shares of the anchors, sizes scaled by exponentials."""
    centres, extents = anchors[None, :, :2], anchors[None, :, 2:]
    half = (*offsets.shape[:-1], 2)
    moved = net.mul(net.slice(offsets, 2, 0, 2), net.constant(centre * extents))
    grown = net.op("Exp", net.mul(net.slice(offsets, 2, 2, 4), net.scalar(size)), shape=half)
    middles = net.add(moved, net.constant(centres))
    halves = net.mul(grown, net.constant(extents / 2))
    low = net.op("Sub", middles, halves, shape=half)
    return net.op("Concat", low, net.add(middles, halves), shape=offsets.shape, axis=2)
