"""Functions that build normalised models from descriptions of networks."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from benchmarks.zoo.builder import Net, Tensor
from benchmarks.zoo.pictures import feeds_for, images, probe_items
from benchmarks.zoo.statistics import measure

Outputs = Tensor | dict[str, Tensor]
Describe = Callable[..., Outputs]
Architecture = Callable[..., onnx.ModelProto]
PROBES = 4          # items of other inputs than pictures on which statistics are measured


def architecture(*, size: int, channels: int = 3, batched: bool = True) -> Callable[[Describe], Architecture]:
    """Turn a description (Net, image) -> output or {name: output} into a function that builds the model.

    The function is (width=1.0, size=size, classes=1000, opset=17, batch="N", seed=0, **options of the description)
    -> ModelProto. With batched=False its model takes one picture at a time.
    """
    several: str | int = "N" if batched else 1

    def decorate(describe: Describe) -> Architecture:
        def build(width: float = 1.0, size: int = size, classes: int = 1000, opset: int = 17,
                  batch: str | int = several, seed: int = 0, **options: Any) -> onnx.ModelProto:
            def draw(batch: str | int) -> onnx.ModelProto:
                net = Net(describe.__name__, (channels, size, size), width=width, classes=classes, opset=opset,
                          batch=batch, seed=seed)
                return _finished(net, describe(net, net.input, **options))

            pictures = images(probe_items(size) if batched else 1, channels, size, seed=seed)
            return _normalised(draw(batch), draw(several), {"input": pictures})

        build.__name__, build.__doc__ = describe.__name__, describe.__doc__
        return build
    return decorate


def network(describe: Describe) -> Architecture:
    """Make an architecture from a description (Net) whose inputs are not a picture; it declares them by Net.feed."""
    def build(width: float = 1.0, classes: int = 1000, opset: int = 17, batch: str | int = "N", seed: int = 0,
              **options: Any) -> onnx.ModelProto:
        net = Net(describe.__name__, (), width=width, classes=classes, opset=opset, batch=batch, seed=seed)
        model = _finished(net, describe(net, **options))
        return _normalised(model, model, feeds_for(model, PROBES, seed))

    build.__name__, build.__doc__ = describe.__name__, describe.__doc__
    return build


def _finished(net: Net, outputs: Outputs) -> onnx.ModelProto:
    return net.model(outputs if isinstance(outputs, dict) else {"output": outputs})


def _normalised(model: onnx.ModelProto, probe: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> onnx.ModelProto:
    """Return the model with the normalisation statistics that the network has on these feeds."""
    statistics = measure(probe, feeds)
    for initializer in model.graph.initializer:
        if initializer.name in statistics:
            initializer.CopyFrom(numpy_helper.from_array(statistics[initializer.name], initializer.name))
    return model
