"""build-engine --dims: the shapes that a server's configuration gives inputs, which may leave out the batch."""
from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from engines.frontend.onnx_file import read_model

Dims = tuple[int, ...]


def parse_dims(text: str) -> tuple[str, Dims]:
    """"x:3x-1x224" -> ("x", (3, -1, 224))"""
    name, colon, extents = text.rpartition(":")
    try:
        return name, tuple(int(extent) for extent in extents.split("x") if extents)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME:3x-1x224") from None


def fixed_shapes(model: str, given: Mapping[str, Dims]) -> dict[str, tuple[int | None, ...]]:
    """The shapes to build for: of the inputs whose extents the model leaves open, and all of `given` are numbers.

    What does not fit is left out here: the server compares the engine with its configuration, and says so.
    """
    shapes: dict[str, tuple[int | None, ...]] = {}
    for name, declared in read_model(Path(model)).declared().items():
        dims, extents = given.get(name), declared.extents
        if dims is None or extents is None or all(isinstance(extent, int) for extent in extents[1:]):
            continue
        whole = dims if len(dims) == len(extents) else (-1, *dims)
        if len(whole) == len(extents) and -1 not in whole[1:]:
            shapes[name] = (None if whole[0] == -1 else whole[0], *whole[1:])
    return shapes
