"""Bounding boxes and their overlap, for NonMaxSuppression.

Sums and products are computed in the order of the operator's reference, so that every backend keeps the same boxes.
"""
from __future__ import annotations

import numpy as np

from infer_server.engines.codegen.ir_builder import Value

TINY = float(np.finfo(np.float32).tiny)
Box = tuple[Value, ...]         # (low y, low x, high y, high x, area)


def box_of(a: Value, b: Value, c: Value, d: Value, centred: bool) -> Box:
    """Return a box as (low y, low x, high y, high x, area).

    Parameters
    ----------
    a, b, c, d : two corners in any order; or if `centred`, the centre and the lengths of the sides, as float32.
    """
    pairs = [(a, c), (b, d)]
    if centred:
        ends = [(centre - side / 2, centre + side / 2) for centre, side in pairs]
    else:
        ends = [(_extreme("olt", *pair), _extreme("ogt", *pair)) for pair in pairs]
    (low, high), (left, right) = ends
    return low, left, high, right, (high - low) * (right - left)


def covers(taken: Box, box: Box, overlap: Value) -> Value:
    """Return an i1 that is true if the intersection over union of two boxes is above `overlap`.

    The union is at least the smallest normal float32, so that empty boxes give 0.
    """
    low, left, high, right, area = taken
    spans = ((low, box[0], high, box[2]), (left, box[1], right, box[3]))
    sides = [_extreme("olt", end, own_end) - _extreme("ogt", start, own_start)
             for start, own_start, end, own_end in spans]
    sides = [_extreme("ogt", side, side.like(0)) for side in sides]
    common = sides[0] * sides[1]
    union = area + box[4] - common
    return common.compare("ogt", overlap * _extreme("ogt", union.like(TINY), union))


def _extreme(order: str, a: Value, b: Value) -> Value:
    """Return a if the comparison `order` of a and b holds, else b."""
    return a.f.select(a.compare(order, b), a, b)
