"""Let an image input take decoded pixels: uint8 [N, H, W, C], normalised inside the graph.

    input float32 [N, C, H, W]  ->  input uint8 [N, H, W, C], Cast, Mul, Add, Transpose

Layout and fusion turn this into one kernel that writes the first layer's input; requests have a quarter of the bytes.
"""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from infer_server.engines.errors import ConfigError
from infer_server.engines.ir.dtypes import FLOAT
from infer_server.engines.ir.graph import Graph, TensorType
from infer_server.engines.ir.recipe import Pixels
from infer_server.engines.passes.rewriting.editor import GraphEditor, renamed


def types_of_pixels(types: Mapping[str, TensorType], pixels: Pixels) -> dict[str, TensorType]:
    """Return the input types of a model whose image input takes pixels. Raise ConfigError as `take_pixels` does."""
    name = _image("the model", types, pixels)
    return {**types, name: _of_pixels(types[name], pixels)}


def take_pixels(graph: Graph, pixels: Pixels) -> Graph:
    """Rewrite an imported graph so that its image input is uint8 [N, H, W, C], scaled and shifted per channel.

    Parameters
    ----------
    graph : Graph
        An imported graph with one float32 input of rank 4 that has as many channels as `pixels`, first or last.
    pixels : Pixels
        The scale and shift of each channel.

    Raises
    ------
    ConfigError
        If there is no such input, or more than one.
    """
    types = {name: graph.types[name] for name in graph.inputs}
    return _rewritten(graph, _image(graph.name, types, pixels), pixels)


def _image(model: str, types: Mapping[str, TensorType], pixels: Pixels) -> str:
    """Return the name of the only input that is an image."""
    channels = len(pixels.scale)
    images = [name for name, kind in types.items() if kind.dtype == FLOAT and len(kind.shape) == 4
              and channels in (kind.shape[1], kind.shape[3])]
    if len(images) != 1:
        inputs = ", ".join(f"'{name}' {kind}" for name, kind in types.items())
        raise ConfigError(f"uint8 pixels are for a model with one float32 input of images of {channels} channels; "
                          f"{model} has {len(images) or 'none'} among its inputs {inputs}")
    return images[0]


def _of_pixels(kind: TensorType, pixels: Pixels) -> TensorType:
    """Return the type of the pixels for an image input: uint8 [N, H, W, C]."""
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
