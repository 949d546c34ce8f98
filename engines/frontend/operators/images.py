"""Normalise convolutions, pools and resizing: pads, strides and extents that depend on shapes are resolved."""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.normalise import Beyond, OperatorCall, as_dims, rule
from infer_server.engines.frontend.operators.parts import NodeBuilder
from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.ir.shapes import dim, fixed, normal_axis
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.ops.window import Window

COUNTS_INSIDE_PADS = 19     # first opset whose AveragePool does not divide by elements beyond the pads


@rule("Conv", "ConvTranspose")
def _convolution(call: OperatorCall) -> list[Node]:
    kernel = fixed(call.type(1).shape[2:])
    if (given := tuple(call.attr("kernel_shape") or kernel)) != kernel:
        raise GraphError(f"kernel_shape is {given}, but the kernel of the weights is {kernel}")
    attrs = {"kernel_shape": kernel, "group": call.attr("group", 1), **_steps(call, len(kernel))}
    if call.node.op == "Conv":
        attrs["pads"] = _same_pads(call, kernel, attrs) or attrs["pads"]
        return call.node_with(3, **attrs)
    extra = tuple(call.attr("output_padding", (0,) * len(kernel)))
    wanted = call.attr("output_shape", kernel)[-len(kernel):]       # batch and channels may stand before it
    for name, numbers in (("output_padding", extra), ("output_shape", wanted)):
        if len(numbers) != len(kernel):
            raise GraphError(f"{name} is {tuple(numbers)}, but must have {len(kernel)} values")
    return call.node_with(3, **attrs | {"output_padding": extra, "pads": _transposed_pads(call, kernel, attrs, extra)})


@rule("MaxPool", "AveragePool", "LpPool")
def _pool(call: OperatorCall) -> list[Node]:
    kernel = tuple(call.attr("kernel_shape"))
    if min(kernel, default=0) < 1:
        raise GraphError(f"kernel_shape is {kernel}, but must have positive values")
    attrs = {"kernel_shape": kernel, **_steps(call, len(kernel)), **call.keep("p", "count_include_pad")}
    attrs["pads"] = _same_pads(call, kernel, attrs) or attrs["pads"]
    attrs |= _without_ceil(call, attrs) if call.attr("ceil_mode", 0) else _with_one_window(call, attrs)
    order = call.keep("storage_order")      # only affects the indices, which are the second output
    return call.node_with(1, **attrs | (order if len(call.node.outputs) > 1 else {}))


@rule("MaxUnpool")
def _unpool(call: OperatorCall) -> list[Node]:
    """Lower MaxUnpool: indices point into the flattened result, which output_shape pads with zeros at the ends."""
    shape, kernel = call.type().shape, tuple(call.attr("kernel_shape"))
    if BATCH in shape:
        raise Beyond("its indices count through all items")
    steps = _steps(call, len(kernel))
    sizes = [(as_int(size) - 1) * stride + window - before - after for size, stride, window, before, after in zip(
        shape[2:], steps["strides"], kernel, steps["pads"], steps["pads"][len(kernel):], strict=False)]
    made = (*fixed(shape[:2]), *sizes)
    wanted = call.ints(2) or made
    w, zero = NodeBuilder(call), np.zeros((), call.type().dtype)
    flat = [w("Reshape", name, shape=(math.prod(fixed(shape)),)) for name in call.node.inputs[:2]]
    y = w("Reshape", w("Unpool", *flat, w.constant(zero), size=math.prod(made)), shape=made)
    behind = tuple(more - size for more, size in zip(wanted, made, strict=True))
    return w.finish("Pad", y, pads=(0,) * len(made) + behind) if any(behind) else w.finish("Identity", y)


def _steps(call: OperatorCall, rank: int) -> dict[str, Any]:
    """Return strides, dilations and pads of a window with `rank` spatial axes. Raise GraphError if they do not fit."""
    if rank + 2 != call.rank or rank < 1:
        raise GraphError(f"the window has {rank} axes, so the input needs {rank + 2} (with batch and channels), but "
                         f"has {call.rank}")
    default = {"strides": (1,) * rank, "dilations": (1,) * rank, "pads": (0,) * 2 * rank}
    found = {name: tuple(call.attr(name) or value) for name, value in default.items()}
    for name, numbers in found.items():
        if len(numbers) != len(default[name]) or min(numbers) < min(default[name]):
            raise GraphError(f"{name} are {numbers}, but must be {len(default[name])} values of at least "
                             f"{min(default[name])}")
    return found


