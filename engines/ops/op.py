"""What an operator is: result types, exact meaning, and the few facts that passes ask for.

To add one, write a class named as ONNX names it, with `types` and `compute`; where it is a formula for one element and
nothing else, a line is enough: define(Epilogue, Relu=lambda x: np.maximum(x, 0)).

Nodes are in canonical form (frontend/normalise.py): what ONNX passes as small constant inputs (axes, pads, sizes, ...)
is an attribute here, and attributes that depend on shapes (auto_pad, a -1 in a target) are resolved.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from engines.errors import EngineError, GraphError, UnknownTensorError
from engines.ir.counted import Counted, Pinned
from engines.ir.graph import Array, Dim, Node, TensorType
from engines.ir.shapes import Extent, Undecided, normal_axis
from engines.ops.items import ItemAxes, Mixed, beside, only_first

_REGISTRY: dict[str, type[Op]] = {}
OPS: Mapping[str, type[Op]] = MappingProxyType(_REGISTRY)

Inputs = Sequence[TensorType | None]        # None: an absent optional input
Values = Sequence[Array | None]             # None: not known before run time
Types = tuple[TensorType, ...]


class Stored(Enum):
    """In which types (float32, 16 bits, quantised) an operator's kernels read and write its tensors."""
    FLOAT = "in float32 only, or there is no kernel"
    ALIKE = "in any type, but all in one, with one scale: elements are moved or selected as they are stored"
    CONVERTED = "each in a type of its own: values are converted on the way from memory and to it"


