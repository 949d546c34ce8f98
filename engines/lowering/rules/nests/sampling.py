"""General rules for image sampling: at points of a grid, in regions, and resizing along any axes."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, fallback_rule
from infer_server.engines.lowering.calls.nesting import NestWriter
from infer_server.engines.lowering.nest.program import FLOATING, KINDS, Term
from infer_server.engines.ops import resize
from infer_server.engines.ops.resize_integers import BLEND_BITS, blend_axes

Taps = list[tuple[Term, Term]]      # (index, weight) of the pixels of a sample along an axis
_CUBIC = -0.75


# ---- grid sample
@fallback_rule("GridSample")
def lower_grid_sample(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    x, grid = node.inputs
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape)
    last = bool(node.attrs.get("channels_last"))
    item, *axes = w.axes
    channel, coordinates = (axes[-1], axes[:-1]) if last else (axes[0], axes[1:])
    taps = []
    for axis in range(len(coordinates)):
        number = w.constant(len(coordinates) - 1 - axis, "i64")  # x, the last axis of the image, is first
        taps.append(_taps(node, w.at(grid, [item, *coordinates, number]).to("f64"), w.extent(x, axis + 2 - last)))
    total = None
    for corner in product(*taps):
        indices = [index for index, _ in corner]
        pixel = w.at(x, [item, *indices, channel] if last else [item, channel, *indices])
        weight = corner[0][1]
        for _, other in corner[1:]:
            weight = weight * other
        weight = weight.to(pixel.kind if pixel.kind in FLOATING else "f64")
        part = w.where(weight.differs(0.0), pixel.to(weight.kind) * weight, 0.0)
        total = part if total is None else total + part
    assert total is not None
    return [w.call(total)]


def _taps(node: Node, coordinate: Term, size: int) -> Taps:
    corners, padding = bool(node.attrs.get("align_corners", 0)), node.attrs.get("padding_mode", "zeros")
    w, mode = coordinate.writer, node.attrs.get("mode", "linear")
    coordinate = (coordinate + 1.0) * (size - 1) / 2.0 if corners else ((coordinate + 1.0) * float(size) - 1.0) / 2.0
    coordinate = w.where(coordinate.unary("abs") < math.inf, coordinate, -1e6)
    if mode != "cubic":
        coordinate = _inside(coordinate, size, corners, padding)
    below = coordinate.unary("rint" if mode == "nearest" else "floor")
    part, taps = coordinate - below, []
    for offset, weight in _weights(mode, part):
        index = below + float(offset)
        if mode == "cubic":
            index = _inside(index, size, corners, padding)
        seen = (index >= 0.0) & (index <= float(size - 1))
        taps.append((w.where(seen, index, 0.0).to("i64"), w.where(seen, weight, 0.0)))
    return taps


def _inside(coordinate: Term, size: int, corners: bool, padding: str) -> Term:
    """Map coordinates outside the image according to the padding mode."""
    if padding == "zeros":
        return coordinate
    if padding == "reflection":
        first, span = (0.0, float(size - 1)) if corners else (-0.5, float(size))
        if not span:
            return coordinate.like(0.0)
        turns = ((coordinate - first) / (2 * span)).unary("floor")
        beyond = (coordinate - first) - turns * (2 * span)
        coordinate = beyond.at_most(beyond.like(2 * span) - beyond) + first
    return coordinate.at_least(0.0).at_most(float(size - 1))


def _weights(mode: str, part: Term) -> list[tuple[int, Term]]:
    """Return the weights of the pixels around a place `part` after a pixel; a cubic kernel (Keys) has four."""
    if mode == "nearest":
        return [(0, part.like(1.0))]
    if mode == "linear":
        return [(0, part.like(1.0) - part), (1, part)]
    return [(offset, _keys((part - float(offset)).unary("abs"), _CUBIC)) for offset in range(-1, 3)]


def _keys(d: Term, a: float) -> Term:
    """Return Keys' cubic kernel at distance d."""
    near = (d * (a + 2) - (a + 3)) * d * d + 1.0
    far = ((d - 5.0) * d + 8.0) * d * a - 4 * a
    return d.writer.where(d <= 1.0, near, d.writer.where(d < 2.0, far, 0.0))


