"""An image input that takes pixels as they are decoded: uint8, height x width x channels, normalised by the model.

    input float32 [N, C, H, W]  ->  input uint8 [N, H, W, C], Cast, Mul, Add, Transpose

Layout and fusion leave one kernel of that, which writes what the first layer reads; a request is a quarter as long.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engines.errors import ConfigError
from engines.ir.dtypes import FLOAT
from engines.ir.graph import Graph, TensorType
from engines.ir.pixels import Pixels
from engines.passes.rewriting.editor import GraphEditor, renamed


def types_of_pixels(types: Mapping[str, TensorType], pixels: Pixels) -> dict[str, TensorType]:
    """What is fed for inputs of these types. Raises ConfigError as take_pixels does."""
    name = _image("the model", types, pixels)
    return {**types, name: _of_pixels(types[name], pixels)}


def take_pixels(graph: Graph, pixels: Pixels) -> Graph:
    """An imported graph whose one image input, of as many channels as `pixels`, is uint8 and channels last.

    Raises ConfigError: no such input, or several.
    """
    types = {name: graph.types[name] for name in graph.inputs}
    return _rewritten(graph, _image(graph.name, types, pixels), pixels)


def _image(model: str, types: Mapping[str, TensorType], pixels: Pixels) -> str:
    """The one input that is an image."""
    channels = len(pixels.scale)
    images = [name for name, kind in types.items() if kind.dtype == FLOAT and len(kind.shape) == 4
              and channels in (kind.shape[1], kind.shape[3])]
    if len(images) != 1:
        inputs = ", ".join(f"'{name}' {kind}" for name, kind in types.items())
        raise ConfigError(f"uint8 pixels are for a model with one float32 input of images of {channels} channels; "
                          f"{model} has {len(images) or 'none'} among its inputs {inputs}")
    return images[0]


def _of_pixels(kind: TensorType, pixels: Pixels) -> TensorType:
    """uint8, the channels last."""
    batch, *extents = kind.shape
    first = extents[0] == len(pixels.scale)
    return TensorType(np.dtype(np.uint8), (batch, *extents[1:], extents[0]) if first else kind.shape)


def _rewritten(graph: Graph, name: str, pixels: Pixels) -> Graph:
    first = graph.shape(name)[1] == len(pixels.scale)           # channels first
    editor = GraphEditor(graph)
    editor.types[name] = _of_pixels(graph.types[name], pixels)
    real = editor.add(f"{name}.real", "Cast", [name], {"to": FLOAT.name})
    scale, shift = (editor.add_constant(f"{name}.{part}", np.array(numbers, FLOAT))
                    for part, numbers in (("scale", pixels.scale), ("shift", pixels.shift)))
    scaled = editor.add(f"{name}.scaled", "Mul", [real, scale])
    image = editor.add(f"{name}.normalised", "Add", [scaled, shift])
    if first:
        image = editor.add(f"{name}.nchw", "Transpose", [image], {"perm": (0, 3, 1, 2)})
    editor.nodes += [renamed(node, {name: image}) for node in graph.nodes]
    return editor.finish()
