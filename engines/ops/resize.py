"""Resize: every axis is interpolated by itself, as a matrix [out, in] of weights; nearest selects instead.

ONNX leaves open how coordinates are rounded. This module follows ONNX Runtime, whose results deployed models were
tested with:

* Coordinates are computed in float32, in ONNX Runtime's order of operations, so that ties round as they do there.
* An axis of scale 1 keeps its pixels, whatever the region of interest says; a Resize that changes no extent copies.
* align_corners divides by the integer length of the output, as OpenVINO and PyTorch do; onnx's reference divides by
  extent * scale, which may be a fraction.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import extent, fixed
from infer_server.engines.ir.symbolic import NotSymbolic, as_int, is_symbolic
from infer_server.engines.ops.items import ItemAxes, only_first
from infer_server.engines.ops.op import Inputs, LayoutOp, Stored, Types
from infer_server.engines.ops.resize_integers import blend_axes, blended, filtered

BY_AXIS = frozenset({"sizes", "scales", "roi"})       # attributes that have numbers of each axis
TIE = 1e-6                  # coordinates this near to the middle of two pixels are ties, as in ONNX Runtime
_MAY_KEEP = 0.5, 2.0         # scales outside of these change every extent: whether they do is not asked of extents
EXACT = 1 << 20      # parts of a scale: of so many, times any size that there is, no double loses a bit


class Resize(LayoutOp):
    """Resize to the extents `sizes` or by the factors `scales`, one for each axis, channels first.

    With both, `scales` give the coordinates and `sizes` the output shape, whose extents were rounded.
    """
    anchor, stored = True, Stored.CONVERTED

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        sizes = node.attrs.get("sizes")
        if sizes is None:
            scales = node.attrs["scales"]
            if len(scales) != len(x.shape):
                raise GraphError(f"scales has {len(scales)} values, but the input has {len(x.shape)} axes")
            sizes = [d if s == 1 else scaled(fixed([d])[0], s) for d, s in zip(x.shape, scales, strict=True)]
        if len(sizes) != len(x.shape):
            raise GraphError(f"sizes has {len(sizes)} values, but the input has {len(x.shape)} axes")
        return (TensorType(x.dtype, tuple(sizes)),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        if "roi" in node.attrs or node.attrs.get("channels_last"):
            return super().item_axes(node, inputs, outputs, axes)
        return (only_first(axes),)          # an axis that keeps its extent stays as it is; others count no items behind

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        factors = cls.factors(node, x.shape)
        positions = {axis: coordinates(node, axis, x.shape[axis], size, scale)
                     for axis, (size, scale) in enumerate(factors) if scale != 1}
        y = x
        if (positions and node.attrs.get("mode") == "linear" and x.dtype.kind in "iu"
                and not node.attrs.get("antialias")):
            y = blended(x, {axis: positions.get(axis, np.arange(x.shape[axis]))
                            for axis in blend_axes(x.ndim, [*positions])})
        else:
            for axis in reversed(positions):
                y = cls._along(node, y, axis, positions[axis], factors[axis][1])
        outside = np.zeros((), bool)
        if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
            for axis, position in positions.items():
                beyond = (position < 0) | (position > x.shape[axis] - 1)
                outside = outside | beyond.reshape(-1, *[1] * (x.ndim - axis - 1))
        y = np.where(outside, node.attrs.get("extrapolation_value", 0.0), y) if outside.any() else y
        return _cast(y, x)

    @staticmethod
    def _along(node: Node, x: Array, axis: int, positions: Array, scale: float) -> Array:
        """Return x resized along one axis; floats are not rounded to their type."""
        if node.attrs.get("mode", "nearest") == "nearest":
            index = NEAREST[node.attrs.get("nearest_mode", "round_prefer_floor")](positions)
            return np.take(x, np.clip(index, 0, x.shape[axis] - 1).astype(np.int64), axis)
        weights = interpolation(node, positions, x.shape[axis], scale)
        if x.dtype.kind in "iu" and node.attrs.get("antialias"):
            return filtered(x, axis, weights)
        return np.moveaxis(np.tensordot(weights, x, (1, axis)), 0, axis)

    @classmethod
    def factors(cls, node: Node, shape: tuple[int, ...]) -> list[tuple[int, float]]:
        """Return (output extent, scale) for each axis, channels first.

        An axis that keeps its extent has scale 1 if the Resize smooths (antialias) or no other axis changes.
        """
        sizes = cls.sizes(node, shape)
        scales = node.attrs["scales"] if "scales" in node.attrs else [
            out / size for out, size in zip(sizes, shape, strict=True)]
        copied = all(_MAY_KEEP[0] < scale < _MAY_KEEP[1] and out == size
                     for out, size, scale in zip(sizes, shape, scales, strict=True))
        still = bool(node.attrs.get("antialias")) or copied
        return [(out, 1.0 if still and out == size else scale)
                for out, size, scale in zip(sizes, shape, scales, strict=True)]

    @staticmethod
    def sizes(node: Node, shape: tuple[int, ...]) -> list[int]:
        """Return the output's extents, channels first."""
        sizes = node.attrs.get("sizes")
        if sizes is None:
            return [scaled(size, scale) for size, scale in zip(shape, node.attrs["scales"], strict=True)]
        return [size if isinstance(d, str) else as_int(extent(d))
                for d, size in zip(sizes, shape, strict=True)]


