"""Options --dims, --batch-first and --constant of build-engine: shapes and values of inputs.

Shapes of --dims are those of a server's configuration, which may omit the batch.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from infer_server.engines.frontend.inputs import Value, is_size
from infer_server.engines.frontend.onnx_file import declared_inputs
from infer_server.engines.ir.graph import Dim

Dims = tuple[int, ...]
Extents = Sequence[Dim | None]
Shape = tuple[int | None, ...]          # None is the batch, or an extent that stays open


def parse_constant(text: str) -> tuple[str, Value]:
    """Parse "sr=16000" to ("sr", 16000) and "sizes=[64, 64]" to ("sizes", [64, 64])."""
    name, _, value = text.partition("=")
    try:
        number = json.loads(value)
        if name and np.asarray(number).dtype.kind in "bif":
            return name, number
    except ValueError:      # not JSON, or a ragged list
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not NAME=16000 or NAME=[64,64]")


def parse_dims(text: str) -> tuple[str, Dims]:
    """Parse "x:3x-1x224" to ("x", (3, -1, 224))."""
    name, colon, extents = text.rpartition(":")
    try:
        return name, tuple(int(extent) for extent in extents.split("x") if extents)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME:3x-1x224") from None


def shapes_of_dims(model: str, dims: Mapping[str, Dims], batch_first: bool) -> dict[str, Shape]:
    """Return the shapes to build for, by input.

    These are inputs with open extents whose `dims` are all numbers, and inputs of unknown rank with any dims. Dims that
    do not match the model are ignored here: the server compares the engine with its configuration and reports them.

    Parameters
    ----------
    model : str
        Path of the ONNX file.
    dims : mapping of str to tuple of int
        Values of --dims.
    batch_first : bool
        True if the leading extent of every input is the batch, if it is open. Models that leave these extents unnamed,
        or name each differently, do not say so themselves.
    """
    declared = {name: kind.extents for name, kind in declared_inputs(Path(model)).items()}
    every = {name: extents for name, extents in declared.items() if extents}
    opened = [extents[0] for extents in every.values() if not is_size(extents[0])]
    is_unnamed = batch_first and len(opened) > 1 and (None in opened or len(set(opened)) > 1)
    shapes: dict[str, Shape] = {
        name: ((None,) if batch_first else ()) + tuple(None if extent == -1 else extent for extent in dims[name])
        for name, extents in declared.items() if extents is None and name in dims}
    for name, extents in every.items():
        if fixed := _fixed(extents, dims.get(name)):
            shapes[name] = fixed
        elif is_unnamed and not is_size(extents[0]):
            shapes[name] = (None, *(extent if isinstance(extent, int) else None for extent in extents[1:]))
    return shapes


def _fixed(extents: Extents, dims: Dims | None) -> Shape | None:
    """Return the shape of an input with open extents after the batch; None if dims do not fix all of them."""
    if dims is None or all(isinstance(extent, int) for extent in extents[1:]):
        return None
    whole = dims if len(dims) == len(extents) else (-1, *dims)
    if len(whole) != len(extents) or -1 in whole[1:]:
        return None
    return (None if whole[0] == -1 else whole[0], *whole[1:])
