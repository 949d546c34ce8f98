"""Data movement: join, split, slice, gather, repeat, pad, interleave."""
from __future__ import annotations

from itertools import accumulate

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import broadcast, dim, extent, fixed, normal_axis
from infer_server.engines.ops.items import ItemAxes, Mixed, only_first, untouched_axis
from infer_server.engines.ops.op import Inputs, LayoutOp, Op, Stored, Types, Values, present


class Concat(Op):
    """Concatenation along `axis`."""
    symbolic = True
    moves, along, stored = True, "axis", Stored.ALIKE

    @classmethod
    def data(cls, node: Node) -> tuple[str, ...]:
        return node.inputs

    @classmethod
    def types(cls, node: Node, *parts: TensorType) -> Types:
        shape = parts[0].shape
        axis = normal_axis(node.attrs["axis"], len(shape))
        if any(len(t.shape) != len(shape) for t in parts) or not shape:
            raise GraphError("the inputs must have the same number of axes, at least one")
        others = [(*t.shape[:axis], *t.shape[axis + 1:]) for t in parts]
        if any(other != others[0] for other in others):
            raise GraphError(f"the inputs differ in extents of axes other than {axis}")
        total = sum((extent(t.shape[axis]) for t in parts), start=0)
        return (TensorType(parts[0].dtype, (*shape[:axis], dim(total), *shape[axis + 1:])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        found = {axis for axis, kind in zip(axes, inputs, strict=True) if kind is not None}
        if len(found) > 1:
            raise Mixed("its parts have their items along different axes")
        return (untouched_axis(outputs[0].shape, found.pop(), (node.attrs["axis"],), "joins parts along"),)

    @classmethod
    def compute(cls, node: Node, *arrays: Array) -> Array:
        return np.concatenate(arrays, axis=node.attrs["axis"])


class Split(Op):
    """Division into parts of the extents `split` along `axis`."""
    symbolic = True
    moves, along, stored = True, "axis", Stored.ALIKE

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        axis = normal_axis(node.attrs.get("axis", 0), len(x.shape))
        sizes = node.attrs["split"]
        if sum((extent(s) for s in sizes), start=0) != extent(x.shape[axis]):
            raise GraphError(f"the sizes {tuple(sizes)} do not add up to {x.shape[axis]}, the extent of axis {axis}")
        return tuple(TensorType(x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1:])) for size in sizes)

    @classmethod
    def compute(cls, node: Node, x: Array) -> tuple[Array, ...]:
        *cuts, _ = accumulate(fixed(node.attrs["split"]))
        return tuple(np.split(x, cuts, axis=node.attrs.get("axis", 0)))


