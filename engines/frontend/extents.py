"""Symbolic extents of a model's inputs: every open extent other than the batch gets a name.

An extent's name in ONNX (dim_param) stands for one number in all inputs. An extent without a name gets a unique one,
"x.2" for axis 2 of the input x.

The batch is the open leading extent of the inputs if it is equal for all of them and is no other axis of any input:
then a plan takes any number of items. Other leading extents are symbolic extents like the rest.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.inputs import IMAGE_SIDE, LENGTH, Declared, checked_shapes, is_size
from infer_server.engines.frontend.symbols import known_extents
from infer_server.engines.ir.graph import BATCH, Dim, TensorType

Shape = Sequence[Dim | None]        # None: unknown; in a shape that the user gives, the batch
SOME = 16                           # default number of cached tokens of a decoder
SINGLE = "items"                    # name of a symbol that is called BATCH but is not the batch


def open_types(model: str, declared: Mapping[str, Declared], shapes: Mapping[str, Shape],
               keep_batch: bool = False) -> dict[str, TensorType]:
    """Return the type of each input, with a name for every open extent and BATCH for the batch.

    Parameters
    ----------
    model : str
        The model's name, for errors.
    declared : mapping of str to Declared
        The inputs as the file declares them.
    shapes : mapping of str to sequence
        Shapes of inputs as in `graph_from_onnx`; extents that they leave out stay open.
    keep_batch : bool
        Keep an open leading extent open even if `shapes` has a number for it.

    Raises
    ------
    ModelError
        If a shape does not fit the declared one, or an input of unknown rank has none.
    """
    given = checked_shapes(model, declared, shapes)
    numbers = {name: (None, *shape[1:]) if keep_batch else shape for name, shape in given.items()}
    extents = {name: list(kind.extents or ()) for name, kind in declared.items()}
    known = known_extents(model, extents, numbers)
    named: dict[str, list[Dim]] = {}
    for name, kind in declared.items():
        shape = given.get(name, kind.extents)
        if shape is None:
            raise ModelError(f"{model}: input '{name}' has no declared rank; give its shape, as in "
                             f"{kind.option()}")
        symbols = kind.extents if kind.extents is not None else shape
        opened = keep_batch and symbols and not is_size(symbols[0])
        named[name] = [_name(name, axis, symbol, None if opened and not axis else extent, known)
                       for axis, (symbol, extent) in enumerate(zip(symbols, shape, strict=True))]
    said = {named[name][0] for name, shape in given.items() if shape and not is_size(shape[0])}
    batches = _batches(named.values(), said)
    return {name: TensorType(declared[name].dtype, tuple(BATCH if not axis and extent in batches else extent
                                                         for axis, extent in enumerate(shape)))
            for name, shape in named.items()}


def without_batch(types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Return the types with the batch as the symbolic extent SINGLE."""
    return {name: replace(kind, shape=tuple(SINGLE if extent == BATCH else extent for extent in kind.shape))
            for name, kind in types.items()}


def open_extents(types: Mapping[str, TensorType]) -> tuple[str, ...]:
    """Return the names of the symbolic extents other than the batch, in the order of the inputs."""
    return tuple(dict.fromkeys(extent for kind in types.values() for extent in kind.shape
                               if isinstance(extent, str) and extent != BATCH))


def is_decoder(types: Mapping[str, TensorType]) -> bool:
    """Return True if an input holds keys and values of earlier tokens, as of a language model that generates."""
    return any(map(_is_past, types))


def likely_extents(types: Mapping[str, TensorType], past: int = SOME, new: int = 1) -> dict[str, int]:
    """Return a number for each open extent that suits most models.

    Parameters
    ----------
    types : mapping
        The types of the inputs.
    past : int
        The number of cached tokens in the inputs of a decoder.
    new : int
        The number of tokens behind them.

    Returns
    -------
    dict
        224 x 224 for pictures, 128 for sequences, 1 for items; for a decoder one token in addition to the past ones.
    """
    if is_decoder(types):
        return _extents_of_decoder(types, past, new)
    numbers: dict[str, int] = {}
    for kind in types.values():
        picture = len(kind.shape) == 4 and {1, 3, 4}.intersection(kind.shape[1:])
        for axis, extent in enumerate(kind.shape):
            if isinstance(extent, str) and extent != BATCH:
                numbers.setdefault(extent, 1 if not axis and len(kind.shape) > 1 else IMAGE_SIDE if picture else LENGTH)
    return numbers


def _extents_of_decoder(types: Mapping[str, TensorType], past: int, new: int) -> dict[str, int]:
    """Return `past` for open extents of caches, `new` for those of other inputs, and their sum for those of masks."""
    numbers: dict[str, int] = {}
    for wanted, number in ((_is_past, past), (lambda name: not _is_mask(name), new), (_is_mask, past + new)):
        for name, kind in types.items():
            for axis, extent in enumerate(kind.shape):
                if wanted(name) and isinstance(extent, str) and extent != BATCH:
                    numbers.setdefault(extent, number if axis else 1)
    return numbers


def _is_past(name: str) -> bool:
    return "past" in name.lower() and "length" not in name.lower()


def _is_mask(name: str) -> bool:
    return "mask" in name.lower()


def shapes_for(types: Mapping[str, TensorType], extents: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
    """Return the inputs' shapes for these extents, in the form of `graph_from_onnx`: None is the batch."""
    return {name: tuple(extent if isinstance(extent, int) else None if extent == BATCH else extents[extent]
                        for extent in kind.shape) for name, kind in types.items()}


def _name(name: str, axis: int, symbol: Dim | None, size: Dim | None, known: Mapping[str, int]) -> Dim:
    """Return the user's or the declared size, the declared symbol or its number in `known`, or a unique name."""
    if is_size(size):
        return size                 # type: ignore[return-value]
    if is_size(symbol):
        return symbol               # type: ignore[return-value]
    if not isinstance(symbol, str):
        return f"{name}.{axis}"
    return known.get(symbol, SINGLE if symbol == BATCH else symbol)


def _batches(shapes: Iterable[Sequence[Dim]], declared: Set[Dim]) -> Set[str]:
    """Return the symbols of the batch: leading ones that the user gave, else the only one that is just leading."""
    inner = {extent for shape in shapes for extent in shape[1:] if isinstance(extent, str)}
    leading = {shape[0] for shape in shapes if shape and isinstance(shape[0], str)} - inner
    if declared:
        return leading & declared
    return leading if len(leading) == 1 else set()
