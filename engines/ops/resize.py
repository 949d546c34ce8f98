"""Resize: every axis is interpolated by itself, as a matrix [out, in] of weights; nearest selects instead.

Where a pixel lies is computed in float32, in the order of ONNX Runtime, so that ties round as they do there. With
align_corners the last pixels lie on each other whatever the scale says, as in ONNX Runtime, OpenVINO and PyTorch;
onnx's reference divides by a length that is no integer.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engines.errors import GraphError
from engines.ir.counted import Pinned, as_int, is_counted
from engines.ir.graph import Array, Node, TensorType
from engines.ir.shapes import extent, fixed
from engines.ops.items import ItemAxes, only_first
from engines.ops.op import Inputs, LayoutOp, Stored, Types

BY_AXIS = frozenset({"sizes", "scales", "roi"})       # attributes that have numbers of each axis
TIE = 1e-6           # a place this near to the middle of two pixels is at it: scales are rounded, as in ONNX Runtime
EXACT = 1 << 20      # parts of a scale: of so many, times any size that there is, no double loses a bit


class Resize(LayoutOp):
    """To the extents `sizes`, or by the factors `scales` (one for each axis, channels first); by those to these, if it
    has both: extents that were rounded."""
    anchor, stored = True, Stored.CONVERTED

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        sizes = node.attrs.get("sizes")
        if sizes is None:
            scales = node.attrs["scales"]
            if len(scales) != len(x.shape):
                raise GraphError(f"{len(scales)} scales for {len(x.shape)} axes")
            sizes = [d if s == 1 else scaled(fixed([d])[0], s) for d, s in zip(x.shape, scales, strict=True)]
        if len(sizes) != len(x.shape):
            raise GraphError(f"{len(sizes)} sizes for {len(x.shape)} axes")
        return (TensorType(x.dtype, tuple(sizes)),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        if "roi" in node.attrs or node.attrs.get("channels_last"):
            return super().item_axes(node, inputs, outputs, axes)
        return (only_first(axes),)          # an axis that keeps its extent stays as it is; others count no items behind

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        attrs = node.attrs
        outside = np.zeros((), bool)
        y = x
        for axis, (size, scale) in enumerate(cls.factors(node, x.shape)):
            if size == x.shape[axis] and scale == 1 and "roi" not in attrs:
                continue
            places = coordinates(node, axis, x.shape[axis], size, scale)
            if attrs.get("mode", "nearest") == "nearest":
                index = NEAREST[attrs.get("nearest_mode", "round_prefer_floor")](places)
                y = np.take(y, np.clip(index, 0, x.shape[axis] - 1).astype(np.int64), axis)
            else:
                weights = interpolation(node, places, x.shape[axis], scale)
                y = np.moveaxis(np.tensordot(weights, y, (1, axis)), 0, axis)
            if attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
                beyond = (places < 0) | (places > x.shape[axis] - 1)
                outside = outside | beyond.reshape(-1, *[1] * (x.ndim - axis - 1))
        y = np.where(outside, attrs.get("extrapolation_value", 0.0), y) if outside.any() else y
        return _cast(y, x)

    @classmethod
    def factors(cls, node: Node, shape: tuple[int, ...]) -> list[tuple[int, float]]:
        """Return (output extent, scale) for each axis, channels first; with antialias an axis that keeps its extent is
        left as it is, whatever its scale."""
        sizes = cls.sizes(node, shape)
        scales = node.attrs["scales"] if "scales" in node.attrs else [
            out / size for out, size in zip(sizes, shape, strict=True)]
        still = bool(node.attrs.get("antialias"))
        return [(out, 1.0 if still and out == size else scale)
                for out, size, scale in zip(sizes, shape, scales, strict=True)]

    @staticmethod
    def sizes(node: Node, shape: tuple[int, ...]) -> list[int]:
        """The output's extent for each axis, channels first."""
        sizes = node.attrs.get("sizes")
        if sizes is None:
            return [scaled(size, scale) for size, scale in zip(shape, node.attrs["scales"], strict=True)]
        return [size if isinstance(d, str) else as_int(extent(d))
                for d, size in zip(sizes, shape, strict=True)]


