"""Base class of operators: result types, reference implementation, and traits for passes.

To add an operator, write a class named as in ONNX with `types` and `compute`. An elementwise formula needs one line:
define(Epilogue, Relu=lambda x: np.maximum(x, 0)).

Nodes are in canonical form (frontend/normalise.py): small constant inputs of ONNX (axes, pads, sizes, ...) are
attributes, and attributes that depend on shapes (auto_pad, a -1 in a target) are resolved.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from infer_server.engines.errors import EngineError, GraphError, UnknownTensorError
from infer_server.engines.ir.graph import Array, Dim, Node, TensorType
from infer_server.engines.ir.shapes import BatchInt, Undecided, normal_axis
from infer_server.engines.ir.symbolic import NotSymbolic, SymbolicInt
from infer_server.engines.ops.items import ItemAxes, Mixed, only_first, untouched_axis

_REGISTRY: dict[str, type[Op]] = {}
OPS: Mapping[str, type[Op]] = MappingProxyType(_REGISTRY)

Inputs = Sequence[TensorType | None]        # None: an absent optional input
Values = Sequence[Array | None]             # None: not known before run time
Types = tuple[TensorType, ...]


class Stored(Enum):
    """Types (float32, 16 bits, quantised) in which an operator's kernels read and write its tensors."""
    FLOAT = "in float32 only, or there is no kernel"
    ALIKE = "in any type, but all in one, with one scale: elements are moved or selected as they are stored"
    CONVERTED = "each in a type of its own: values are converted on the way from memory and to it"


