"""Operators that change or return a tensor's shape. Targets (`shape`, `axes`) are attributes."""
from __future__ import annotations

import math

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Dim, Node, TensorType
from infer_server.engines.ir.shapes import broadcast, dim, extent, fixed, normal_axis, product, symbolic_array, text
from infer_server.engines.ops.items import ItemAxes, Mixed, only_first, repeated, viewed
from infer_server.engines.ops.items import broadcast as broadcast_items
from infer_server.engines.ops.op import Inputs, Op, SameShape, Stored, Types, Values, present


class Identity(SameShape):
    """Copy of the input."""
    symbolic = True
    moves, along, stored = True, "", Stored.CONVERTED

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return axes

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return x


class ReshapingOp(Op, abstract=True):
    """Operator that reshapes its input."""
    symbolic = moves = True

    @classmethod
    def target(cls, node: Node, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return the new shape."""
        raise NotImplementedError

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        target = cls.target(node, x.shape)
        before, after = product(x.shape), product(target)
        if not (type(before) is type(after) and before == after):
            raise GraphError(f"{before} elements cannot be reshaped to {text(target)}")
        return (TensorType(x.dtype, target),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        (x,) = present(inputs)
        return (viewed(x.shape, only_first(axes), outputs[0].shape),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return x.reshape(_sizes(cls.target(node, x.shape), x.size))


def _sizes(target: tuple[Dim, ...], elements: int) -> tuple[int, ...]:
    """Return the target with its symbolic extent replaced by the remaining number of elements."""
    known = math.prod(d for d in target if isinstance(d, int))
    return tuple(elements // max(known, 1) if isinstance(d, str) else d for d in target)


class Reshape(ReshapingOp):
    """Reshape to the attribute `shape`; one extent may be symbolic."""
    stored = Stored.ALIKE

    @classmethod
    def target(cls, node: Node, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(node.attrs["shape"])


class Flatten(ReshapingOp):
    """Reshape to two axes: those before `axis`, and the others."""
    attributes = ("axis",)

    @classmethod
    def target(cls, node: Node, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        axis = node.attrs.get("axis", 1)
        axis += len(shape) if axis < 0 else 0
        return dim(product(shape[:axis])), dim(product(shape[axis:]))


class Squeeze(ReshapingOp):
    """Removal of the axes `axes` of extent 1, or of all such axes."""

    @classmethod
    def target(cls, node: Node, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        ones = [i for i, d in enumerate(shape) if d == 1]
        axes = [normal_axis(a, len(shape)) for a in node.attrs.get("axes", ones)]
        if wrong := [a for a in axes if shape[a] != 1]:
            raise GraphError(f"axis {wrong[0]} has extent {shape[wrong[0]]}, not 1")
        return tuple(d for i, d in enumerate(shape) if i not in axes)


class Unsqueeze(ReshapingOp):
    """Insertion of axes of extent 1 at `axes` of the result."""

    @classmethod
    def target(cls, node: Node, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        rank = len(shape) + len(node.attrs["axes"])
        axes = {normal_axis(a, rank) for a in node.attrs["axes"]}
        rest = iter(shape)
        return tuple(1 if i in axes else next(rest) for i in range(rank))


class Transpose(Op):
    """Permutation of the axes by `perm`."""
    symbolic = True
    moves, stored = True, Stored.CONVERTED

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        order = node.attrs.get("perm", range(len(x.shape))[::-1])
        if sorted(order) != list(range(len(x.shape))):
            raise GraphError(f"perm {tuple(order)} is not a permutation of {len(x.shape)} axes")
        return (TensorType(x.dtype, tuple(x.shape[i] for i in order)),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        rank = len(outputs[0].shape)
        return (list(node.attrs.get("perm", range(rank)[::-1])).index(only_first(axes)),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return np.ascontiguousarray(np.transpose(x, node.attrs.get("perm")))


class Expand(Op):
    """Broadcast with the attribute `shape`."""
    symbolic = True
    moves, along = True, "shape"

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        return (TensorType(x.dtype, broadcast(x.shape, node.attrs["shape"])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        if axes[0] is None:
            return repeated(outputs[0].shape)
        return (broadcast_items(inputs, axes, len(outputs[0].shape)),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return np.array(np.broadcast_to(x, fixed(broadcast(x.shape, node.attrs["shape"]))))


class Shape(Op):
    """Extents of the axes from `start` to `end`."""
    attributes = ("start", "end")

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        return (TensorType(np.dtype(np.int64), (len(cls._extents(node, x.shape)),)),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        (x,) = present(inputs)
        if any(isinstance(extent, str) for extent in cls._extents(node, x.shape)):
            raise Mixed("it computes with the number of items")
        return (None,)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return np.array(cls._extents(node, x.shape), np.int64)

    @classmethod
    def known(cls, node: Node, inputs: Inputs, values: Values) -> tuple[Array, ...] | None:
        (x,) = present(inputs)
        return (symbolic_array(extent(d) for d in cls._extents(node, x.shape)),)

    @staticmethod
    def _extents(node: Node, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return shape[node.attrs.get("start", 0):node.attrs.get("end")]


class Size(Op):
    """Number of elements."""

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        return (TensorType(np.dtype(np.int64), ()),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        raise Mixed("it computes with the number of items")

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return np.array(x.size, np.int64)

    @classmethod
    def known(cls, node: Node, inputs: Inputs, values: Values) -> tuple[Array, ...] | None:
        (x,) = present(inputs)
        return (symbolic_array([product(x.shape)]).reshape(()),)