def scaled(size: int, scale: float) -> int:
    """Return the whole part of scale * size: a product in float32, or an exact one where the size is counted."""
    if not is_counted(size):
        return math.floor(np.float32(scale) * np.float32(size))
    over, by = float(scale).as_integer_ratio()
    if over > EXACT:
        raise Pinned(f"{size} times {scale} is rounded")
    return size * over // by


def _cast(y: Array, x: Array) -> Array:
    if x.dtype.kind in "iu" and y.dtype.kind == "f":
        info = np.iinfo(x.dtype)
        y = np.clip(np.rint(y), info.min, info.max)
    return y.astype(x.dtype, copy=False)


def coordinates(node: Node, axis: int, size: int, out: int, scale: float) -> Array:
    """Return where each output index lies on the input axis.

    Parameters
    ----------
    node : Node
        The Resize; its attributes say how.
    axis : int
        The axis, channels first.
    size, out : int
        Its extents before and after.
    scale : float
        The factor between them, which may be no quotient of the two.

    Returns
    -------
    ndarray
        float64 [out], computed in float32.
    """
    places = _places(node, axis, np.float32(size), np.float32(out), np.float32(scale), np.arange(out, dtype=np.float32))
    return np.asarray(places, np.float64)


def _places(node: Node, axis: int, size: np.float32, out: np.float32, scale: np.float32, i: Array) -> Array:
    """The coordinates, in float32."""
    mode, one, half = node.attrs.get("coordinate_transformation_mode", "half_pixel"), np.float32(1), np.float32(0.5)
    if mode == "asymmetric":
        return i / scale
    if mode == "align_corners":
        return i * (size - one) / (out - one) if out > 1 else i
    if mode == "tf_crop_and_resize":
        roi = node.attrs["roi"]
        start, end = np.float32(roi[axis]), np.float32(roi[axis + len(roi) // 2])
        if out > 1:
            return start * (size - one) + i * (end - start) * (size - one) / (out - one)
        return half * (start + end) * (size - one) + i
    if mode == "pytorch_half_pixel" and out == 1:
        return i
    if mode == "half_pixel_symmetric":
        return size / 2 * (one - out / (scale * size)) + (i + half) / scale - half
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (i + half) / scale - half
    if mode == "tf_half_pixel_for_nn":      # of opsets 11 and 12: TensorFlow's for nearest neighbours
        return (i + half) / scale
    raise GraphError(f"unknown coordinate_transformation_mode '{mode}'")


NEAREST: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.asarray(np.ceil(x - (0.5 + TIE))),
    "round_prefer_ceil": lambda x: np.asarray(np.floor(x + (0.5 + TIE))),
    "floor": np.floor,
    "ceil": np.ceil,
}


def interpolation(node: Node, places: Array, size: int, scale: float) -> Array:
    """Weights [out, in] of float32: the filter around each place; what falls beside the image counts for its edge.

    With `antialias` the filter is stretched when shrinking. With `exclude_outside` what falls beside counts for
    nothing, and the rest is scaled to a sum of 1.
    """
    mode = node.attrs.get("mode")
    kernel: Callable[[Array], Array]
    if mode == "linear":
        kernel, reach = _triangle, 1
    elif mode == "cubic":
        kernel, reach = _keys(node.attrs.get("cubic_coeff_a", -0.75)), 2
    else:
        raise GraphError(f"unknown mode '{mode}'")
    stretch = min(scale, 1.0) if node.attrs.get("antialias") else 1.0
    first = np.floor(places).astype(np.int64) - math.ceil(reach / stretch) + 1
    taps = first[:, None] + np.arange(2 * math.ceil(reach / stretch))
    weights = kernel((taps - places[:, None]) * stretch)
    inside = (taps >= 0) & (taps < size)
    if node.attrs.get("exclude_outside"):
        weights = np.where(inside, weights, 0)
    weights = weights / weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(places), size))
    np.add.at(matrix, (np.arange(len(places))[:, None], np.clip(taps, 0, size - 1)), weights)
    return matrix.astype(np.float32)


def _triangle(x: Array) -> Array:
    return np.asarray(np.maximum(1 - np.abs(x), 0))


def _keys(a: float) -> Callable[[Array], Array]:
    """The cubic convolution filter (Keys, 1981)."""
    def kernel(x: Array) -> Array:
        x = np.abs(x)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((x - 5) * x + 8) * x * a - 4 * a
        return np.where(x <= 1, near, np.where(x < 2, far, 0))
    return kernel