class Op:
    """ONNX operator; never instantiated. Subclasses define `types` and `compute`; callers use `infer` and `reference`.

    Passes read its traits. The defaults are always correct, at most slower.
    """

    symbolic: ClassVar[bool] = False        # compute also works on arrays of ints and BatchInts
    # ---- traits
    pointwise: ClassVar[bool] = False       # y[i] depends only on the inputs at i (after broadcasting)
    commutative: ClassVar[bool] = False     # the two inputs may be swapped
    moves: ClassVar[bool] = False           # each element of the results is an element of `data`
    # The attribute that names the axes it works along ("axis", "axes"), or has one or two numbers per axis ("shape",
    # "repeats", "pads"); "": it works along none. It treats all other axes alike. None: unknown.
    along: ClassVar[str | None] = None
    reduces: ClassVar[bool] = False         # the results lose those axes, or keep them with extent 1 (keepdims)
    output_axis: ClassVar[int | None] = None    # axis of output channels in the weights, the second input
    anchor: ClassVar[bool] = False          # its kernel has an epilogue, so that fusion may start at it
    epilogue: ClassVar[bool] = False        # kernels can compute it in an epilogue
    stored: ClassVar[Stored] = Stored.FLOAT
    # attributes taken from ONNX unchanged; others have a rule in frontend/normalise.py
    attributes: ClassVar[tuple[str, ...]] = ()
    # Class methods that map the node and the type, or array, of each input (None: an absent optional input) to the
    # types, or values, of the outputs.
    types: ClassVar[Callable[..., Types]]
    compute: ClassVar[Callable[..., Array | tuple[Array, ...]]]

    @classmethod
    def random(cls, node: Node) -> bool:
        """Return True if equal inputs give different results."""
        return False

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        super().__init_subclass__()
        if not abstract:
            _REGISTRY[cls.__name__] = cls

    @classmethod
    def types_with(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        """Return the output types, for an operator whose types depend on, or are checked by, values of inputs."""
        return cls.types(node, *inputs)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        """Return the batch axis of each output, whose item i depends on item i of the inputs.

        Parameters
        ----------
        node : Node
            Node in canonical form.
        inputs, outputs : sequence of TensorType
            Types of the inputs and outputs.
        axes : sequence of int or None
            Batch axis of each input; None for an input, or an output, shared by all items.

        Raises
        ------
        Mixed
            Items may depend on each other, with the reason. This is the default.
        """
        if cls.along not in ("axis", "axes"):
            raise Mixed("it is not known to keep the items of a batch apart")
        x, *_ = present(inputs)
        rank, doing = len(x.shape), "reduces" if cls.reduces else "works along"
        axis = untouched_axis(x.shape, only_first(axes), cls.axes(node, rank), doing)
        return (cls.kept(node, rank, axis),) * len(outputs)

    @classmethod
    def data(cls, node: Node) -> tuple[str, ...]:
        """Return the inputs whose elements make up the results of an operator that `moves`."""
        return node.inputs[:1] if cls.moves else ()

    @classmethod
    def axes(cls, node: Node, rank: int) -> tuple[int, ...]:
        """Return the non-negative axes that the attribute `along` names; without `axes` these are all."""
        named = (node.attrs["axis"],) if cls.along == "axis" else node.attrs.get("axes", range(rank))
        return tuple(normal_axis(axis, rank) for axis in named)

    @classmethod
    def kept(cls, node: Node, rank: int, axis: int) -> int:
        """Return the axis of the results that corresponds to another axis of the input."""
        lost = cls.axes(node, rank) if cls.reduces and not node.attrs.get("keepdims", 1) else ()
        return axis - sum(other < axis for other in lost)

    @classmethod
    def renumbered(cls, node: Node, rank: int, moved: Callable[[int], int]) -> dict[str, Any]:
        """Return the node's attributes after a permutation of axes: axis i is now axis moved(i)."""
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
        """Return the types of all outputs, including unused ones, without `quant`.

        Parameters
        ----------
        node : Node
            Node in canonical form.
        inputs : sequence of TensorType or None
            Types of the inputs.
        values : sequence of ndarray or None
            Values that are known at build time: constants, or object arrays of ints and BatchInts.

        Raises
        ------
        GraphError
            The inputs do not fit; the message names the node.
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
        """Compute the node in NumPy as ONNX specifies. Floating-point exceptions are silent, as in hardware."""
        with np.errstate(all="ignore"):
            try:
                result = cls.compute(node, *arrays)
            except (EngineError, Undecided):
                raise
            except Exception as error:
                shapes = ", ".join("-" if a is None else f"{a.dtype}{list(a.shape)}" for a in arrays)
                raise GraphError(f"{describe(node)} cannot run on {shapes}: {error}") from error
        results = result if isinstance(result, tuple) else (result,)
        return tuple(map(np.asarray, results))      # NumPy may return scalars

    @classmethod
    def known(cls, node: Node, inputs: Inputs, values: Values) -> tuple[Array, ...] | None:
        """Return the outputs' values if they are known at build time, else None."""
        given = [v for v, t in zip(values, inputs, strict=True) if t is not None]
        if any(v is None for v in given) or cls.random(node):
            return None
        if any(v is not None and v.dtype == object for v in given):
            return _symbolic(cls, node, inputs, values) if cls.symbolic else None
        return cls.reference(node, *values)     # type: ignore[arg-type]  # absent inputs stay None


def _symbolic(op: type[Op], node: Node, inputs: Inputs, values: Values) -> tuple[Array, ...] | None:
    """Return `known` for values that contain BatchInts. Python ints neither overflow nor promote."""
    arrays = [v if v is None else v.astype(object) for v in values]
    try:
        results = op.reference(node, *arrays)     # type: ignore[arg-type]
    except (Undecided, GraphError):
        return None
    types = op.infer(node, inputs, values)
    return tuple(settled(np.asarray(r, object), t) for r, t in zip(results, types, strict=False))


def settled(array: Array, kind: TensorType) -> Array:
    """Convert an object array without symbolic elements to its dtype.

    Raises
    ------
    NotSymbolic
        A symbolic number may overflow a narrow dtype.
    """
    for number in array.flat:
        if type(number) is SymbolicInt and kind.dtype.kind in "iu":
            limits = np.iinfo(kind.dtype)
            if number < limits.min or number > limits.max:
                raise NotSymbolic(f"{number} does not fit {kind.dtype}")
    left = any(isinstance(v, BatchInt) or type(v) is SymbolicInt for v in array.flat)
    return array if left else array.astype(kind.dtype)


def describe(node: Node) -> str:
    """Return how messages name a node: by its name, else by its first output."""
    label = f"'{node.name}'" if node.name else f"that makes '{node.outputs[0] if node.outputs else ''}'"
    return f"node {label} ({node.op})"


def present(inputs: Inputs) -> list[TensorType]:
    return [t for t in inputs if t is not None]


class SameShape(Op, abstract=True):
    """Operator whose only result has the type of its first input."""

    @classmethod
    def types(cls, node: Node, x: TensorType, *_: TensorType | None) -> Types:
        return (TensorType(x.dtype, x.shape),)


class LayoutOp(Op, abstract=True):
    """Operator on images: the first input and the outputs are [N, C, ...], or [N, ..., C] with `channels_last`.

    `types` and `compute` are written for channels first; weights are OIHW in both layouts.
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
    """Convert a shape [N, ..., C] to [N, C, ...]."""
    return (shape[0], shape[-1], *shape[1:-1])


def channels_last(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Convert a shape [N, C, ...] to [N, ..., C]."""
    return (shape[0], *shape[2:], shape[1])