# ---- regions
@fallback_rule("RoiAlign")
def lower_roi_align(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower a RoiAlign: each bin has `sampling_ratio` squared samples, of which it takes the mean or the maximum."""
    x, regions, images = node.inputs
    ratio, mode = int(node.attrs.get("sampling_ratio", 0)), str(node.attrs.get("mode", "avg"))
    if ratio <= 0:
        raise Refused("without a sampling_ratio the number of samples depends on the region")
    if BATCH in ctx.type(node.outputs[0]).shape:
        raise Refused("its regions are not grouped by batch item")
    w = NestWriter(ctx, node, ctx.type(node.outputs[0]).shape, (ratio, ratio))
    region, channel, *bins = w.axes
    default = "half_pixel" if node.attrs.get("onnx_opset", 16) >= 16 else "output_half_pixel"
    half = node.attrs.get("coordinate_transformation_mode", default) == "half_pixel"
    scale, axes, outside = float(node.attrs.get("spatial_scale", 1.0)), list[Taps](), None
    for axis, (coordinate, sample) in enumerate(zip(bins, w.inner, strict=True)):
        start, end = (w.at(regions, [region, w.constant(number - axis, "i64")]) * scale - 0.5 * half
                      for number in (1, 3))
        size = end - start if half else (end - start).at_least(1.0)
        step = size / float(w.loops[2 + axis])
        at = start + coordinate.to(start.kind) * step + (sample.to(start.kind) + 0.5) * step / float(ratio)
        extent = w.extent(x, axis + 2)
        beyond = (at < -1.0) | (at > float(extent))
        outside = beyond if outside is None else outside | beyond
        axes.append(_between(at, extent))
    image = w.wrapped_index(w.at(images, [region]), w.extent(x, 0))
    parts = [w.at(x, [image, channel, row, column]) * (high * wide)
             for row, high in axes[0] for column, wide in axes[1]]
    total = parts[0]
    for part in parts[1:]:
        total = total.at_least(part) if mode == "max" else total + part
    assert outside is not None
    sample = w.where(outside, 0.0, total)
    value = w.reduce("max", sample) if mode == "max" else w.reduce("sum", sample) * (1 / ratio ** 2)
    return [w.call(value)]


def _between(at: Term, extent: int) -> Taps:
    """Return the two pixels around a coordinate, equal at the ends."""
    w = at.writer
    at = at.at_least(0.0)
    below = at.unary("floor").at_most(float(extent - 1))
    part = w.where(at >= float(extent - 1), 0.0, at - below)
    index = below.to("i64")
    return [(index, part.like(1.0) - part), ((index + 1).at_most(extent - 1), part)]


# ---- at another resolution
@fallback_rule("Resize")
def lower_resize(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Along each axis that changes: a pixel, or the taps of a filter, whose weights are made to sum to 1."""
    anchor, shape = node.anchor, ctx.type(node.outputs[0]).shape
    name, last = anchor.inputs[0], bool(anchor.attrs.get("channels_last"))
    source = ctx.type(name).shape
    order = [0, len(shape) - 1, *range(1, len(shape) - 1)] if last else list(range(len(shape)))     # canonical axes
    sizes = tuple(1 if source[axis] == BATCH else as_int(source[axis]) for axis in order)
    factors = resize.Resize.factors(anchor, sizes)
    changed = [i for i, (out, scale) in enumerate(factors)
               if source[order[i]] != BATCH and (out != sizes[i] or scale != 1)]
    mode = anchor.attrs.get("mode", "nearest")
    integers = np.issubdtype(ctx.type(name).dtype, np.integer)
    if integers and mode != "nearest" and (mode == "cubic" or anchor.attrs.get("antialias")):
        raise Refused("integers that a filter makes")
    blend = integers and mode == "linear"
    reaches = [] if blend or mode == "nearest" else [_reach(anchor, factors[i][1]) for i in changed]
    w = NestWriter(ctx, node, shape, [2 * reach for reach in reaches])
    indices, weight, outside = list(w.axes), None, None
    coordinates: dict[int, Term] = {}
    for number, i in enumerate(changed):
        at = resize.coordinate(anchor, i, indices[order[i]].to("f32"), Term.to, sizes[i], *factors[i])
        coordinates[i], at = at, at.to("f64")
        if anchor.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
            beyond = (at < 0.0) | (at > float(sizes[i] - 1))
            outside = beyond if outside is None else outside | beyond
        if blend:
            continue
        if mode == "nearest":
            indices[order[i]] = _nearest(anchor, at).to("i64").within(sizes[i])
            continue
        tap = at.unary("floor").to("i64") + (w.inner[number] - (reaches[number] - 1))
        part = _filter(anchor, (tap.to("f64") - at), factors[i][1])
        if anchor.attrs.get("exclude_outside"):
            part = w.where((tap >= 0) & (tap < sizes[i]), part, 0.0)
        weight = part if weight is None else weight * part
        indices[order[i]] = tap.within(sizes[i])
    if blend:
        along = {i: (order[i], coordinates.get(i, indices[order[i]].to("f32")), sizes[i])
                 for i in blend_axes(len(shape), changed)}
        value = _blended(w, name, along)
    else:
        pixel = w.at(name, indices)
        value = pixel if weight is None else w.reduce("sum", pixel.to("f64") * weight) / w.reduce("sum", weight)
    if outside is not None:
        value = w.where(outside, float(anchor.attrs.get("extrapolation_value", 0.0)), value)
    return [w.call(w.finished(value.to(KINDS[ctx.type(name).dtype.name])))]


def _blended(w: NestWriter, name: str, along: Mapping[int, tuple[int, Term, int]]) -> Term:
    """Return the integers blended as engines/ops/resize_integers.py does, before they are truncated.

    along: for each canonical axis the tensor's axis, the position in float32 and the extent.
    """
    fixed_point = w.ctx.type(name).dtype.itemsize == 1 and tuple(along) == (1, 2) and len(w.axes) == 4
    kind = "f64" if fixed_point else "f32"          # f64 holds every product of fixed-point weights and a byte
    one, ends = float(1 << BLEND_BITS if fixed_point else 1), list[Taps]()
    for _, at, size in along.values():
        at = at.at_least(0.0).at_most(float(size - 1))
        below = at.unary("floor")
        above = (below + 1.0).at_most(float(size - 1))
        scaled = (at * one).unary("floor") if fixed_point else at
        ends.append([(end.to("i64"), w.where(below.equals(above), one / 2, (scaled - other * one).unary("abs")))
                     for end, other in ((below, above), (above, below))])
    total = None
    for corner in product(*ends):
        indices, weight = list(w.axes), None
        for (axis, _, _), (index, _) in zip(along.values(), corner, strict=True):
            indices[axis] = index
        for _, part in reversed(corner):
            weight = part if weight is None else weight * part
        assert weight is not None
        pixel = weight.to(kind) * w.at(name, indices).to(kind)
        total = pixel if total is None else total + pixel
    assert total is not None
    return total * (1 / one ** 2)


def _reach(node: Node, scale: float) -> int:
    stretch = min(scale, 1.0) if node.attrs.get("antialias") else 1.0
    return math.ceil((2 if node.attrs["mode"] == "cubic" else 1) / stretch)


def _filter(node: Node, distance: Term, scale: float) -> Term:
    stretch = min(scale, 1.0) if node.attrs.get("antialias") else 1.0
    size = distance.unary("abs") * stretch
    if node.attrs["mode"] == "cubic":
        return _keys(size, node.attrs.get("cubic_coeff_a", -0.75))
    return (size.like(1.0) - size).at_least(0.0)


def _nearest(node: Node, at: Term) -> Term:
    mode = node.attrs.get("nearest_mode", "round_prefer_floor")
    if mode in ("floor", "ceil"):
        return at.unary(mode)
    middle = 0.5 + resize.TIE
    return (at - middle).unary("ceil") if mode == "round_prefer_floor" else (at + middle).unary("floor")
