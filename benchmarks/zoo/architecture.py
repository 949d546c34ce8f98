"""Makes a description of a network a function that builds its model, normalised by the statistics of pictures."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnx import numpy_helper

from benchmarks.zoo.builder import Net, Tensor
from benchmarks.zoo.pictures import images, probe_items
from benchmarks.zoo.statistics import measure

Describe = Callable[..., Tensor | dict[str, Tensor]]
Architecture = Callable[..., onnx.ModelProto]


def architecture(*, size: int, channels: int = 3) -> Callable[[Describe], Architecture]:
    """Makes a description (Net, image) -> output or {name: output} a function that builds the model:

    (width=1.0, size=size, classes=1000, opset=17, batch="N", seed=0, **options of the description) -> ModelProto
    """
    def decorate(describe: Describe) -> Architecture:
        def build(width: float = 1.0, size: int = size, classes: int = 1000, opset: int = 17,
                  batch: str | int = "N", seed: int = 0, **options: Any) -> onnx.ModelProto:
            def draw(batch: str | int) -> onnx.ModelProto:
                net = Net(describe.__name__, (channels, size, size), width=width, classes=classes, opset=opset,
                          batch=batch, seed=seed)
                outputs = describe(net, net.input, **options)
                return net.model(outputs if isinstance(outputs, dict) else {"output": outputs})

            statistics = measure(draw("N"), images(probe_items(size), channels, size, seed=seed))
            model = draw(batch)
            for initializer in model.graph.initializer:
                if initializer.name in statistics:
                    initializer.CopyFrom(numpy_helper.from_array(statistics[initializer.name], initializer.name))
            return model

        build.__name__, build.__doc__ = describe.__name__, describe.__doc__
        return build
    return decorate