def scaled(size: int, scale: float) -> int:
    """Return the whole part of scale * size: a product in float32, or an exact one where the size is symbolic."""
    if not is_symbolic(size):
        return math.floor(np.float32(scale) * np.float32(size))
    over, by = float(scale).as_integer_ratio()
    if over > EXACT:
        raise NotSymbolic(f"{size} times {scale} is rounded")
    return size * over // by


def _cast(y: Array, x: Array) -> Array:
    if x.dtype.kind in "iu" and y.dtype.kind == "f":
        info = np.iinfo(x.dtype)
        y = np.clip(np.rint(y), info.min, info.max)
    return y.astype(x.dtype, copy=False)


def coordinates(node: Node, axis: int, size: int, out: int, scale: float) -> Array:
    """Return the position on the input axis of each output index.

    Parameters
    ----------
    node : Node
        The Resize; its attributes select the formula.
    axis : int
        The axis, channels first.
    size, out : int
        Its extents before and after.
    scale : float
        The factor between them, which may differ from their quotient.

    Returns
    -------
    ndarray
        float64 [out], computed in float32.
    """
    indices = np.arange(out, dtype=np.float32)
    return np.asarray(coordinate(node, axis, indices, _converted, size, out, scale), np.float64)


def _converted(x: Array, kind: str) -> Array:
    return x.astype({"f32": np.float32, "f64": np.float64}[kind])


def coordinate(node: Node, axis: int, i: Any, convert: Callable[[Any, str], Any], size: int, out: int,
               scale: float) -> Any:
    """Return the position of output index `i` on the input axis, in float32; see coordinates().

    `i` is an array, or a term of a nest, of float32; `convert` changes its type to "f32" or "f64".
    """
    scale = float(np.float32(scale))
    if scale == 1:
        return i
    position = _unsmoothed(node, axis, i, convert, size, out, scale)
    return position + 0.5 - 0.5 if node.attrs.get("antialias") else position  # rounded as the centre of a filter


def _unsmoothed(node: Node, axis: int, i: Any, convert: Callable[[Any, str], Any], size: int, out: int,
                scale: float) -> Any:
    mode = node.attrs.get("coordinate_transformation_mode", "half_pixel")
    if mode == "asymmetric":
        return i / scale
    if mode == "align_corners":
        return i * float(size - 1) / float(out - 1) if out > 1 else i
    if mode == "tf_crop_and_resize":
        roi = node.attrs["roi"]
        start, end = np.float32(roi[axis]), np.float32(roi[axis + len(roi) // 2])
        if out > 1:
            return i * float(end - start) * float(size - 1) / float(out - 1) + float(start * np.float32(size - 1))
        return i + float(np.float32(0.5 * float(start + end) * float(size - 1)))
    if mode == "pytorch_half_pixel" and out == 1:
        return i
    if mode == "half_pixel_symmetric":
        length = np.float32(scale) * np.float32(size)
        offset = np.float32(size) / np.float32(2) * (np.float32(1) - np.float32(out) / length)
        return convert((convert(i, "f64") + 0.5) / scale + float(offset) - 0.5, "f32")
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (i + 0.5) / scale - 0.5
    if mode == "tf_half_pixel_for_nn":      # a mode of opsets 11 and 12: TensorFlow's for nearest neighbours
        return (i + 0.5) / scale
    raise GraphError(f"unknown coordinate_transformation_mode '{mode}'")


NEAREST: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.asarray(np.ceil(x - (0.5 + TIE))),
    "round_prefer_ceil": lambda x: np.asarray(np.floor(x + (0.5 + TIE))),
    "floor": np.floor,
    "ceil": np.ceil,
}


def interpolation(node: Node, positions: Array, size: int, scale: float) -> Array:
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
    first = np.floor(positions).astype(np.int64) - math.ceil(reach / stretch) + 1
    taps = first[:, None] + np.arange(2 * math.ceil(reach / stretch))
    weights = kernel((taps - positions[:, None]) * stretch)
    inside = (taps >= 0) & (taps < size)
    if node.attrs.get("exclude_outside"):
        weights = np.where(inside, weights, 0)
    weights = weights / weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(positions), size))
    np.add.at(matrix, (np.arange(len(positions))[:, None], np.clip(taps, 0, size - 1)), weights)
    return matrix.astype(np.float32)


def _triangle(x: Array) -> Array:
    return np.asarray(np.maximum(1 - np.abs(x), 0))


def _keys(a: float) -> Callable[[Array], Array]:
    """Return the cubic convolution filter (Keys, 1981)."""
    def kernel(x: Array) -> Array:
        x = np.abs(x)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((x - 5) * x + 8) * x * a - 4 * a
        return np.where(x <= 1, near, np.where(x < 2, far, 0))
    return kernel
