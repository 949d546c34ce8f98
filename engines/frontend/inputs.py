"""The inputs of a model: what the file declares, what the user says beyond that, and what is asked where both leave
something open."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from engines.capacity import bytes_of, too_large
from engines.errors import ModelError
from engines.frontend.symbols import known_extents, refuse_several_batches, with_known
from engines.ir.graph import BATCH, Array, Dim, TensorType
from engines.ir.shapes import MOST_AXES, text

IMAGE_SIDE, LENGTH = 224, 128       # likely extents of pictures and of sequences
_ANY_IMAGE = (None, 3, "height", "width")

Shape = Sequence[Dim | None]        # None: unknown, or, where a user gives it, the batch


def input_types(model: str, declared: Mapping[str, Declared], shapes: Mapping[str, Shape],
                keep_batch: bool) -> dict[str, TensorType]:
    """The type of each input, with numbers for all extents but that of the batch; see graph_from_onnx.

    Raises ModelError: a shape for an input that does not exist or that does not fit what is declared, extents that
    nobody told (all inputs that have such are listed), an input that is no tensor of numbers or that no machine holds.
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
            raise ModelError(f"{model}: input '{name}' has {len(kind.shape)} axes, and {MOST_AXES} are the most")
        if wrong := too_large(bytes_of(kind)):
            raise ModelError(f"{model}: input '{name}' {kind} takes {wrong}")
    return types


def checked_shapes(model: str, declared: Mapping[str, Declared], shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """The shapes that a user gives. Raises ModelError: for an input that does not exist, or that do not fit it."""
    if unknown := set(shapes) - set(declared):
        raise ModelError(f"{model} has no input '{min(unknown)}'; its inputs are {', '.join(declared)}")
    for name, given in shapes.items():
        kind = declared[name]
        if kind.extents is not None and not _fits(given, kind.extents):
            raise ModelError(f"{model}: the shape {text(d or BATCH for d in given)} given for input '{name}' does not "
                             f"fit the declared {kind}")
    return shapes


Value = Array | bool | int | float | Sequence[Any]      # of an input: numbers become what the model declares


def constant_inputs(model: str, inputs: Sequence[onnx.ValueInfoProto], given: Mapping[str, Value]) -> dict[str, Array]:
    """The values of inputs, which must be of the types that the model declares."""
    declared = {value.name: Declared.of(model, value) for value in inputs if value.name in given}
    if unknown := set(given) - set(declared):
        raise ModelError(f"{model} has no input '{min(unknown)}'; its inputs are "
                         f"{', '.join(value.name for value in inputs)}")
    values = {name: declared[name].value(number) for name, number in given.items()}
    for name, array in values.items():
        kind = declared[name]
        if array.dtype != kind.dtype or kind.extents is not None and not _fits(array.shape, kind.extents):
            raise ModelError(f"{model}: the constant {array.dtype}{list(array.shape)} given for input '{name}' does "
                             f"not fit the declared {kind.dtype}{kind}")
    return values


def is_of_numbers(value: onnx.ValueInfoProto) -> bool:
    """Whether a value is declared as a tensor of numbers: no sequence, and no strings."""
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type not in (0, onnx.TensorProto.STRING)


@dataclass(frozen=True)
class Declared:
    """An input as the file declares it. `extents` None: of unknown rank; an extent None: unknown, without a name."""
    name: str
    dtype: np.dtype[Any]
    extents: tuple[Dim | None, ...] | None

    @staticmethod
    def of(model: str, value: onnx.ValueInfoProto) -> Declared:
        tensor = value.type.tensor_type
        if not is_of_numbers(value):
            raise ModelError(f"{model}: input '{value.name}' is no tensor of numbers, which is all that is supported")
        try:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        except KeyError:
            raise ModelError(f"{model}: input '{value.name}' is of type {tensor.elem_type}, which ONNX does not have"
                             ) from None
        return Declared(value.name, dtype, extents_of(tensor))

    def with_known(self, known: Mapping[str, int]) -> Declared:
        """With numbers for symbols."""
        return self if self.extents is None else replace(self, extents=tuple(with_known(self.extents, known)))

    def value(self, given: Value) -> Array:
        """An array as it is; numbers in the declared type, if it has them, and one of them in the declared shape."""
        if isinstance(given, np.ndarray | np.generic):
            return np.asarray(given)
        array = np.asarray(given)
        typed = array.astype(self.dtype) if array.dtype.kind in "biuf" else array
        if array.dtype.kind == "f" and self.dtype.kind != "f" and not np.array_equal(typed, array):
            return array
        of_one = array.shape == () and bool(self.extents) and set(self.extents or ()) == {1}
        return typed.reshape([1] * len(self.extents or ())) if of_one else typed

    def shape(self, given: Shape | None, keep_batch: bool) -> tuple[Dim, ...] | None:
        """The shape to compile for: of sizes behind what may be the batch. None: some are not known."""
        given = self.extents if given is None else given
        if given is None:
            return None
        if keep_batch and self.extents and not is_size(self.extents[0]):
            given = (None, *given[1:])
        if self.extents:        # what is given as open behind the batch may be known by its name
            given = (*given[:1], *(extent if is_size(extent) else declared
                                   for extent, declared in zip(given[1:], self.extents[1:], strict=True)))
        shape = [BATCH if axis == 0 and not is_size(d) else d for axis, d in enumerate(given)]
        known = [d for d in shape if d is not None and (d == BATCH or is_size(d))]
        return tuple(known) if len(known) == len(shape) else None

    def __str__(self) -> str:
        return "of unknown rank" if self.extents is None else text("?" if d is None else d for d in self.extents)

    def option(self) -> str:
        """Return the option that gives the shape, with names where sizes are to be filled in: none would have been
        tried."""
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
    """As the file declares them; None: of unknown rank, or, of an extent, unknown and without a name."""
    return tuple(map(_extent, tensor.shape.dim)) if tensor.HasField("shape") else None


def _extent(d: onnx.TensorShapeProto.Dimension) -> Dim | None:
    if d.HasField("dim_value"):
        return d.dim_value if d.dim_value >= 0 else None
    return d.dim_param if _is_symbol(d.dim_param) else None


def _is_symbol(name: str) -> bool:
    """Whether the name stands for one extent wherever it is: some exporters write "?", "-1" or "None" for any."""
    return any(map(str.isalpha, name)) and name.casefold() not in ("none", "null", "nan")


def is_size(d: Dim | None) -> bool:
    """Whether an extent is a number; None, -1 and names stand for one that is open."""
    return isinstance(d, int) and d >= 0


def _fits(given: Shape, declared: Shape) -> bool:
    """Declared sizes must be met; a model of fixed batch is not made symbolic by asking."""
    return len(given) == len(declared) and all(g == d for g, d in zip(given, declared, strict=True) if is_size(d))
