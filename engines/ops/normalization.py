"""Normalisation operators."""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import check_stretches, normal_axis, text
from infer_server.engines.ops.items import ItemAxes, only_first, untouched_axis
from infer_server.engines.ops.op import Inputs, LayoutOp, SameShape, Types, present


class _FromAxisOn(SameShape, abstract=True):
    @classmethod
    def types(cls, node: Node, x: TensorType, *constants: TensorType | None) -> Types:
        for what, kind in zip(("scale", "bias"), present(constants), strict=False):
            check_stretches(what, kind.shape, x.shape)
        return super().types(node, x)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        rank = len(outputs[0].shape)
        along = range(normal_axis(node.attrs.get("axis", -1), rank), rank)
        return (untouched_axis(outputs[0].shape, only_first(axes), along, "normalises along"),) * len(outputs)


class _PerChannel(SameShape, abstract=True):
    @classmethod
    def types(cls, node: Node, x: TensorType, *constants: TensorType | None) -> Types:
        if len(x.shape) < 2 or any(kind is None or kind.shape != x.shape[1:2] for kind in constants):
            found = ", ".join(text(kind.shape) for kind in present(constants))
            raise GraphError(f"the parameters {found} must have one element for each channel of {text(x.shape)}")
        return super().types(node, x)


class BatchNormalization(_PerChannel):
    """Normalisation (x - mean) / sqrt(var + epsilon) * scale + bias with constants per channel (inference form)."""

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        return (untouched_axis(outputs[0].shape, only_first(axes), (1,), "has a scale for each index of"),)

    @classmethod
    def compute(cls, node: Node, x: Array, *constants: Array) -> Array:
        scale, bias, mean, variance = (c.reshape(-1, *[1] * (x.ndim - 2)) for c in constants)
        y = (x - mean) / np.sqrt(variance + node.attrs.get("epsilon", 1e-5)) * scale + bias
        return np.asarray(y, x.dtype)


class InstanceNormalization(LayoutOp, _PerChannel):
    """Normalisation of each channel of each item."""
    attributes = ("epsilon",)

    @classmethod
    def compute(cls, node: Node, x: Array, *constants: Array) -> Array:
        scale, bias = (c.reshape(-1, *[1] * (x.ndim - 2)) for c in constants)
        y = standardise(x, tuple(range(2, x.ndim)), node.attrs.get("epsilon", 1e-5))
        return np.asarray(y * scale + bias, x.dtype)


class LayerNormalization(_FromAxisOn):
    """Normalisation over the axes from `axis` on. Optional outputs are the mean and the inverse standard deviation."""

    @classmethod
    def types(cls, node: Node, x: TensorType, *constants: TensorType | None) -> Types:
        (y,) = super().types(node, x, *constants)
        axis = normal_axis(node.attrs.get("axis", -1), len(y.shape))
        statistic = TensorType(np.dtype(np.float32), (*y.shape[:axis], *[1] * (len(y.shape) - axis)))
        return y, statistic, statistic

    @classmethod
    def compute(cls, node: Node, x: Array, scale: Array, bias: Array | None = None) -> tuple[Array, ...]:
        axes = tuple(range(normal_axis(node.attrs.get("axis", -1), x.ndim), x.ndim))
        wide = x.astype(np.float32) if x.dtype == np.float16 else x
        mean = wide.mean(axis=axes, keepdims=True)
        deviation = 1 / np.sqrt(wide.var(axis=axes, keepdims=True) + node.attrs.get("epsilon", 1e-5))
        y = ((wide - mean) * deviation).astype(x.dtype) * scale
        return (y if bias is None else y + bias).astype(x.dtype), mean.astype(np.float32), deviation.astype(np.float32)


class RMSNormalization(_FromAxisOn):
    """Normalisation x / sqrt(mean of x**2 + epsilon) * scale over the axes from `axis` on."""

    @classmethod
    def compute(cls, node: Node, x: Array, scale: Array) -> Array:
        axes = tuple(range(normal_axis(node.attrs.get("axis", -1), x.ndim), x.ndim))
        wide = x.astype(np.float32) if x.dtype == np.float16 else x
        size = np.sqrt(np.square(wide).mean(axis=axes, keepdims=True) + node.attrs.get("epsilon", 1e-5))
        return np.asarray((wide / size).astype(x.dtype) * scale, x.dtype)


def standardise(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    """Return (x - mean) / sqrt(variance + epsilon) over `axes`."""
    mean = x.mean(axis=axes, keepdims=True)
    return np.asarray((x - mean) / np.sqrt(x.var(axis=axes, keepdims=True) + epsilon))


class LRN(LayoutOp, SameShape):
    """Local response normalisation across neighbouring channels.

        x / (bias + alpha / size * sum of squares over `size` channels) ** beta
    """
    attributes = ("size", "alpha", "beta", "bias")

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        size = node.attrs["size"]
        before = (size - 1) // 2
        squares = np.pad(x * x, [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)])
        total = sum(squares[:, i:i + x.shape[1]] for i in range(size))
        factor = node.attrs.get("bias", 1.0) + node.attrs.get("alpha", 1e-4) / size * total
        return np.asarray(x / factor ** node.attrs.get("beta", 0.75), x.dtype)


class LpNormalization(SameShape):
    """Division by the L1 or L2 norm along `axis`; vectors of norm 0 become 0."""
    along = "axis"

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        norm = np.linalg.norm(x, node.attrs.get("p", 2), axis=node.attrs.get("axis", -1), keepdims=True)
        return np.asarray(np.where(norm == 0, 0, x / norm), x.dtype)


class Softmax(SameShape):
    """Softmax over `axis`; rows of -inf become zeros (undefined in ONNX)."""
    along = "axis"

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        return softmax(x, node.attrs.get("axis", -1))


def softmax(x: Array, axis: int) -> Array:
    """Return the softmax over `axis`, with zeros for rows of -inf."""
    peak = x.max(axis=axis, keepdims=True)
    y = np.exp(x - np.where(peak > -np.inf, peak, 0))
    total = y.sum(axis=axis, keepdims=True)
    return np.asarray(y / np.where(total == 0, 1, total), x.dtype)


class LogSoftmax(SameShape):
    """Logarithm of the softmax over `axis`."""
    along = "axis"

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        axis = node.attrs.get("axis", -1)
        x = x - x.max(axis=axis, keepdims=True)
        return np.asarray(x - np.log(np.exp(x).sum(axis=axis, keepdims=True)))
