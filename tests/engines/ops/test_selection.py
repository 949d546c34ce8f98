"""Operators that select by data, compared with plain Python."""
import numpy as np
import pytest

from infer_server.engines.ir.graph import Node
from infer_server.engines.ops import OPS
from infer_server.engines.ops.selection import BLOCK


def overlap(a, b):
    """Return the intersection over union of two boxes."""
    sides = [min(a[axis + 2], b[axis + 2]) - max(a[axis], b[axis]) for axis in (0, 1)]
    common = max(sides[0], 0) * max(sides[1], 0)
    return common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common)


@pytest.mark.parametrize("centred", [0, 1])
def test_suppression_keeps_the_best_of_boxes_that_cover_each_other_over_several_blocks(centred):
    random, limit = np.random.default_rng(0), 60
    first = random.uniform(0, 40, (1, 3 * BLOCK + 5, 2))
    boxes = np.concatenate([first, first + random.uniform(1, 9, first.shape)], -1).astype(np.float32)
    scores = random.uniform(size=(1, 2, boxes.shape[1])).astype(np.float32)
    wanted = []
    for kind in (0, 1):
        kept = []
        for box in np.argsort(-scores[0, kind]):
            if len(kept) < limit and scores[0, kind, box] > 0.1 and all(
                    overlap(boxes[0, other], boxes[0, box]) <= 0.3 for other in kept):
                kept.append(box)
        wanted += [(0, kind, box) for box in kept]
    node = Node("BoundedNonMaxSuppression", (), (), {"limit": 70, "center_point_box": centred})
    given = np.concatenate([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], -1)
    found, count = OPS[node.op].reference(node, given if centred else boxes, scores, np.array([limit]),
                                          np.float32([0.3]), np.float32([0.1]))
    np.testing.assert_array_equal(found[:count[0]], wanted)
    assert any(list(np.argsort(-scores[0, 0])).index(box) >= BLOCK for _, kind, box in wanted if kind == 0)
