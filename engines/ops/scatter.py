"""Scatters and gathers by coordinates in an index tensor."""
from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import fixed, normal_axis, text
from infer_server.engines.ops.items import ItemAxes, Mixed
from infer_server.engines.ops.op import Inputs, Op, Types

_COMBINED: Mapping[str, Callable[..., None]] = {
    "add": np.add.at, "mul": np.multiply.at, "max": np.maximum.at, "min": np.minimum.at}


def _put(node: Node, data: Array, indices: tuple[Array, ...], updates: Array) -> Array:
    """Return a copy of the data with updates stored, or combined by the attribute `reduction`."""
    result, reduction = data.copy(), node.attrs.get("reduction", "none")
    if reduction == "none":
        result[indices] = updates
    else:
        _COMBINED[reduction](result, indices, updates)
    return result


class ScatterElements(Op):
    """Copy of data with y[.., index[.., i, ..], ..] = updates[.., i, ..] along `axis`."""
    attributes = ("reduction",)

    @classmethod
    def types(cls, node: Node, data: TensorType, index: TensorType, updates: TensorType) -> Types:
        normal_axis(node.attrs["axis"], len(data.shape))
        if index.shape != updates.shape or len(index.shape) != len(data.shape):
            raise GraphError("indices and updates must have the same shape, and as many axes as the data")
        return (TensorType(data.dtype, data.shape),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        if len(set(axes)) != 1 or axes[0] is None or axes[0] == normal_axis(node.attrs["axis"], len(outputs[0].shape)):
            raise Mixed("it writes elements of other items")
        return (axes[0],)

    @classmethod
    def compute(cls, node: Node, data: Array, index: Array, updates: Array) -> Array:
        indices = [np.asarray(axis) for axis in np.indices(index.shape)]
        indices[node.attrs["axis"]] = index
        return _put(node, data, tuple(indices), updates)


class Unpool(Op):
    """MaxUnpool of flattened tensors: y [size] is x at the indices, and the scalar `elsewhere` at other places."""
    attributes = ("size",)

    @classmethod
    def types(cls, node: Node, x: TensorType, index: TensorType, elsewhere: TensorType) -> Types:
        if index.shape != x.shape:
            raise GraphError("indices and x must have the same shape")
        return (TensorType(x.dtype, (node.attrs["size"],)),)

    @classmethod
    def compute(cls, node: Node, x: Array, index: Array, elsewhere: Array) -> Array:
        return _put(node, np.full(node.attrs["size"], elsewhere), (index,), x)


class ScatterND(Op):
    """Copy of data with y[index[i]] = updates[i]; the last axis of index holds coordinates of data's first axes."""
    attributes = ("reduction",)

    @classmethod
    def types(cls, node: Node, data: TensorType, index: TensorType, updates: TensorType) -> Types:
        depth = _depth(index, len(data.shape))
        if updates.shape != (*index.shape[:-1], *data.shape[depth:]):
            raise GraphError(f"the updates have shape {text(updates.shape)}, not "
                             f"{text((*index.shape[:-1], *data.shape[depth:]))}")
        return (TensorType(data.dtype, data.shape),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        """Return the batch axis, which must follow the addressed axes in data and updates."""
        data, index, updates = (len(kind.shape) for kind in inputs if kind is not None)
        behind = {rank - axis for rank, axis in ((data, axes[0]), (updates, axes[2])) if axis is not None}
        if axes[1] is not None or None in (axes[0], axes[2]) or len(behind) != 1 or \
                min(behind) > updates - (index - 1):
            raise Mixed("it writes elements of other items")
        return (data - behind.pop(),)

    @classmethod
    def compute(cls, node: Node, data: Array, index: Array, updates: Array) -> Array:
        return _put(node, data, tuple(np.moveaxis(index, -1, 0)), updates)


class GatherND(Op):
    """Gather y[i] = data[index[i]], where the last axis of index holds coordinates after `batch_dims` shared axes."""
    attributes = ("batch_dims",)

    @classmethod
    def types(cls, node: Node, data: TensorType, index: TensorType) -> Types:
        shared = node.attrs.get("batch_dims", 0)
        depth = _depth(index, len(data.shape) - shared)
        if data.shape[:shared] != index.shape[:shared] or not 0 <= shared < len(index.shape):
            raise GraphError(f"data {text(data.shape)} and indices {text(index.shape)} differ in the first "
                             f"{shared} axes")
        return (TensorType(data.dtype, (*index.shape[:-1], *data.shape[shared + depth:])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        index = inputs[1]
        assert index is not None
        data_axis, index_axis = axes
        shared = node.attrs.get("batch_dims", 0)
        if index_axis is not None and (data_axis is None or data_axis == index_axis < shared):
            return (index_axis,)
        behind = shared + fixed(index.shape[-1:])[0]
        if index_axis is None and data_axis is not None and data_axis >= behind:
            return (data_axis - behind + len(index.shape) - 1,)
        raise Mixed("it picks elements of other items")

    @classmethod
    def compute(cls, node: Node, data: Array, index: Array) -> Array:
        shared = node.attrs.get("batch_dims", 0)
        inner = index.ndim - 1 - shared
        indices = [axis.reshape(*axis.shape, *(1,) * inner) for axis in np.indices(index.shape[:shared])]
        return np.asarray(data[(*indices, *np.moveaxis(index, -1, 0))])


def _depth(index: TensorType, rank: int) -> int:
    """Return the number of axes that an index addresses."""
    if not index.shape:
        raise GraphError("the indices are a scalar, but need an axis")
    (depth,) = fixed(index.shape[-1:])
    if not 0 < depth <= rank:
        raise GraphError(f"an index has {depth} coordinates, but the data have {rank} axes")
    return depth
