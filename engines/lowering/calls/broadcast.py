"""Views of a tensor for kernels: broadcast to another shape, or as an image."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from infer_server.engines.ir.graph import Dim
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, Refused
from infer_server.engines.lowering.problems.view import View


def image(view: View) -> View:
    """Return a view of any rank as [rows, columns, channels]."""
    shape, strides = view.shape, view.strides
    if len(shape) < 3:
        gaps = 3 - len(shape)
        # The stride of an axis of extent 1 is arbitrary; this one keeps the view contiguous.
        outer = strides[0] * shape[0] if strides else view.size
        return replace(view, shape=(*(1,) * gaps, *shape), strides=(*(outer,) * gaps, *strides) if strides
                       else (view.size,) * 3)
    if not is_image(view):
        raise Refused("its leading axes are not contiguous, so they cannot be collapsed into rows")
    return replace(view, shape=(math.prod(shape[:-2]), *shape[-2:]), strides=strides[-3:])


def is_image(view: View) -> bool:
    """Return True if all leading axes are contiguous, so that they can be collapsed into one row axis."""
    shape, strides = view.shape, view.strides
    return all(strides[axis] == shape[axis + 1] * strides[axis + 1] for axis in range(len(shape) - 3))


def broadcast(ctx: Context, name: str, to: str) -> View:
    """Return tensor `name` broadcast to the shape of tensor `to`, with strides of 0 along repeated axes."""
    return broadcast_to(ctx, name, ctx.type(to).shape)


def broadcast_to(ctx: Context, name: str, target: Sequence[Dim]) -> View:
    """Return tensor `name` broadcast to a shape, with strides of 0 along repeated axes."""
    source, rank = ctx.type(name), len(target)
    view = ctx.placements[name].view
    shape = (*(1,) * (rank - len(source.shape)), *source.shape)
    steps = (*(0,) * (rank - len(source.shape)), *((view.item, *view.strides) if source.shape else ()))
    strides = []
    for extent, size, stride in zip(shape, target, steps, strict=True):
        if extent not in (1, size):
            raise Refused(f"'{name}' {source} does not broadcast to {list(target)}")
        strides.append(0 if extent == 1 and size != 1 else stride)
    item = 0 if not source.shape or shape[0] != target[0] else strides[0]
    return View(view.dtype, tuple(as_int(e) for e in target[1:]), tuple(strides[1:]), item)
