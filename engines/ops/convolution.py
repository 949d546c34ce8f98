"""Convolutions as matrix products over unrolled windows. Weights are OIHW (ConvTranspose: IOHW) in every layout."""
from __future__ import annotations

import math

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import fixed, text
from infer_server.engines.ops.items import ItemAxes, Mixed
from infer_server.engines.ops.op import Inputs, LayoutOp, Op, Stored, Types
from infer_server.engines.ops.window import Window


class Conv(LayoutOp):
    """Convolution with constant or run-time weights.

        y[n, o, p] = b[o] + sum over c, t of w[o, c, t] * x[n, group(o) + c, p * stride + t * dilation - pad]
    """
    output_axis, anchor, stored = 0, True, Stored.CONVERTED

    @classmethod
    def types(cls, node: Node, x: TensorType, w: TensorType, bias: TensorType | None = None) -> Types:
        cout, cin, *kernel = fixed(w.shape)
        channels, *sizes = fixed(x.shape[1:])
        group = node.attrs.get("group", 1)
        if cin * group != channels or cout % group:
            raise GraphError(f"weights for {cin} channels in each of {group} groups do not fit an input of {channels} "
                             "channels")
        if tuple(kernel) != tuple(node.attrs["kernel_shape"]):
            raise GraphError(f"kernel_shape is {node.attrs['kernel_shape']}, but the kernel of the weights is {kernel}")
        _check_bias(bias, cout)
        window = Window.of(node, len(sizes))
        return (TensorType(x.dtype, (x.shape[0], cout, *window.outputs(tuple(sizes)))),)

    @classmethod
    def compute(cls, node: Node, x: Array, w: Array, bias: Array | None = None) -> Array:
        group = node.attrs.get("group", 1)
        window = Window.of(node, x.ndim - 2)
        outputs = window.outputs(x.shape[2:])
        padded = window.padded(x, 0, outputs)
        weights = w.reshape(group, len(w) // group, -1)
        y = np.empty((len(x), len(w), *outputs), x.dtype)
        for image, result in zip(padded, y, strict=True):       # one by one: unrolled windows are large
            columns = np.stack(list(window.taps(image, outputs)), axis=1)       # [C, taps, *outputs]
            result[...] = np.matmul(weights, columns.reshape(group, weights.shape[2], -1)).reshape(result.shape)
        if bias is not None:
            y += bias.reshape(-1, *[1] * len(outputs))
        return y


class ConvTranspose(LayoutOp):
    """Transposed convolution: x[n, c, p] * w[c, o, t] is added to y[n, o, p * stride + t * dilation - pad]."""
    output_axis, anchor, stored = 1, True, Stored.CONVERTED

    @classmethod
    def types(cls, node: Node, x: TensorType, w: TensorType, bias: TensorType | None = None) -> Types:
        channels, *sizes = fixed(x.shape[1:])
        cin, cout, *_ = fixed(w.shape)
        group = node.attrs.get("group", 1)
        if cin != channels or cin % group:
            raise GraphError(f"weights for {cin} channels in each of {group} groups do not fit an input of {channels} "
                             "channels")
        _check_bias(bias, cout * group)
        return (TensorType(x.dtype, (x.shape[0], cout * group, *_transposed_outputs(node, tuple(sizes)))),)

    @classmethod
    def compute(cls, node: Node, x: Array, w: Array, bias: Array | None = None) -> Array:
        group = node.attrs.get("group", 1)
        window = Window.of(node, x.ndim - 2)
        sizes, outputs = x.shape[2:], _transposed_outputs(node, x.shape[2:])
        batch, cin, cout = len(x), w.shape[0] // group, w.shape[1]

        weights = w.reshape(group, cin, -1).transpose(0, 2, 1)
        products = np.matmul(weights, x.reshape(batch, group, cin, -1))         # [N, G, O * taps, pixels]
        products = products.reshape(batch, group * cout, -1, *sizes)
        full = tuple(max((size - 1) * s + span, before + out) for size, s, span, (before, _), out in
                     zip(sizes, window.strides, window.spans, window.pads, outputs, strict=True))
        y = np.zeros((batch, group * cout, *full), x.dtype)
        for tap, view in enumerate(window.taps(y, sizes)):
            view += products[:, :, tap]
        inside = [slice(before, before + out) for (before, _), out in zip(window.pads, outputs, strict=True)]
        y = y[(slice(None), slice(None), *inside)]
        return y if bias is None else y + bias.reshape(-1, *[1] * len(sizes))


class Col2Im(Op):
    """Sum of columns x [N, C * taps, *places] at the pixels where a window reads them.

    Attributes: image_shape of y, over whose padding the window slides; kernel_shape, strides, dilations, pads of the
    window.
    """

    @classmethod
    def types(cls, node: Node, x: TensorType) -> Types:
        columns, *places = fixed(x.shape[1:])
        image, window = node.attrs["image_shape"], Window.of(node, len(places))
        if columns % math.prod(window.kernel) or window.outputs(image) != tuple(places):
            raise GraphError(f"{columns} columns of {places} windows do not fit an image of {list(image)}")
        return (TensorType(x.dtype, (x.shape[0], columns // math.prod(window.kernel), *image)),)

    @classmethod
    def item_axes(cls, node: Node, inputs: Inputs, outputs: Types, axes: ItemAxes) -> ItemAxes:
        if list(axes) != [0]:
            raise Mixed("its items are not the images")
        return (0,)

    @classmethod
    def compute(cls, node: Node, x: Array) -> Array:
        image, window, places = node.attrs["image_shape"], Window.of(node, x.ndim - 2), x.shape[2:]
        columns = x.reshape(len(x), -1, math.prod(window.kernel), *places)
        y = window.padded(np.zeros((*columns.shape[:2], *image), x.dtype), 0, places)
        for tap, view in enumerate(window.taps(y, places)):
            view += columns[:, :, tap]
        inside = [slice(before, before + size) for (before, _), size in zip(window.pads, image, strict=True)]
        return np.ascontiguousarray(y[(slice(None), slice(None), *inside)])


def _check_bias(bias: TensorType | None, channels: int) -> None:
    if bias is not None and bias.shape != (channels,):
        raise GraphError(f"the bias has shape {text(bias.shape)}, but there are {channels} output channels")


def _transposed_outputs(node: Node, sizes: tuple[int, ...]) -> tuple[int, ...]:
    window = Window.of(node, len(sizes))
    extra = node.attrs.get("output_padding", (0,) * len(sizes))
    return tuple((size - 1) * s + span + more - before - after for size, s, span, more, (before, after) in
                 zip(sizes, window.strides, window.spans, extra, window.pads, strict=True))
