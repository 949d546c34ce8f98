"""build-engine --dims and --batch-first: the shapes that a server's configuration gives inputs, which may leave out the
batch."""
from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.frontend.inputs import is_size
from engines.frontend.onnx_file import declared_inputs
from engines.ir.graph import Dim

Dims = tuple[int, ...]
Extents = Sequence[Dim | None]
Shape = tuple[int | None, ...]          # None: the batch, or an extent that stays open


def parse_dims(text: str) -> tuple[str, Dims]:
    """"x:3x-1x224" -> ("x", (3, -1, 224))"""
    name, colon, extents = text.rpartition(":")
    try:
        return name, tuple(int(extent) for extent in extents.split("x") if extents)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME:3x-1x224") from None


def given_shapes(model: str, dims: Mapping[str, Dims], batch_first: bool) -> dict[str, Shape]:
    """The shapes to build for: of the inputs whose extents the model leaves open, and all of `dims` are numbers; of
    those of unknown rank, all that dims say.

    batch_first: the leading extent of every input is the batch, if it is open; a model that leaves these extents
    without a name, or gives each one its own, does not say so. What does not fit is left out here: the server compares
    the engine with its configuration, and says so.
    """
    declared = {name: kind.extents for name, kind in declared_inputs(Path(model)).items()}
    every = {name: extents for name, extents in declared.items() if extents}
    opened = [extents[0] for extents in every.values() if not is_size(extents[0])]
    said = batch_first and len(opened) > 1 and (None in opened or len(set(opened)) > 1)
    shapes: dict[str, Shape] = {
        name: ((None,) if batch_first else ()) + tuple(None if extent == -1 else extent for extent in dims[name])
        for name, extents in declared.items() if extents is None and name in dims}
    for name, extents in every.items():
        if fixed := _fixed(extents, dims.get(name)):
            shapes[name] = fixed
        elif said and not is_size(extents[0]):
            shapes[name] = (None, *(extent if isinstance(extent, int) else None for extent in extents[1:]))
    return shapes


def _fixed(extents: Extents, dims: Dims | None) -> Shape | None:
    """The shape of an input that leaves extents open behind its batch; None: dims do not say all of them."""
    if dims is None or all(isinstance(extent, int) for extent in extents[1:]):
        return None
    whole = dims if len(dims) == len(extents) else (-1, *dims)
    if len(whole) != len(extents) or -1 in whole[1:]:
        return None
    return (None if whole[0] == -1 else whole[0], *whole[1:])
