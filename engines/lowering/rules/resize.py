"""Rules for Resize -> tables of taps, and for DepthToSpace and SpaceToDepth -> Permute."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.deferred import late_items
from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.ir.symbolic import is_symbolic, plain
from infer_server.engines.lowering.calls.body import Body, call_of, operand_views
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused, lowers
from infer_server.engines.lowering.calls.placement import Placement
from infer_server.engines.lowering.problems.images import Resize, taps_of
from infer_server.engines.lowering.rules.copies import moved
from infer_server.engines.lowering.rules.pool import write_pooled
from infer_server.engines.ops import resize


@lowers("Resize", images=True)
def lower_resize(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    anchor = node.anchor
    if anchor.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise Refused("tf_crop_and_resize reads beside the image")
    if ctx.type(anchor.inputs[0]).dtype.kind in "iu" and anchor.attrs.get("mode", "nearest") != "nearest":
        raise Refused("integers between pixels")
    x, y = ctx.placements[anchor.inputs[0]].view, ctx.placements[node.outputs[0]].view
    height, width, channels = x.shape
    sizes = resize.Resize.sizes(anchor, (1, channels, height, width))
    items = [ctx.placements[name].items for name in (anchor.inputs[0], node.outputs[0])]
    if set(anchor.attrs.get("scales", ())[:2]) - {1} or items[0] != items[1] \
            or y.shape != (sizes[2], sizes[3], channels):
        raise Refused("only rows and columns are resized")
    rows, columns = (_tables(anchor, axis, (1, channels, height, width)) for axis in (2, 3))
    written = write_pooled(Body.of(ctx, node), 1.0)      # the weights of a pixel sum to 1
    spec = Resize(x, y, operand_views(ctx, node, written), written.program, (rows[0].shape[1], columns[0].shape[1]))
    return [call_of(ctx, node, spec, written, rows=rows, columns=columns)]


def _tables(node: Node, axis: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return (index, weight) [outputs, taps] of one axis, deferred if extents are symbolic."""
    found = _taps(plain(node), axis, plain(shape))
    if not is_symbolic(tuple(node.attrs.values())) and not is_symbolic(shape):
        return found
    taps = found[0].shape[1]
    index, weight = late_items(partial(_taps, taps=taps), (node, axis, shape), found,
                               (resize.Resize.sizes(node, shape)[axis], taps))
    return index, weight


def _taps(node: Node, axis: int, shape: tuple[int, ...], taps: int | None = None) -> tuple[Array, Array]:
    """Return (index, weight) [outputs, taps] of one axis. Raise GraphError unless there are `taps` taps."""
    found = _taps_of(node, axis, shape[axis], *resize.Resize.factors(node, shape)[axis])
    if taps is not None and found[0].shape[1] != taps:
        raise GraphError(f"{node.name}: its pixels are made of {found[0].shape[1]}, not of {taps}")
    return found


def _taps_of(node: Node, axis: int, size: int, outputs: int, scale: float) -> tuple[Array, Array]:
    coordinates = resize.coordinates(node, axis, size, outputs, scale)
    if node.attrs.get("mode", "nearest") == "nearest":
        nearest = resize.NEAREST[node.attrs.get("nearest_mode", "round_prefer_floor")](coordinates)
        index = np.clip(nearest, 0, size - 1).astype(np.int64)[:, None]
        return index, np.ones(index.shape, np.float32)
    return taps_of(resize.interpolation(node, coordinates, size, scale))


@lowers("DepthToSpace", "SpaceToDepth", images=True)
def lower_blocks(ctx: Context, node: Node) -> Sequence[ProblemCall]:
    """Lower to a transpose of [rows, block row, columns, block column, channels]."""
    anchor, block = node.anchor, int(node.anchor.attrs["blocksize"])
    x, y = ctx.placements[anchor.inputs[0]], ctx.placements[node.outputs[0]]
    inner = anchor.attrs.get("mode", "DCR") == "CRD"
    if anchor.op == "DepthToSpace":
        seen, target = _deep(x, block, inner), _spread(y, block)
    else:
        seen, target = _spread(x, block), _deep(y, block, inner)
    return [moved(ctx, node, node.inputs[0], seen, node.outputs[0], target)]


def _spread(placement: Placement, block: int) -> Placement:
    """View an image with blocks as pixels."""
    view, (rows, cols, channels) = placement.view, placement.view.shape
    by_row, by_col, by_channel = view.strides
    return replace(placement, view=replace(view, shape=(rows // block, block, cols // block, block, channels), strides=(
        by_row * block, by_row, by_col * block, by_col, by_channel)))


def _deep(placement: Placement, block: int, inner: bool) -> Placement:
    """View an image with blocks as channels; `inner`: the place in the block is the inner part of the channel."""
    view, (rows, cols, deep) = placement.view, placement.view.shape
    by_row, by_col, size = view.strides
    channels = deep // block ** 2
    steps = (block * size, size, block ** 2 * size) if inner else (block * channels * size, channels * size, size)
    return replace(placement, view=replace(view, shape=(rows, block, cols, block, channels), strides=(
        by_row, steps[0], by_col, steps[1], steps[2])))
