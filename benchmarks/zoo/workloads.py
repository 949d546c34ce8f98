"""Workloads of benchmark suites (MLPerf and its predecessors), at their published sizes and shrunk.

    model = WORKLOADS["bert_large"].full()          # an onnx.ModelProto; pictures.feeds_for makes feeds
    model = WORKLOADS["bert_large"].tiny()          # the same network, small enough for a test
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.recommendation import dlrm
from benchmarks.zoo.sequences.bert import bert
from benchmarks.zoo.sequences.convs2s import convs2s
from benchmarks.zoo.sequences.language import lstm_language_model
from benchmarks.zoo.sequences.speech import deep_speech2, rnnt_decoder
from benchmarks.zoo.vision.generative import dcgan
from benchmarks.zoo.vision.inception import googlenet, inception_v3
from benchmarks.zoo.vision.mask_rcnn import mask_rcnn
from benchmarks.zoo.vision.resnet import resnet18, resnet34, resnet50
from benchmarks.zoo.vision.ssd import ssd_mobilenet, ssd_resnet34
from benchmarks.zoo.vision.vgg import alexnet, vgg16
from benchmarks.zoo.vision.volumes import unet3d


@dataclass(frozen=True)
class Workload:
    """Network of the zoo, with its options and the options of a small variant."""
    build: Architecture
    options: Mapping[str, Any] = field(default_factory=dict)
    shrunk: Mapping[str, Any] = field(default_factory=dict)

    def full(self) -> onnx.ModelProto:
        """Build the network as published."""
        return self.build(**self.options)

    def tiny(self) -> onnx.ModelProto:
        """Build a small network of these layers: fewer, narrower, on smaller inputs."""
        return self.build(**{**self.options, **self.shrunk})


_PICTURE = {"size": 32, "width": 0.25, "classes": 10}
_SHALLOW = {"depths": (1, 1, 1, 1)}
_BOXES = {"size": 64, "width": 0.125, "classes": 5}
_PLAIN = {"nms": False}

WORKLOADS: Mapping[str, Workload] = {
    "alexnet": Workload(alexnet, {}, {**_PICTURE, "size": 64}),
    "googlenet": Workload(googlenet, {}, _PICTURE),
    "vgg16": Workload(vgg16, {}, {**_PICTURE, "width": 0.125}),
    "resnet18": Workload(resnet18, {}, _PICTURE),
    "resnet34": Workload(resnet34, {}, {**_PICTURE, **_SHALLOW}),
    "resnet50": Workload(resnet50, {}, {**_PICTURE, "width": 0.125, **_SHALLOW}),
    "inception_v3": Workload(inception_v3, {"size": 299}, {**_PICTURE, "size": 80, "width": 0.125}),
    "ssd_resnet34": Workload(ssd_resnet34, {"classes": 81, **_PLAIN}, {**_BOXES, "depths": (1, 1), "extra": 1}),
    "ssd_resnet34_nms": Workload(ssd_resnet34, {"classes": 81}),
    "ssd_mobilenet": Workload(ssd_mobilenet, {"classes": 91, **_PLAIN},
                              {**_BOXES, "blocks": (64, 128, 128, 256), "extra": ()}),
    "ssd_mobilenet_nms": Workload(ssd_mobilenet, {"classes": 91}),
    "mask_rcnn": Workload(mask_rcnn, {"classes": 91, **_PLAIN},
                          {**_BOXES, "depths": (1, 1), "proposals": 8, "detections": 4}),
    "mask_rcnn_nms": Workload(mask_rcnn, {"classes": 91}),
    "unet3d": Workload(unet3d, {"classes": 3}, {"size": 8, "filters": (4, 8)}),
    "bert_large": Workload(bert, {}, {"layers": 1, "features": 32, "heads": 4, "length": 12, "vocabulary": 50}),
    "rnnt_decoder": Workload(rnnt_decoder, {}, {"features": 16, "hidden": 12, "joint": 8}),
    "dlrm": Workload(dlrm, {}, {"rows": 20, "bottom": (8,), "top": (8,)}),
    "deep_speech2": Workload(deep_speech2, {}, {"steps": 20, "bands": 17, "hidden": 12, "layers": 2, "width": 0.25}),
    "lstm_language_model": Workload(lstm_language_model, {}, {"vocabulary": 30, "hidden": 12, "steps": 4}),
    "convs2s": Workload(convs2s, {}, {"vocabulary": 30, "embedded": 12, "length": 6, "width": 0.0625,
                                      "layers": ((128, 3), (256, 1))}),
    "dcgan": Workload(dcgan, {}, {"latent": 8, "width": 0.0625}),
}
