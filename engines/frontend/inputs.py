"""Inputs of a model: declarations of the file combined with shapes and constants of the user."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from infer_server.engines.capacity import bytes_of, too_large
from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.symbols import known_extents, refuse_several_batches, with_known
from infer_server.engines.ir.graph import BATCH, Array, Dim, TensorType
from infer_server.engines.ir.shapes import MOST_AXES, text

IMAGE_SIDE, LENGTH = 224, 128       # likely extents of pictures and of sequences
_ANY_IMAGE = (None, 3, "height", "width")

Shape = Sequence[Dim | None]        # None: unknown; in a shape that the user gives, the batch


def input_types(model: str, declared: Mapping[str, Declared], shapes: Mapping[str, Shape],
                keep_batch: bool) -> dict[str, TensorType]:
    """Return the type of each input, with numbers for all extents other than the batch; see `graph_from_onnx`.

    Raises
    ------
    ModelError
        If a shape is for an unknown input or does not fit the declared one, an extent is not known (the error lists
        all such inputs), or an input is too large or has too many axes.
    """
    shapes = checked_shapes(model, declared, shapes)
    extents = {name: list(given.extents or ()) for name, given in declared.items()}
    numbers = {name: (None, *shape[1:]) if keep_batch else shape for name, shape in shapes.items()}
    known = known_extents(model, extents, numbers)
    wanted = {name: given.with_known(known).shape(shapes.get(name), keep_batch)
              for name, given in declared.items()}
    if missing := [name for name, shape in wanted.items() if shape is None]:
        raise ModelError(_ask_for_shapes(model, [declared[name].with_known(known) for name in missing]))
    types = {name: TensorType(declared[name].dtype, shape) for name, shape in wanted.items() if shape is not None}
    refuse_several_batches(model, extents, shapes, [name for name, t in types.items() if t.shape[:1] == (BATCH,)])
    for name, kind in types.items():
        if len(kind.shape) > MOST_AXES:
            raise ModelError(f"{model}: input '{name}' has {len(kind.shape)} axes; at most {MOST_AXES} are supported")
        if wrong := too_large(bytes_of(kind)):
            raise ModelError(f"{model}: input '{name}' {kind} takes {wrong}")
    return types


def checked_shapes(model: str, declared: Mapping[str, Declared], shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """Return the shapes that a user gives. Raise ModelError for one of an unknown input, or that does not fit it."""
    if unknown := set(shapes) - set(declared):
        raise ModelError(f"{model} has no input '{min(unknown)}'; its inputs are {', '.join(declared)}")
    for name, given in shapes.items():
        kind = declared[name]
        if kind.extents is not None and not _fits(given, kind.extents):
            raise ModelError(f"{model}: the shape {text(d or BATCH for d in given)} given for input '{name}' does not "
                             f"match the declared shape {kind}")
    return shapes


Value = Array | bool | int | float | Sequence[Any]      # value of an input: numbers are converted to the declared dtype


def constant_inputs(model: str, inputs: Sequence[onnx.ValueInfoProto], constants: Mapping[str, Value]) -> dict[str,
                                                                                                               Array]:
    """Return values for inputs as arrays. Raise ModelError for an unknown input, or another type than the declared."""
    declared = {value.name: Declared.of(model, value) for value in inputs if value.name in constants}
    if unknown := set(constants) - set(declared):
        raise ModelError(f"{model} has no input '{min(unknown)}'; its inputs are "
                         f"{', '.join(value.name for value in inputs)}")
    values = {name: declared[name].value(number) for name, number in constants.items()}
    for name, array in values.items():
        kind = declared[name]
        if array.dtype != kind.dtype or kind.extents is not None and not _fits(array.shape, kind.extents):
            raise ModelError(f"{model}: the constant {array.dtype}{list(array.shape)} given for input '{name}' does "
                             f"not match the declared {kind.dtype}{kind}")
    return values


def is_of_numbers(value: onnx.ValueInfoProto) -> bool:
    """Return True if a value is declared as a tensor of a numeric type: no sequence, no strings."""
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type not in (0, onnx.TensorProto.STRING)


@dataclass(frozen=True)
class Declared:
    """Input as the file declares it. `extents` is None for an unknown rank; an extent without a name is None."""
    name: str
    dtype: np.dtype[Any]
    extents: tuple[Dim | None, ...] | None

    @staticmethod
    def of(model: str, value: onnx.ValueInfoProto) -> Declared:
        tensor = value.type.tensor_type
        if not is_of_numbers(value):
            raise ModelError(f"{model}: input '{value.name}' is not a tensor of numbers; no other inputs are supported")
        try:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        except KeyError:
            raise ModelError(f"{model}: input '{value.name}' has element type {tensor.elem_type}, which ONNX does not "
                             "define"
                             ) from None
        return Declared(value.name, dtype, extents_of(tensor))

    def with_known(self, known: Mapping[str, int]) -> Declared:
        """Return the input with the symbols in `known` replaced by their numbers."""
        return self if self.extents is None else replace(self, extents=tuple(with_known(self.extents, known)))

    def value(self, number: Value) -> Array:
        """Convert numbers to the declared dtype, unless that loses a fraction; arrays are returned unchanged.

        A single number gets the declared shape if that has one element.
        """
        if isinstance(number, np.ndarray | np.generic):
            return np.asarray(number)
        array = np.asarray(number)
        typed = array.astype(self.dtype) if array.dtype.kind in "biuf" else array
        if array.dtype.kind == "f" and self.dtype.kind != "f" and not np.array_equal(typed, array):
            return array
        of_one = array.shape == () and bool(self.extents) and set(self.extents or ()) == {1}
        return typed.reshape([1] * len(self.extents or ())) if of_one else typed

    def shape(self, requested: Shape | None, keep_batch: bool) -> tuple[Dim, ...] | None:
        """Return the shape to compile for, numbers after a leading number or batch; None if an extent is unknown."""
        requested = self.extents if requested is None else requested
        if requested is None:
            return None
        if keep_batch and self.extents and not is_size(self.extents[0]):
            requested = (None, *requested[1:])
        if self.extents:        # an extent given as open may have a declared size
            requested = (*requested[:1], *(extent if is_size(extent) else declared
                                           for extent, declared in zip(requested[1:], self.extents[1:], strict=True)))
        shape = [BATCH if axis == 0 and not is_size(d) else d for axis, d in enumerate(requested)]
        known = [d for d in shape if d is not None and (d == BATCH or is_size(d))]
        return tuple(known) if len(known) == len(shape) else None

    def __str__(self) -> str:
        return "of unknown rank" if self.extents is None else text("?" if d is None else d for d in self.extents)

    def option(self) -> str:
        """Return the --shape option for this input, with names in place of the sizes that the user has to fill in."""
        extents = _ANY_IMAGE if self.extents is None else self.extents
        chosen = [d if is_size(d) else BATCH if not axis else str(d or f"size{axis}").upper()
                  for axis, d in enumerate(extents)]
        return f"--shape {self.name}:{'x'.join(map(str, chosen))}"


def _ask_for_shapes(model: str, inputs: Sequence[Declared]) -> str:
    """About all of them at once."""
    options = " ".join(given.option() for given in inputs)
    listed = ", ".join(f"'{given.name}' {given}" for given in inputs)
    return (f"{model}: only the leading extent of an input may be left open (it is the batch); give the sizes of "
            f"{listed} for which to compile, by {options} with sizes for the names")


def extents_of(tensor: onnx.TypeProto.Tensor) -> tuple[Dim | None, ...] | None:
    """Return the declared extents, None for those without a name; None in place of all for an unknown rank."""
    return tuple(map(_extent, tensor.shape.dim)) if tensor.HasField("shape") else None


def _extent(d: onnx.TensorShapeProto.Dimension) -> Dim | None:
    if d.HasField("dim_value"):
        return d.dim_value if d.dim_value >= 0 else None
    return d.dim_param if _is_symbol(d.dim_param) else None


def _is_symbol(name: str) -> bool:
    """Return True if a dim_param names one extent: some exporters write "?", "-1" or "None" for an unknown one."""
    return any(map(str.isalpha, name)) and name.casefold() not in ("none", "null", "nan")


def is_size(d: Dim | None) -> bool:
    """Return True if an extent is a number; None, -1 and names stand for open ones."""
    return isinstance(d, int) and d >= 0


def _fits(shape: Shape, declared: Shape) -> bool:
    """Return True if a shape has the declared rank and sizes; a fixed batch cannot be made symbolic."""
    return len(shape) == len(declared) and all(g == d for g, d in zip(shape, declared, strict=True) if is_size(d))