class Op:
    """One ONNX operator; never instantiated. Subclasses say `types` and `compute`; callers use `infer`, `reference`.

    What passes ask of an operator are its traits. Each default is the safe answer, which costs speed at most.
    """

    symbolic: ClassVar[bool] = False        # compute also works on arrays of ints and Extents
    # ---- traits
    pointwise: ClassVar[bool] = False       # y[i] depends on the inputs at i (after broadcasting) only
    commutative: ClassVar[bool] = False     # its two inputs may be swapped
    moves: ClassVar[bool] = False           # each element of the results is one of its data: see `data`
    # The attribute that names the axes it works along ("axis", "axes"), or that has a number for each axis, or two
    # ("shape", "repeats", "pads"); "": it works along none. All other axes are alike to it. None: that is not known.
    along: ClassVar[str | None] = None
    reduces: ClassVar[bool] = False         # the results lose those axes, or have an extent of 1 there (keepdims)
    output_axis: ClassVar[int | None] = None    # of its weights, the second input: the axis of output channels
    anchor: ClassVar[bool] = False          # its kernel has an epilogue: vertical fusion may begin with it
    epilogue: ClassVar[bool] = False        # kernels can do it in an epilogue, to a value on its way to memory
    stored: ClassVar[Stored] = Stored.FLOAT
    # ONNX's attributes that mean the same here; what is written otherwise has a rule in frontend/normalise.py
    attributes: ClassVar[tuple[str, ...]] = ()
    # Class methods of the node, and of the type, or the array, of each input (None: an absent optional input): they
    # give the types, or the values, of the outputs.
    types: ClassVar[Callable[..., Types]]
    compute: ClassVar[Callable[..., Array | tuple[Array, ...]]]

    @classmethod
    def random(cls, node: Node) -> bool:
        """Whether the same inputs give different results."""
        return False

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        super().__init_subclass__()
        if not abstract:
            _REGISTRY[cls.__name__] = cls

    @classmethod
    def types_with(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        """`types`, for an operator whose outputs' types follow, or can be checked, from values of inputs too."""
        return cls.types(node, *inputs)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        """The axis along which each output has the items of a batch: its item i follows from item i of the inputs.

        axes: likewise for the inputs; None for one that is alike for all items, and for such an output. Raises Mixed
        with the reason where an item follows from others, or may, as for an operator that does not say anything.
        """
        if cls.along not in ("axis", "axes"):
            raise Mixed("it is not known to keep the items of a batch apart")
        x, *_ = present(inputs)
        rank, doing = len(x.shape), "reduces" if cls.reduces else "works along"
        return (cls.kept(node, rank, beside(x.shape, only_first(axes), cls.axes(node, rank), doing)),) * len(outputs)

    @classmethod
    def data(cls, node: Node) -> tuple[str, ...]:
        """The inputs whose elements the results of an operator that `moves` are made of."""
        return node.inputs[:1] if cls.moves else ()

    @classmethod
    def axes(cls, node: Node, rank: int) -> tuple[int, ...]:
        """The axes, counted from 0, that the attribute `along` names; a node without `axes` means all."""
        named = (node.attrs["axis"],) if cls.along == "axis" else node.attrs.get("axes", range(rank))
        return tuple(normal_axis(axis, rank) for axis in named)

    @classmethod
    def kept(cls, node: Node, rank: int, axis: int) -> int:
        """Where one of the other axes stands in the results."""
        lost = cls.axes(node, rank) if cls.reduces and not node.attrs.get("keepdims", 1) else ()
        return axis - sum(other < axis for other in lost)

    @classmethod
    def renumbered(cls, node: Node, rank: int, moved: Callable[[int], int]) -> dict[str, Any]:
        """The node's attributes for tensors whose axes stand elsewhere: axis i is now axis moved(i)."""
        attrs = dict(node.attrs)
        if cls.along == "axis":
            attrs["axis"] = moved(*cls.axes(node, rank))
        elif cls.along == "axes":
            axes = map(moved, cls.axes(node, rank))
            attrs["axes"] = tuple(sorted(axes) if cls.reduces else axes)
        elif cls.along:
            order = sorted(range(rank), key=moved)
            numbers = attrs[cls.along]
            attrs[cls.along] = tuple(numbers[start + axis] for start in range(0, len(numbers), rank) for axis in order)
        return attrs

    @classmethod
    def infer(cls, node: Node, inputs: Inputs, values: Values = ()) -> Types:
        """Types of all outputs (also those the node leaves out), without `quant`.

        `values` has what is known of each input before run time: a constant, or an object array of ints and Extents.
        Raises GraphError that names the node if the inputs do not fit each other.
        """
        try:
            return cls.types_with(node, inputs, values)
        except UnknownTensorError:
            raise
        except (GraphError, Undecided) as error:
            shapes = ", ".join(str(t) for t in inputs if t)
            raise GraphError(f"{describe(node)} on {shapes}: {error}") from error

    @classmethod
    def reference(cls, node: Node, *arrays: Array) -> tuple[Array, ...]:
        """What ONNX says that the node computes, in NumPy; floating-point exceptions are silent, as in hardware."""
        with np.errstate(all="ignore"):
            try:
                result = cls.compute(node, *arrays)
            except (EngineError, Undecided):
                raise
            except Exception as error:
                shapes = ", ".join("-" if a is None else f"{a.dtype}{list(a.shape)}" for a in arrays)
                raise GraphError(f"{describe(node)} cannot run on {shapes}: {error}") from error
        results = result if isinstance(result, tuple) else (result,)
        return tuple(map(np.asarray, results))      # NumPy makes scalars of what has no axes

    @classmethod
    def known(cls, node: Node, inputs: Inputs, values: Values) -> tuple[Array, ...] | None:
        """The outputs' values if they follow from what is known before run time, else None."""
        given = [v for v, t in zip(values, inputs, strict=True) if t is not None]
        if any(v is None for v in given) or cls.random(node):
            return None
        if any(v is not None and v.dtype == object for v in given):
            return _symbolic(cls, node, inputs, values) if cls.symbolic else None
        return cls.reference(node, *values)     # type: ignore[arg-type]  # absent inputs stay None


def _symbolic(op: type[Op], node: Node, inputs: Inputs, values: Values) -> tuple[Array, ...] | None:
    """`known` for values that hold Extents; ints become Python ints, which never overflow or promote."""
    arrays = [v if v is None else v.astype(object) for v in values]
    try:
        results = op.reference(node, *arrays)     # type: ignore[arg-type]
    except (Undecided, GraphError):
        return None
    types = op.infer(node, inputs, values)
    return tuple(settled(np.asarray(r, object), t) for r, t in zip(results, types, strict=False))


def settled(array: Array, kind: TensorType) -> Array:
    """An object array as an ordinary one, if no Extent is left in it, and nothing that is counted. Raises Pinned: a
    number that is counted goes round in a dtype as small as its own."""
    for number in array.flat:
        if type(number) is Counted and kind.dtype.kind in "iu":
            limits = np.iinfo(kind.dtype)
            if number < limits.min or number > limits.max:
                raise Pinned(f"{number} does not fit {kind.dtype}")
    left = any(isinstance(v, Extent) or type(v) is Counted for v in array.flat)
    return array if left else array.astype(kind.dtype)


def describe(node: Node) -> str:
    """How messages name a node: by its name if it has one, else by what it makes."""
    label = f"'{node.name}'" if node.name else f"that makes '{node.outputs[0] if node.outputs else ''}'"
    return f"node {label} ({node.op})"


def present(inputs: Inputs) -> list[TensorType]:
    return [t for t in inputs if t is not None]


class SameShape(Op, abstract=True):
    """An operator whose only result is of the type of its first input."""

    @classmethod
    def types(cls, node: Node, x: TensorType, *_: TensorType | None) -> Types:
        return (TensorType(x.dtype, x.shape),)


class LayoutOp(Op, abstract=True):
    """An operator on images: the first input and the outputs are [N, C, ...], or [N, ..., C] with `channels_last`.

    `types` and `compute` are written for channels first; weights are OIHW in both.
    """

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        if only_first(axes) != 0:
            raise Mixed("its items are not the images")
        return (0,) * len(outputs)

    @classmethod
    def infer(cls, node: Node, inputs: Inputs, values: Values = ()) -> Types:
        if not node.attrs.get("channels_last"):
            return super().infer(node, inputs, values)
        x, *rest = inputs
        assert x is not None
        first = TensorType(x.dtype, channels_first(x.shape))
        return tuple(TensorType(t.dtype, channels_last(t.shape)) for t in super().infer(node, (first, *rest), values))

    @classmethod
    def reference(cls, node: Node, *arrays: Array) -> tuple[Array, ...]:
        if not node.attrs.get("channels_last"):
            return super().reference(node, *arrays)
        x, *rest = arrays
        results = super().reference(node, np.ascontiguousarray(np.moveaxis(x, -1, 1)), *rest)
        return tuple(np.ascontiguousarray(np.moveaxis(y, 1, -1)) for y in results)


def channels_first(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """[N, ..., C] -> [N, C, ...]"""
    return (shape[0], shape[-1], *shape[1:-1])


def channels_last(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """[N, C, ...] -> [N, ..., C]"""
    return (shape[0], *shape[2:], shape[1])
