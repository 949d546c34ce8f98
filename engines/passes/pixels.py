"""An image input that takes pixels as they are decoded: uint8, height x width x channels, normalised by the model.

    input float32 [N, C, H, W]  ->  input uint8 [N, H, W, C], Cast, Mul, Add, Transpose

Layout and fusion leave one kernel of that, which writes what the first layer reads; a request is a quarter as long.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.errors import ConfigError
from engines.ir.dtypes import FLOAT
from engines.ir.graph import Graph, TensorType
from engines.passes.rewriting.editor import GraphEditor, renamed


@dataclass(frozen=True)
class Pixels:
    """What the model takes is pixel * scale + shift, channel by channel."""
    scale: tuple[float, ...]
    shift: tuple[float, ...]


def take_pixels(graph: Graph, pixels: Pixels) -> Graph:
    """An imported graph whose one image input, of as many channels as `pixels`, is uint8 and channels last.

    Raises ConfigError: no such input, or several.
    """
    channels = len(pixels.scale)
    images = [name for name in graph.inputs if graph.types[name].dtype == FLOAT and len(graph.shape(name)) == 4
              and channels in (graph.shape(name)[1], graph.shape(name)[3])]
    if len(images) != 1:
        inputs = ", ".join(f"'{name}' {graph.types[name]}" for name in graph.inputs)
        raise ConfigError(f"uint8 pixels are for a model with one float32 input of images of {channels} channels; "
                          f"{graph.name} has {len(images) or 'none'} among its inputs {inputs}")
    name, = images
    return _rewritten(graph, name, pixels)


def _rewritten(graph: Graph, name: str, pixels: Pixels) -> Graph:
    first = graph.shape(name)[1] == len(pixels.scale)           # channels first
    batch, *extents = graph.shape(name)
    shape = (batch, *extents[1:], extents[0]) if first else (batch, *extents)
    editor = GraphEditor(graph)
    editor.types[name] = TensorType(np.dtype(np.uint8), shape)
    real = editor.add(f"{name}.real", "Cast", [name], {"to": FLOAT.name})
    scale, shift = (editor.add_constant(f"{name}.{part}", np.array(numbers, FLOAT))
                    for part, numbers in (("scale", pixels.scale), ("shift", pixels.shift)))
    scaled = editor.add(f"{name}.scaled", "Mul", [real, scale])
    image = editor.add(f"{name}.normalised", "Add", [scaled, shift])
    if first:
        image = editor.add(f"{name}.nchw", "Transpose", [image], {"perm": (0, 3, 1, 2)})
    editor.nodes += [renamed(node, {name: image}) for node in graph.nodes]
    return editor.finish()
