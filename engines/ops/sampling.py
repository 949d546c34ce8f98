"""Image sampling at points of a grid, and maximum pooling of regions."""
from __future__ import annotations

import math
from itertools import product

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ops.items import ItemAxes, Mixed
from infer_server.engines.ops.op import Inputs, LayoutOp, Op, Types

Taps = list[tuple[Array, Array]]        # (index, weight) of the pixels of a sample along an axis
_CUBIC = -0.75


class MaxRoiPool(Op):
    """Maximum pooling of regions of images, each divided into cells.

    x [N, C, H, W], rois [R, 5] (image index, x1, y1, x2, y2, times `spatial_scale`) -> [R, C, *pooled_shape]. A cell
    without pixels is 0; pixels are counted as in ONNX Runtime.

    References
    ----------
    Girshick, "Fast R-CNN", 2015, section 2.1.
    """
    attributes = ("pooled_shape", "spatial_scale")

    @classmethod
    def types(cls, node: Node, x: TensorType, rois: TensorType) -> Types:
        if len(x.shape) != 4 or len(rois.shape) != 2 or rois.shape[1] != 5:
            raise GraphError("the inputs must be images [N, C, H, W] and regions [R, 5]")
        return (TensorType(x.dtype, (rois.shape[0], x.shape[1], *node.attrs["pooled_shape"])),)

    @classmethod
    def compute(cls, node: Node, x: Array, rois: Array) -> Array:
        cells, scale = node.attrs["pooled_shape"], node.attrs.get("spatial_scale", 1.0)
        y = np.zeros((len(rois), x.shape[1], *cells), x.dtype)
        for of_region, (number, *corners) in zip(y, rois, strict=True):
            left, top, right, bottom = (int(np.floor(corner * scale + 0.5)) for corner in corners)
            image = x[int(number)]
            for row, rows in enumerate(_cells(top, bottom, cells[0], image.shape[1])):
                for column, columns in enumerate(_cells(left, right, cells[1], image.shape[2])):
                    if (part := image[:, rows, columns]).size:
                        of_region[:, row, column] = part.max((1, 2))
        return y


def _cells(first: int, last: int, count: int, size: int) -> list[slice]:
    """Return the pixels of each cell of a region, clipped to the image; neighbouring cells may share a pixel."""
    each = max(last - first + 1, 1) / count
    bounds = ((first + math.floor(cell * each), first + math.ceil((cell + 1) * each)) for cell in range(count))
    return [slice(*(min(max(bound, 0), size) for bound in pair)) for pair in bounds]


class GridSample(LayoutOp):
    """Samples of x [N, C, *image] at grid [N, *places, axes of the image].

    The grid has a coordinate per axis, the last axis first; -1 and 1 are the centres of the first and last pixel with
    align_corners, else their outer edges. mode: linear, nearest or cubic. padding_mode: zeros, border or reflection.
    """
    attributes = ("align_corners", "padding_mode")

    @classmethod
    def types(cls, node: Node, x: TensorType, grid: TensorType) -> Types:
        if len(x.shape) != len(grid.shape) or len(x.shape) < 3 or grid.shape[-1] != len(x.shape) - 2:
            raise GraphError("the grid's last axis must have a coordinate for each axis of the image")
        if x.shape[0] != grid.shape[0]:
            raise GraphError("the grid must have the image's batch size")
        return (TensorType(x.dtype, (*x.shape[:2], *grid.shape[1:-1])),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        if list(axes) != [0, 0]:
            raise Mixed("its items are not the images")
        return (0,)

    @classmethod
    def compute(cls, node: Node, x: Array, grid: Array) -> Array:
        image = x.shape[2:]
        taps = [_taps(node, grid[..., -1 - axis].reshape(len(x), -1).astype(np.float64), size)
                for axis, size in enumerate(image)]
        pixels = x.reshape(*x.shape[:2], math.prod(image))
        y = np.zeros((*x.shape[:2], math.prod(grid.shape[1:-1])))
        for corner in product(*taps):
            position, weight = np.zeros_like(corner[0][0]), np.ones_like(corner[0][1])
            for size, (index, part) in zip(image, corner, strict=True):
                position, weight = position * size + index, weight * part
            y += np.where(weight[:, None] != 0, np.take_along_axis(pixels, position[:, None], 2), 0) * weight[:, None]
        return np.asarray(y.reshape(*x.shape[:2], *grid.shape[1:-1])).astype(x.dtype)


def _taps(node: Node, positions: Array, size: int) -> Taps:
    corners, padding = bool(node.attrs.get("align_corners", 0)), node.attrs.get("padding_mode", "zeros")
    position = (positions + 1) * (size - 1) / 2 if corners else ((positions + 1) * size - 1) / 2
    position = np.where(np.isfinite(position), position, -1e6)
    mode = node.attrs.get("mode", "linear")
    if mode != "cubic":
        position = _inside(position, size, corners, padding)
    below = np.rint(position) if mode == "nearest" else np.floor(position)
    weights = {"nearest": _nearest, "linear": _linear, "cubic": _cubic}[mode](position - below)
    taps = []
    for offset, weight in weights:
        index = below + offset
        if mode == "cubic":
            index = _inside(index, size, corners, padding)
        seen = (index >= 0) & (index <= size - 1)
        taps.append((np.where(seen, index, 0).astype(np.int64), np.where(seen, weight, 0)))
    return taps


def _inside(position: Array, size: int, corners: bool, padding: str) -> Array:
    """Map coordinates outside the image according to the padding mode."""
    if padding == "zeros":
        return position
    if padding == "reflection":
        first, span = (0.0, size - 1) if corners else (-0.5, size)
        if not span:
            return np.zeros_like(position)
        beyond = np.mod(position - first, 2 * span)
        position = np.minimum(beyond, 2 * span - beyond) + first
    return np.clip(position, 0, size - 1)


def _nearest(part: Array) -> Taps:
    return [(np.zeros(()), np.ones_like(part))]


def _linear(part: Array) -> Taps:
    return [(np.zeros(()), 1 - part), (np.ones(()), part)]


def _cubic(part: Array) -> Taps:
    """Return the weights of Keys' cubic kernel for four pixels."""
    def near(d: Array) -> Array:
        return np.asarray(((_CUBIC + 2) * d - (_CUBIC + 3)) * d * d + 1)

    def far(d: Array) -> Array:
        return np.asarray(((_CUBIC * d - 5 * _CUBIC) * d + 8 * _CUBIC) * d - 4 * _CUBIC)

    weights = (far(part + 1), near(part), near(1 - part), far(2 - part))
    return [(np.array(float(offset)), weight) for offset, weight in enumerate(weights, -1)]
