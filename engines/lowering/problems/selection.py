"""Problems with data-dependent result sizes: outputs have room for the maximum, and a count of valid rows.

    Suppression     non-maximum suppression per class
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer_server.engines.lowering.problems.problem import Array, Problem
from infer_server.engines.lowering.problems.view import View


@dataclass(frozen=True)
class Suppression(Problem):
    """Non-maximum suppression.

    boxes [batch, boxes, 4], scores [batch, classes, boxes], and most, overlap and least, one element each -> chosen
    [rows, 3], of which the first `count` are valid. `limit` bounds `most` per class. The batch is an ordinary axis
    here: rows of one image follow those of the image before.

    centred: boxes are centre and size instead of two corners.
    """
    boxes: View
    scores: View
    most: View
    overlap: View
    least: View
    chosen: View
    count: View
    limit: int
    centred: bool = False
    family = "suppression"
    computes_on = ("float32", "int64")
    reads = ("boxes", "scores", "most", "overlap", "least")
    writes = ("chosen", "count")

    def reference(self, inputs: Sequence[Array], constants: Mapping[str, Any]) -> tuple[Array, ...]:
        (boxes, scores, (most,), (overlap,), (least,)), = zip(*inputs, strict=True)
        chosen, count = np.zeros((1, *self.chosen.shape), np.int64), 0
        for batch, kind in np.ndindex(scores.shape[:2]):
            score, taken = scores[batch, kind], list[int]()
            for box in np.argsort(-score, kind="stable"):
                if len(taken) >= min(most, self.limit) or score[box] <= least != -np.inf:
                    break
                if not self._covers(boxes[batch], taken, box, overlap):
                    chosen[0, count + len(taken)] = batch, kind, box
                    taken.append(box)
            count += len(taken)
        return chosen, np.array([[count]], np.int64)

    def _covers(self, boxes: Array, taken: Sequence[int], box: int, overlap: np.float32) -> bool:
        """Return True if the IoU of a box with one of the `taken` boxes exceeds `overlap`."""
        first, second = boxes[:, :2], boxes[:, 2:]
        low, high = (first - second / 2, first + second / 2) if self.centred else (
            np.minimum(first, second), np.maximum(first, second))
        area = (high - low).prod(1)
        common = np.maximum(np.minimum(high[taken], high[box]) - np.maximum(low[taken], low[box]), 0).prod(1)
        with np.errstate(invalid="ignore"):     # infinite boxes
            union = np.maximum(area[taken] + area[box] - common, np.finfo(np.float32).tiny)
        return bool((common > overlap * union).any())
