"""Resolve the symbols of a model's input shapes: one symbol is one extent.

ONNX gives an open extent a name (dim_param) or none. Inputs that share a name share its extent. Extents of different
names may differ, so two of them are both the batch only if the user says so.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from infer_server.engines.errors import ModelError
from infer_server.engines.ir.graph import BATCH, Dim
from infer_server.engines.ir.shapes import text

Shape = Sequence[Dim | None]        # None or BATCH: the batch, or unknown; other strings are symbols


def known_extents(model: str, declared: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the number of each symbol that the `shapes` shapes fix. Raise ModelError if they give it two numbers."""
    known: dict[str, int] = {}
    for name, shape in shapes.items():
        for symbol, extent in zip(declared[name], shape, strict=False):
            if isinstance(symbol, str) and isinstance(extent, int) and extent >= 0 and \
                    known.setdefault(symbol, extent) != extent:
                raise ModelError(f"{model}: the extent '{symbol}' has two values by the given shapes, {known[symbol]} "
                                 f"and {extent} (input '{name}', declared {text(d or '?' for d in declared[name])})")
    return known


def with_known(shape: Shape, known: Mapping[str, int]) -> tuple[Dim | None, ...]:
    """Return a declared shape with known symbols replaced by their numbers."""
    return tuple(known.get(extent, extent) if isinstance(extent, str) else extent for extent in shape)


def refuse_several_batches(model: str, declared: Mapping[str, Shape], shapes: Mapping[str, Shape],
                           batched: Sequence[str]) -> None:
    """Raise ModelError if leading extents of different names are taken for the batch without the user's consent.

    Parameters
    ----------
    declared, shapes : mapping of str to Shape
        The shapes of the inputs in the file, and those that the user gives.
    batched : sequence of str
        The inputs whose leading extent is taken for the batch; those in `shapes` by the user's choice.
    """
    leading = {name: next(iter(declared[name]), None) for name in batched}
    said = {leading[name] for name in batched if name in shapes}
    unsaid = {leading[name] or name for name in batched if name not in shapes and leading[name] not in said}
    if len(unsaid) + bool(said) < 2:
        return
    options = " ".join(f"--shape {name}:{'x'.join(str(d or '?') for d in (BATCH, *declared[name][1:]))}"
                       for name in batched)
    listed = ", ".join(f"'{name}' {text(d or '?' for d in declared[name])}" for name in batched)
    raise ModelError(f"{model}: inputs have leading extents of different names: {listed}. If all of them are the "
                     f"batch, give {options}; else give numbers in place of '{BATCH}'")