def _same_pads(call: OperatorCall, kernel: tuple[int, ...], attrs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the pads of auto_pad: outputs are ceil(size / stride), an odd pixel goes to one end; None for NOTSET."""
    mode = call.attr("auto_pad", "NOTSET")
    if mode == "NOTSET":
        return None
    if mode == "VALID":
        return (0,) * 2 * len(kernel)
    spans = Window(kernel, attrs["strides"], attrs["dilations"], ()).spans
    totals = [max((-(-size // stride) - 1) * stride + span - size, 0) for size, stride, span in
              zip(fixed(call.type().shape[2:]), attrs["strides"], spans, strict=True)]
    return _ends(totals, upper=mode == "SAME_UPPER")


def _ends(totals: Iterable[int], upper: bool) -> tuple[int, ...]:
    """Divide the padding between begin and end of each axis; the end gets an odd pixel if `upper`."""
    small, large = zip(*((total // 2, total - total // 2) for total in totals), strict=True)
    return (*small, *large) if upper else (*large, *small)


def _transposed_pads(call: OperatorCall, kernel: tuple[int, ...], attrs: dict[str, Any],
                     extra: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pads of a ConvTranspose for its output_shape, or for size * stride with auto_pad."""
    mode, wanted = call.attr("auto_pad", "NOTSET"), call.attr("output_shape")
    if wanted is None and mode in ("NOTSET", "VALID"):
        return tuple(attrs["pads"])
    sizes = fixed(call.type().shape[2:])
    targets = wanted or [size * stride for size, stride in zip(sizes, attrs["strides"], strict=True)]
    spans = Window(kernel, attrs["strides"], attrs["dilations"], ()).spans
    totals = [(size - 1) * stride + more + span - target for size, stride, more, span, target in
              zip(sizes, attrs["strides"], extra, spans, targets[-len(sizes):], strict=True)]
    return _ends(totals, upper=mode == "SAME_UPPER")


def _with_one_window(call: OperatorCall, attrs: dict[str, Any]) -> dict[str, Any]:
    """Return pads for axes that are shorter than the window by less than a stride, which have one window.

    onnx's shape inference (convPoolShapeInference) rounds the quotient towards zero. Returns {} if there are no such
    axes, and for an AveragePool of opset 19 or later that counts its padding, since this padding does not count.
    """
    sizes = call.type().shape[2:]
    window = Window.of(replace(call.node, attrs=attrs), len(sizes))
    befores, ends = zip(*window.pads, strict=True)
    lacks = [span - size - before - after if isinstance(size, int) and size else 0 for size, span, (before, after) in
             zip(sizes, window.spans, window.pads, strict=True)]
    more = [lack if 0 < lack < stride else 0 for lack, stride in zip(lacks, window.strides, strict=True)]
    if not any(more) or attrs.get("count_include_pad") and call.opset >= COUNTS_INSIDE_PADS:
        return {}
    return {"pads": (*befores, *(end + lack for end, lack in zip(ends, more, strict=True)))}


def _without_ceil(call: OperatorCall, attrs: dict[str, Any]) -> dict[str, Any]:
    """Replace ceil_mode by padding at the ends, except in an AveragePool that counts its own padding."""
    if attrs.get("count_include_pad"):
        return {"ceil_mode": 1}
    sizes = fixed(call.type().shape[2:])
    probe = replace(call.node, attrs=attrs)
    window = Window.of(probe, len(sizes))
    ends = [max((count - 1) * stride + span - size - before, after) for count, stride, span, size, (before, after) in
            zip(window.outputs(sizes, ceil=True), window.strides, window.spans, sizes, window.pads, strict=True)]
    return {"pads": (*(before for before, _ in window.pads), *ends)}


@rule("AffineGrid")
def _affine_grid(call: OperatorCall) -> list[Node]:
    """Lower AffineGrid: homogeneous pixel coordinates in [-1, 1], last axis first, times theta transposed."""
    size, corners = as_dims(call.value(1)), call.attr("align_corners", 0)
    sizes = fixed(size[2:])
    along = [np.linspace(-1, 1, n) if n > 1 else np.zeros(1) for n in sizes]
    along = along if corners else [line * (n - 1) / n for line, n in zip(along, sizes, strict=True)]
    places = np.stack([*reversed(np.meshgrid(*along, indexing="ij")), np.ones(sizes)], -1)
    w = NodeBuilder(call)
    base = w.constant(places.reshape(1, -1, len(sizes) + 1).astype(call.type().dtype))
    grid = w("MatMul", base, w("Transpose", call.node.inputs[0], perm=(0, 2, 1)))
    return w.finish("Reshape", grid, shape=(call.type().shape[0], *sizes, len(sizes)))


@rule("GlobalLpPool")
def _global_lp_pool(call: OperatorCall) -> list[Node]:
    p, axes = call.attr("p", 2), tuple(range(2, call.rank))
    if p not in (1, 2):
        raise Beyond(f"a norm of p = {p}")
    return NodeBuilder(call).finish(f"ReduceL{p}", call.node.inputs[0], axes=axes, keepdims=1)


@rule("CenterCropPad")
def _center_crop_pad(call: OperatorCall) -> list[Node]:
    """Lower CenterCropPad to a Slice and a Pad with zeros on both sides; an odd element of padding goes to the end."""
    axes = [normal_axis(axis, call.rank) for axis in call.attr("axes") or range(call.rank)]
    extents, wanted = fixed(call.type().shape[axis] for axis in axes), call.ints(1) or ()
    if len(wanted) != len(axes):
        raise GraphError(f"shape has {len(wanted)} values, but there are {len(axes)} axes")
    starts = [max(extent - more, 0) // 2 for extent, more in zip(extents, wanted, strict=True)]
    ends = [start + min(extent, more) for start, extent, more in zip(starts, extents, wanted, strict=True)]
    widths = [0] * 2 * call.rank
    for axis, extent, more in zip(axes, extents, wanted, strict=True):
        lack = max(more - extent, 0)
        widths[axis], widths[axis + call.rank] = lack // 2, lack - lack // 2
    w = NodeBuilder(call)
    x = w("Slice", call.node.inputs[0], axes=tuple(axes), starts=tuple(starts), ends=tuple(ends),
          steps=(1,) * len(axes))
    return w.finish("Pad", x, pads=tuple(widths), mode="constant")


@rule("Col2Im")
def _col2im(call: OperatorCall) -> list[Node]:
    """Normalise Col2Im: the columns get one axis per image axis."""
    image, kernel = call.ints(1), call.ints(2)
    if image is None or kernel is None or len(image) != len(kernel):
        raise GraphError("image_shape and block_shape must be constants with equally many values")
    ones, w = (1,) * len(kernel), NodeBuilder(call)
    attrs = {"image_shape": image, "kernel_shape": kernel, "strides": tuple(call.attr("strides", ones)),
             "dilations": tuple(call.attr("dilations", ones)), "pads": tuple(call.attr("pads", (0,) * 2 * len(kernel)))}
    places = Window.of(replace(call.node, attrs=attrs), len(kernel)).outputs(image)
    columns = w("Reshape", call.node.inputs[0], shape=(*call.type().shape[:2], *places))
    return w.finish("Col2Im", columns, **attrs)


@rule("DeformConv")
def _deformed(call: OperatorCall) -> list[Node]:
    """Lower DeformConv: GridSample gathers the taps of each output into columns, which the weights multiply."""
    w, window, outputs = NodeBuilder(call), *_deformed_window(call)
    node, (items, channels, *sizes), dtype = call.node, call.type().shape, call.type().dtype
    groups, parts, rank = int(call.attr("group", 1)), int(call.attr("offset_group", 1)), len(sizes)
    taps, count = math.prod(window.kernel), fixed([channels])[0]
    if min(groups, parts) < 1 or count % groups or count % parts:
        raise GraphError(f"{count} channels are not a multiple of group = {groups} and offset_group = {parts}")
    # In units in which -1 and 1 are the outer edges of the first and the last pixel; the last axis comes first.
    places = np.stack(np.meshgrid(*(np.arange(k) * d for k, d in zip(window.kernel, window.dilations, strict=True)),
                                  indexing="ij"), -1).reshape(taps, *(1,) * rank, rank)
    starts = np.stack(np.meshgrid(*(np.arange(n) * s - before for n, s, (before, _) in zip(
        outputs, window.strides, window.pads, strict=True)), indexing="ij"), -1)
    scale = 2 / np.array(fixed(sizes), np.float64)
    fixed_places = w.constant((((places + starts) * scale + scale / 2 - 1)[..., ::-1]).astype(dtype))
    unit, columns = w.constant(scale[::-1].astype(dtype)), []
    for part in range(parts):
        def of(name: str, each: int, part: int = part) -> str:
            return name if parts == 1 else w("Slice", name, axes=(1,), starts=(part * each,),
                                             ends=((part + 1) * each,), steps=(1,))

        moved = w("Reshape", of(node.inputs[2], taps * rank), shape=(items, taps, rank, *outputs))
        moved = w("Transpose", moved, perm=(0, 1, *range(3, 3 + rank), 2))
        moved = w("Slice", moved, axes=(-1,), starts=(rank - 1,), ends=(-rank - 1,), steps=(-1,))
        grid = w("Add", w("Mul", moved, unit), fixed_places)
        grid = w("Reshape", grid, shape=(items, taps * outputs[0], *outputs[1:], rank))
        seen = w("GridSample", of(node.inputs[0], count // parts), grid, mode="linear")
        if call.has(4):
            mask = w("Reshape", of(node.inputs[4], taps), shape=(items, 1, taps * outputs[0], *outputs[1:]))
            seen = w("Mul", seen, mask)
        columns.append(seen)
    joined = columns[0] if parts == 1 else w("Concat", *columns, axis=1)
    joined = w("Reshape", joined, shape=(items, groups, count // groups * taps, math.prod(outputs)))
    filters = fixed(call.type(1).shape)[0]
    weights = w("Reshape", node.inputs[1], shape=(1, groups, filters // groups, count // groups * taps))
    y = w("MatMul", weights, joined)
    if not call.has(3):
        return w.finish("Reshape", y, shape=(items, filters, *outputs))
    y = w("Reshape", y, shape=(items, filters, *outputs))
    return w.finish("Add", y, w("Reshape", node.inputs[3], shape=(filters, *(1,) * rank)))


def _deformed_window(call: OperatorCall) -> tuple[Window, tuple[int, ...]]:
    """Return the window and the spatial extents of the result."""
    kernel = fixed(call.type(1).shape[2:])
    if tuple(call.attr("kernel_shape") or kernel) != kernel:
        raise GraphError(f"kernel_shape is {call.attr('kernel_shape')}, but the kernel of the weights is {kernel}")
    window = Window.of(replace(call.node, attrs={"kernel_shape": kernel, **_steps(call, len(kernel))}), len(kernel))
    return window, window.outputs(fixed(call.type().shape[2:]))


@rule("GridSample")
def _grid_sample(call: OperatorCall) -> list[Node]:
    """Normalise the modes of GridSample, which have other names before opset 20."""
    known = ({"linear": "linear", "nearest": "nearest", "cubic": "cubic"} if call.opset >= 20 else
             {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"})
    if (mode := call.attr("mode", next(iter(known)))) not in known:
        raise GraphError(f"mode is '{mode}', but must be one of {', '.join(known)}")
    return call.node_with(2, mode=known[mode], **call.keep("align_corners", "padding_mode"))


@rule("Upsample")
def _upsample(call: OperatorCall) -> list[Node]:
    scales = call.attr("scales") or call.value(1)
    if (height := call.attr("height_scale")):       # before opset 7
        scales = (1.0, 1.0, height, call.attr("width_scale"))
    mode = call.attr("mode", "nearest")
    return [replace(node, op="Resize") for node in call.node_with(
        1, scales=tuple(scales or ()), mode="linear" if mode in ("linear", "bilinear") else mode,
        coordinate_transformation_mode="asymmetric", nearest_mode="floor")]


@rule("Resize")
def _resize(call: OperatorCall) -> list[Node]:
    attrs: dict[str, Any] = {
        "mode": call.attr("mode", "nearest"),
        "coordinate_transformation_mode": call.attr("coordinate_transformation_mode", "half_pixel"),
        "nearest_mode": call.attr("nearest_mode", "round_prefer_floor"),
        **call.keep("cubic_coeff_a", "exclude_outside", "extrapolation_value", "antialias")}
    call.ignore("keep_aspect_ratio_policy")     # applies to sizes only
    if call.opset < 11:
        return _without_modes(call, attrs)
    shape = call.type().shape
    axes = [normal_axis(a, len(shape)) for a in call.attr("axes", range(len(shape)))]
    sizes, scales = call.value(3), call.value(2)
    if attrs["coordinate_transformation_mode"] == "tf_crop_and_resize":
        roi = call.value(1) or []
        starts, ends = dict(zip(axes, roi, strict=False)), dict(zip(axes, roi[len(axes):], strict=False))
        every = range(len(shape))
        attrs["roi"] = (*(starts.get(i, 0.0) for i in every), *(ends.get(i, 1.0) for i in every))
    if len(given := sizes or scales or ()) != len(axes):
        raise GraphError(f"{'sizes' if sizes else 'scales'} has {len(given)} values, but there are {len(axes)} axes")
    if sizes:
        scale, sizes = _kept_ratio(call, sizes, axes)
        wanted = dict(zip(axes, sizes, strict=True))
        every_size = tuple(dim(wanted[i]) if i in wanted else d for i, d in enumerate(shape))
        if scale is not None:
            attrs["scales"] = tuple(scale if i in wanted else 1.0 for i in range(len(shape)))
        return call.node_with(1, sizes=every_size, **attrs)
    if not all(np.isfinite(scale) and scale > 0 for scale in scales or ()):
        raise GraphError(f"scales are {scales}, but must be finite and positive")
    factors = dict(zip(axes, scales or [], strict=True))
    return call.node_with(1, scales=tuple(float(factors.get(i, 1.0)) for i in range(len(shape))), **attrs)


def _without_modes(call: OperatorCall, attrs: dict[str, Any]) -> list[Node]:
    """Import a Resize of opset 10.

    ONNX Runtime takes the pixel below along axes that grow, and the pixel above along axes that shrink.
    """
    scales = tuple(float(scale) for scale in call.value(1) or ())
    attrs = {**attrs, "coordinate_transformation_mode": "asymmetric"}
    growing, shrinking = attrs | {"nearest_mode": "floor"}, attrs | {"nearest_mode": "ceil"}
    if attrs["mode"] != "nearest" or min(scales, default=1.0) >= 1:
        return call.node_with(1, scales=scales, **growing)
    w, x = NodeBuilder(call), call.node.inputs[0]
    if max(scales) > 1:
        x = w("Resize", x, scales=tuple(max(scale, 1.0) for scale in scales), **growing)
    return w.finish("Resize", x, scales=tuple(min(scale, 1.0) for scale in scales), **shrinking)


def _kept_ratio(call: OperatorCall, sizes: list[Any], axes: list[int]) -> tuple[float | None, list[Any]]:
    """Return (scale, sizes) by keep_aspect_ratio_policy: one scale for all axes, or None to use the sizes directly."""
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return None, sizes
    image = fixed(call.type().shape[a] for a in axes)
    if policy not in ("not_larger", "not_smaller"):
        raise GraphError(f"keep_aspect_ratio_policy is '{policy}', but must be stretch, not_larger or not_smaller")
    limit = min if policy == "not_larger" else max
    scale = limit(np.float32(s) / np.float32(d) for s, d in zip(sizes, image, strict=True))     # as in ONNX Runtime
    return float(scale), [math.floor(float(scale * np.float32(d)) + 0.5) for d in image]
