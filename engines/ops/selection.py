"""Data-dependent selection with a bounded result: rows for the maximum, and a count of valid rows."""
from __future__ import annotations

import numpy as np

from infer_server.engines.errors import GraphError
from infer_server.engines.ir.graph import Array, Node, TensorType
from infer_server.engines.ir.shapes import fixed
from infer_server.engines.ops.op import Op, Types

BLOCK = 64          # boxes of a class that the reference compares at once


class BoundedNonMaxSuppression(Op):
    """ONNX's NonMaxSuppression with a bounded result: (batch, class, box) of the selected boxes per class.

    boxes [batch, boxes, 4], scores [batch, classes, boxes], and the scalars most, overlap (IoU) and least (score) ->
    [rows, 3] with rows = batch * classes * `limit`, and count [1]. Only the first `count` rows are defined.
    """
    attributes = ("center_point_box", "limit")

    @classmethod
    def types(cls, node: Node, boxes: TensorType, scores: TensorType, *_: TensorType) -> Types:
        if len(boxes.shape) != 3 or len(scores.shape) != 3 or boxes.shape[2] != 4 or (
                (boxes.shape[0], boxes.shape[1]) != (scores.shape[0], scores.shape[2])):
            raise GraphError("the inputs must be boxes [batch, boxes, 4] and scores [batch, classes, boxes]")
        batch, classes = fixed(scores.shape[:2])
        rows, integers = batch * classes * node.attrs["limit"], np.dtype(np.int64)
        return TensorType(integers, (rows, 3)), TensorType(integers, (1,))

    @classmethod
    def compute(cls, node: Node, boxes: Array, scores: Array, *numbers: Array) -> tuple[Array, ...]:
        most, overlap, least = (number.reshape(-1)[0] for number in numbers)
        limit = min(max(int(most), 0), node.attrs["limit"])
        found = np.zeros((scores.shape[0] * scores.shape[1] * node.attrs["limit"], 3), np.int64)
        count = 0
        for batch, corners in enumerate(map(around if node.attrs.get("center_point_box", 0) else ordered, boxes)):
            for kind, score in enumerate(scores[batch]):
                best = _best(corners, score, limit, overlap, least)
                found[count:count + len(best)] = [(batch, kind, box) for box in best] or found[:0]
                count += len(best)
        return found, np.array([count], np.int64)


def _best(corners: Array, score: Array, limit: int, overlap: np.float32, least: np.float32) -> Array:
    """Select boxes in blocks of falling score: drop those covered by earlier boxes, then test within the block."""
    waiting = np.argsort(-score, kind="stable")
    waiting = waiting[(score[waiting] > least) | (least == -np.inf)]
    area = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    found = waiting[:0]
    for start in range(0, len(waiting), BLOCK):
        if len(found) >= limit:
            break
        block = waiting[start:start + BLOCK]
        block = block[~_covered(corners, area, found, block, overlap).any(0)]
        taken, gone = [], np.zeros(len(block), bool)
        for i, covered in enumerate(_covered(corners, area, block, block, overlap)):
            if not gone[i]:
                taken.append(i)
                gone |= covered
        found = np.concatenate([found, block[taken]])
    return np.asarray(found[:limit])


def _covered(corners: Array, area: Array, by: Array, boxes: Array, overlap: np.float32) -> Array:
    """Return the matrix of tests whether the IoU of each of `by` (rows) with each of the boxes exceeds `overlap`."""
    first, second = corners[by].T[:, :, None], corners[boxes].T
    sides = [np.maximum(np.minimum(first[axis + 2], second[axis + 2]) - np.maximum(first[axis], second[axis]), 0)
             for axis in (0, 1)]
    common = sides[0] * sides[1]
    with np.errstate(invalid="ignore"):     # infinite boxes
        union = area[by][:, None] + area[boxes] - common
    return np.asarray(common > overlap * np.maximum(union, np.finfo(np.float32).tiny))


def ordered(boxes: Array) -> Array:
    """Convert two opposite corners in any order to the lower one and the upper one."""
    pairs = boxes.reshape(-1, 2, 2)
    return np.concatenate([pairs.min(1), pairs.max(1)], 1)


def around(boxes: Array) -> Array:
    """Convert centre, width and height to the lower and the upper corner."""
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], 1)
