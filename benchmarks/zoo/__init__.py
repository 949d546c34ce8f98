"""CNN architectures as ONNX models with seeded random weights, for tests and measurements of the compiler.

`workloads.py` adds the models of public benchmark suites, of any kind.

    from benchmarks.zoo import TINY, ZOO, images
    model = ZOO["resnet50"]()                           # full size: width 1, 224x224, 1000 classes, opset 17, batch "N"
    model = TINY["resnet50"](opset=13, batch=1)         # the same network, narrow and on small images
    feeds = {"input": images_for(model, 8)}             # float32 pictures, in a quantity of 8
"""
from __future__ import annotations

from functools import partial

from benchmarks.zoo.architecture import Architecture, architecture
from benchmarks.zoo.builder import Net, Tensor
from benchmarks.zoo.oracle import run_onnx
from benchmarks.zoo.pictures import images, images_for
from benchmarks.zoo.vision import dense_prediction, detection, inception, mobile, oddities, resnet, vgg

__all__ = ["TINY", "ZOO", "Architecture", "Net", "Tensor", "architecture", "images", "images_for", "run_onnx"]

_BY_CLIP = {"hardswish": "hardswish_by_clip", "hardsigmoid": "hardsigmoid_by_clip"}

ZOO: dict[str, Architecture] = {
    "resnet18": resnet.resnet18,
    "resnet50": resnet.resnet50,
    "resnet50_d": resnet.resnet50_d,
    "preact_resnet18": resnet.preact_resnet18,
    "resnext50": resnet.resnext50,
    "regnet_y": resnet.regnet_y,
    "alexnet": vgg.alexnet,
    "vgg16_bn": vgg.vgg16_bn,
    "squeezenet": vgg.squeezenet,
    "googlenet": inception.googlenet,
    "googlenet_lrn": inception.googlenet_lrn,
    "inception_v3": inception.inception_v3,
    "densenet": inception.densenet,
    "mobilenet_v1": mobile.mobilenet_v1,
    "mobilenet_v2": mobile.mobilenet_v2,
    "mobilenet_v3": mobile.mobilenet_v3,
    "mobilenet_v3_by_clip": partial(mobile.mobilenet_v3, **_BY_CLIP),
    "mobilenet_v3_by_op": partial(mobile.mobilenet_v3, hardswish="hardswish"),
    "efficientnet_b0": mobile.efficientnet_b0,
    "efficientnet_lite0": mobile.efficientnet_lite0,
    "efficientnet_v2": mobile.efficientnet_v2,
    "shufflenet_v1": mobile.shufflenet_v1,
    "shufflenet_v2": mobile.shufflenet_v2,
    "shufflenet_v2_by_slices": partial(mobile.shufflenet_v2, by_slices=True),
    "yolo_tiny": detection.yolo_tiny,
    "yolo_v5": detection.yolo_v5,
    "yolo_v5_serial": partial(detection.yolo_v5, focus=False),
    "nanodet": detection.nanodet,
    "unet": dense_prediction.unet,
    "deeplab": dense_prediction.deeplab,
    "super_resolution": dense_prediction.super_resolution,
    "decoder": dense_prediction.decoder,
    "explicit_pads": oddities.explicit_pads,
    "odd_channels": oddities.odd_channels,
    "activations": oddities.activations,
    "pointwise": oddities.pointwise,
    "shared_readers": oddities.shared_readers,
    "views": oddities.views,
    "layout_traps": oddities.layout_traps,
}

# ---- each shrunk until it builds and runs in a fraction of a second, with blocks of every kind; deep ones keep 2x2
# pixels to the end, because statistics of single pixels say little about the next picture, and INT8 suffers
_SHALLOW = {"depths": (1, 2, 1, 1)}
_SHUFFLED = {"depths": (2, 2, 1)}
_DETECTOR: dict[str, object] = {"size": 64, "width": 0.25, "classes": 4}
_SHRUNK: dict[str, dict[str, object]] = {
    **dict.fromkeys(("resnet50", "resnet50_d"), {"width": 0.125, **_SHALLOW}),
    "resnext50": {"width": 0.125, "groups": 4, **_SHALLOW},
    "densenet": {"width": 0.25, "depths": (2, 3, 2, 2)},
    "alexnet": {"size": 64, "width": 0.125},
    "inception_v3": {"size": 80, "width": 0.125},
    **dict.fromkeys(("googlenet", "googlenet_lrn"), {"modules": ("3a", "3b", "4c", "5b")}),
    "preact_resnet18": {"depths": (1, 2, 1, 1)},
    "regnet_y": {"size": 64, "depths": (1, 1, 2, 1)},
    **dict.fromkeys(("mobilenet_v1", "efficientnet_v2"), {"size": 64}),
    **dict.fromkeys(("mobilenet_v2", "efficientnet_b0", "efficientnet_lite0"),
                    {"size": 64, "depths": (1, 2, 1, 1, 2, 1, 1)}),
    **dict.fromkeys((name for name in ZOO if name.startswith("mobilenet_v3")),
                    {"size": 64, "blocks": (0, 1, 2, 3, 4, 6, 8, 9)}),
    **dict.fromkeys((name for name in ZOO if name.startswith("shufflenet")), {"size": 64, **_SHUFFLED}),
    **dict.fromkeys(("yolo_tiny", "yolo_v5", "yolo_v5_serial", "nanodet"), _DETECTOR),
    "nanodet": {**_DETECTOR, **_SHUFFLED},
}
_DEFAULT: dict[str, object] = {"size": 32, "width": 0.25, "classes": 10}

TINY: dict[str, Architecture] = {name: partial(build, **{**_DEFAULT, **_SHRUNK.get(name, {})})
                                 for name, build in ZOO.items()}