class Slice(Op):
    """Slice x[starts:ends:steps] along `axes`; all four are attributes of equal length."""
    symbolic = True
    moves, along, stored = True, "axes", Stored.ALIKE

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        shape = list(x.shape)
        for axis, cut in cls.cuts(node, len(shape)):
            if (cut.start, cut.stop, cut.step) == (None, None, 1):
                continue
            (size,) = fixed([shape[axis]])
            shape[axis] = _kept(size, cut)
        return (TensorType(x.dtype, tuple(shape)),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        rank = len(outputs[0].shape)
        cut = [axis for axis, kept in cls.cuts(node, rank) if (kept.start, kept.stop, kept.step) != (None, None, 1)]
        return (untouched_axis(outputs[0].shape, only_first(axes), cut, "cuts"),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        index = [slice(None)] * x.ndim
        for axis, cut in cls.cuts(node, x.ndim):
            index[axis] = cut
        return np.array(x[tuple(index)])

    @staticmethod
    def cuts(node: Node, rank: int) -> list[tuple[int, slice]]:
        """Return (axis, slice) for each sliced axis."""
        attrs = node.attrs
        rows = zip(attrs["axes"], attrs["starts"], attrs["ends"], attrs["steps"], strict=True)
        return [(normal_axis(axis, rank), _slice(start, end, step)) for axis, start, end, step in rows]


FAR = 2**31 - 1        # exporters write this or more for "to the end"


def _slice(start: int, end: int, step: int) -> slice:
    """Convert an ONNX slice to Python's.

    An end past the last element means no end; with a negative step, -1 is the last element.
    """
    if step > 0:
        return slice(start or None, None if end >= FAR else end, step)
    return slice(None if start >= FAR else start, None if end <= -FAR else end, step)


def _kept(size: int, cut: slice) -> int:
    """Return len(range(size)[cut]) for sizes that may be symbolic."""
    step: int = cut.step
    first, last = (0, size) if step > 0 else (size - 1, -1)

    def bounded(bound: int | None, default: int) -> int:
        if bound is None:
            return default
        low, high = (0, size) if step > 0 else (-1, size - 1)
        inside: int = min(max(bound + size if bound < 0 else bound, low), high)
        return inside

    return max(-((bounded(cut.start, first) - bounded(cut.stop, last)) // step), 0)


class Gather(Op):
    """Gather x[..., indices, ...] along `axis`."""
    symbolic = True
    moves, along, stored = True, "axis", Stored.ALIKE

    @classmethod
    def types_with(cls, node: Node, inputs: Inputs, values: Values) -> Types:
        x, indices = present(inputs)
        axis = normal_axis(node.attrs.get("axis", 0), len(x.shape))
        known, extent_ = values[1] if len(values) > 1 else None, x.shape[axis] if x.shape else 0
        if known is not None and known.dtype != object and isinstance(extent_, int) and known.size and (
                known.min() < -extent_ or known.max() >= extent_):
            raise GraphError(f"the indices are in {known.min()}..{known.max()}, but axis {axis} has extent {extent_}")
        return (TensorType(x.dtype, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1:])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        x, indices = present(inputs)
        along, (of_x, of_indices) = normal_axis(node.attrs.get("axis", 0), len(x.shape)), axes
        if of_indices is not None and of_x is not None:
            raise Mixed("it selects from all items")
        if of_indices is not None:
            return (along + of_indices,)
        of_x = untouched_axis(x.shape, of_x, (along,), "selects from")
        return (of_x + (len(indices.shape) - 1) * (of_x > along),)

    @classmethod
    def compute(cls, node: Node, x: Array, indices: Array) -> Array:
        return np.asarray(np.take(x, indices.astype(np.int64), axis=node.attrs.get("axis", 0)))


class GatherElements(Op):
    """Element gather y[i][j] = x[indices[i][j]][j] along `axis`; indices broadcast to the attribute `shape`."""
    moves = True

    @classmethod
    def types(cls, node: Node, x: TensorType, indices: TensorType) -> Types:
        return (TensorType(x.dtype, broadcast(indices.shape, node.attrs.get("shape", ()))),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        x, indices = present(inputs)
        along, (of_x, of_indices) = normal_axis(node.attrs.get("axis", 0), len(x.shape)), axes
        shift = len(outputs[0].shape) - len(indices.shape)      # due to broadcasting of indices
        if of_x is None and of_indices is not None and of_indices + shift == along:
            return (along,)
        if of_x is None or of_x == along or of_indices is not None and of_indices + shift != of_x:
            raise Mixed("it selects from several items")
        return (of_x,)

    @classmethod
    def compute(cls, node: Node, x: Array, indices: Array) -> Array:
        axis = normal_axis(node.attrs.get("axis", 0), x.ndim)
        indices = np.broadcast_to(indices, fixed(broadcast(indices.shape, node.attrs.get("shape", ()))))
        grid: list[Array] = list(np.indices(indices.shape, sparse=True))
        grid[axis] = indices
        return np.asarray(x[tuple(grid)])


class Tile(Op):
    """Repetition `repeats` times along each axis."""
    moves, along = True, "repeats"

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        repeats = node.attrs["repeats"]
        if len(repeats) != len(x.shape):
            raise GraphError(f"repeats has {len(repeats)} values, but the input has {len(x.shape)} axes")
        return (TensorType(x.dtype, tuple(dim(extent(d) * extent(r)) for d, r in zip(x.shape, repeats, strict=True))),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        repeated = [axis for axis, times in enumerate(node.attrs["repeats"]) if times != 1]
        return (untouched_axis(outputs[0].shape, only_first(axes), repeated, "repeats"),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return np.tile(x, fixed(node.attrs["repeats"]))


class Pad(Op):
    """Padding by `pads` (before each axis, then after; negative values crop) according to `mode` and `value`."""
    along, stored = "pads", Stored.ALIKE        # zeros are representable in all types: see facts.pads_with_zeros

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        widths = cls.widths(node, len(x.shape))
        shape = tuple(dim(extent(d) + before + after) for d, (before, after) in zip(x.shape, widths, strict=True))
        return (TensorType(x.dtype, shape),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        widths = cls.widths(node, len(outputs[0].shape))
        padded = [axis for axis, width in enumerate(widths) if any(width)]
        return (untouched_axis(outputs[0].shape, only_first(axes), padded, "pads"),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        widths = cls.widths(node, x.ndim)
        inside = x[tuple(slice(max(-before, 0), size - max(-after, 0)) for (before, after), size in
                         zip(widths, x.shape, strict=True))]
        grow = [(max(before, 0), max(after, 0)) for before, after in widths]
        mode = node.attrs.get("mode", "constant")
        if mode == "constant":
            return np.pad(inside, grow, constant_values=x.dtype.type(node.attrs.get("value", 0)))
        return np.pad(inside, grow, mode=mode)

    @staticmethod
    def widths(node: Node, rank: int) -> list[tuple[int, int]]:
        """Return (before, after) for each axis."""
        pads = node.attrs["pads"]
        return list(zip(pads[:rank], pads[rank:], strict=True))


class Trilu(Op):
    """Matrices with zeros below diagonal k, or above it if `upper` is 0."""
    attributes = ("upper",)

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        if len(x.shape) < 2:
            raise GraphError("the input must have at least two axes")
        return (TensorType(x.dtype, x.shape),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return (untouched_axis(outputs[0].shape, only_first(axes), (-1, -2), "cuts along"),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return (np.triu if node.attrs.get("upper", 1) else np.tril)(x, node.attrs.get("k", 0))


class DepthToSpace(LayoutOp):
    """Conversion of channels to blocks of pixels.

    In mode DCR the block is the outer part of the channel, in CRD the inner.
    """
    attributes = ("blocksize", "mode")
    moves, stored = True, Stored.ALIKE

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        block = node.attrs["blocksize"]
        channels, height, width = fixed(x.shape[1:])
        if channels % block**2:
            raise GraphError(f"{channels} channels are not a multiple of {block} * {block}")
        return (TensorType(x.dtype, (x.shape[0], channels // block**2, height * block, width * block)),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        block = node.attrs["blocksize"]
        n, channels, height, width = x.shape
        if node.attrs.get("mode", "DCR") == "DCR":
            parts = x.reshape(n, block, block, -1, height, width).transpose(0, 3, 4, 1, 5, 2)
        else:
            parts = x.reshape(n, -1, block, block, height, width).transpose(0, 1, 4, 2, 5, 3)
        return parts.reshape(n, channels // block**2, height * block, width * block)


class SpaceToDepth(LayoutOp):
    """Conversion of blocks of pixels to channels, the inverse of DepthToSpace in either mode."""
    attributes = ("blocksize", "mode")
    moves, stored = True, Stored.ALIKE

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        block = node.attrs["blocksize"]
        channels, height, width = fixed(x.shape[1:])
        if height % block or width % block:
            raise GraphError(f"{height} x {width} pixels are not a multiple of {block} x {block}")
        return (TensorType(x.dtype, (x.shape[0], channels * block**2, height // block, width // block)),)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        block = node.attrs["blocksize"]
        n, channels, height, width = x.shape
        parts = x.reshape(n, channels, height // block, block, width // block, block)
        parts = parts.transpose((0, 3, 5, 1, 2, 4) if node.attrs.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4))
        return parts.reshape(n, channels * block**2, height // block, width // block)
