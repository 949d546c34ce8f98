"""Lower operators that sample images on a grid or in regions."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.frontend.operators.extension import StandardNodeBuilder, contrib
from infer_server.engines.frontend.operators.normalise import OperatorCall
from infer_server.engines.ir.graph import Node

_MODES = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}


@contrib("GridSample", "X:T Grid:T", "align_corners=0 mode=bilinear padding_mode=zeros")
def _grid_sample(call: OperatorCall) -> list[Node]:
    """Lower to ONNX's GridSample, whose modes have other names."""
    return StandardNodeBuilder(call).finish("GridSample", *call.node.inputs, mode=_mode(call, _MODES),
                                            **call.keep("align_corners", "padding_mode"))


def _mode(call: OperatorCall, known: Sequence[str] | dict[str, str]) -> str:
    mode = call.attr("mode", "bilinear")
    if mode not in known:
        raise GraphError(f"mode is '{mode}', but must be one of {', '.join(known)}")
    return _MODES[mode]


@contrib("CropAndResize", "X:T rois:T batch_indices:I crop_size:I", "extrapolation_value=0.0 mode=bilinear")
def _crop_and_resize(call: OperatorCall) -> list[Node]:
    """Lower CropAndResize: sample each region's image on a grid between the region's corners.

    Regions are [y1, x1, y2, x2], where 0 and 1 are the first and the last pixel. Samples outside the image are
    `extrapolation_value`; a single sample along an axis is in the middle of the region.
    """
    w, (images, regions, indices, _) = StandardNodeBuilder(call), call.node.inputs
    rows, columns = call.ints(3) or ()
    dtype = call.type().dtype
    y, x = (_between(w, regions, dtype, first, count) for first, count in ((0, rows), (1, columns)))
    y, x = (w("Unsqueeze", part, w.ints(axis)) for part, axis in ((y, 2), (x, 1)))
    shape = w("Mul", w("Add", y, x), w.number(0, dtype))            # [regions, rows, columns]
    places = [w("Unsqueeze", w("Add", part, shape), w.ints(3)) for part in (x, y)]
    grid = w("Sub", w("Mul", w("Concat", *places, axis=3), w.number(2, dtype)), w.number(1, dtype))
    inside = [w("And", w("GreaterOrEqual", part, w.number(0, dtype)), w("LessOrEqual", part, w.number(1, dtype)))
              for part in (y, x)]
    sampled = w("GridSample", w("Gather", images, indices, axis=0), grid, align_corners=1, padding_mode="border",
                mode=_mode(call, ("bilinear", "nearest")))
    seen = w("Unsqueeze", w("And", *inside), w.ints(1))
    return w.finish("Where", seen, sampled, w.number(call.attr("extrapolation_value", 0.0), dtype))


def _between(w: StandardNodeBuilder, regions: str, dtype: np.dtype[np.generic], first: int, count: int) -> str:
    """Return coordinates [regions, count], evenly spaced from column `first` to column `first + 2` of the regions."""
    begin, end = (w.cut(regions, 1, column, column + 1) for column in (first, first + 2))
    steps = np.linspace(0, 1, count) if count > 1 else np.array([0.5])
    return w("Add", begin, w("Mul", w("Sub", end, begin), w.constant(steps.astype(dtype))))
