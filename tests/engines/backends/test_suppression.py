import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import PORTABLE
from infer_server.engines.backends.llvm.kernels.elementwise.top_k import BLOCK
from infer_server.engines.lowering.problems.selection import Suppression
from infer_server.engines.lowering.problems.view import dense_view
from scripts.testing.suite import gapped, run
from tests.engines.backends.llvm.runner import CpuRunner
from tests.engines.backends.runners import EVERY_WIDTH

BATCH, CLASSES = 2, 3


def spec_of(boxes, limit, centred=False):
    one = [dense_view(dtype, (1,)) for dtype in ("int64", "float32", "float32", "int64")]
    return Suppression(gapped("float32", (BATCH, boxes, 4)), gapped("float32", (BATCH, CLASSES, boxes)), *one[:3],
                       dense_view("int64", (BATCH * CLASSES * limit, 3)), one[3], limit, centred)


def draw(boxes, kinds=1000):
    """Draw boxes that overlap, and scores of few values.

    The corners of a box come in any order, some boxes are empty, and scores include both zeros and negative ones.
    """
    random = np.random.default_rng(0)
    corners = random.integers(0, 12, (1, BATCH, boxes, 4)).astype(np.float32)
    scores = random.integers(-kinds, kinds, (1, BATCH, CLASSES, boxes)).astype(np.float32) / kinds
    scores[scores == 0] *= random.choice([-1, 1], (scores == 0).sum()).astype(np.float32)
    return corners, scores


def chosen(spec, runner, corners, scores, most, overlap, least):
    """Return the selected rows of the problem's reference and of the runner."""
    inputs = [corners, scores, np.array([[most]]), np.float32([[overlap]]), np.float32([[least]])]
    (rows, count), (found, found_count) = spec.reference(inputs, {}), run(spec, runner, inputs, {})
    return rows[0, :count[0, 0]], found[0, :found_count[0, 0]]


@EVERY_WIDTH
@pytest.mark.parametrize("boxes, limit, most, overlap, least, kinds, centred", [
    (5, 5, 9, 0.5, -np.inf, 1000, False), (BLOCK, 7, 3, 0.0, 0.2, 3, False),
    (3 * BLOCK + 17, 60, 60, 0.3, 0.0, 1000, True), (BLOCK * BLOCK + 70, 40, 40, 0.7, 0.9, 1000, False),
    (37, 4, -1, 0.5, 0, 2, True), (37, 4, 4, 0.5, 2, 2, False)],
    ids=["all", "many equals", "centres", "many boxes", "none is wanted", "no score is high enough"])
def test_the_reference_takes_the_same_boxes(boxes, limit, most, overlap, least, kinds, centred, runner):
    expected, got = chosen(spec_of(boxes, limit, centred), runner, *draw(boxes, kinds), most, overlap, least)
    np.testing.assert_array_equal(got, expected)
    assert (len(got) > 0) == (most > 0 and least < 1)


@EVERY_WIDTH
def test_a_score_that_is_no_number_comes_last_and_a_box_without_end_covers_none(runner):
    corners, scores = np.zeros((1, BATCH, 3, 4), np.float32), np.zeros((1, BATCH, CLASSES, 3), np.float32)
    corners[..., :2] = np.arange(3, dtype=np.float32)[:, None] * 10
    corners[..., 2:] = corners[..., :2] + 5
    corners[:, 1, :2] = [-np.inf, -np.inf, np.inf, np.inf]
    scores[:] = [0.5, np.nan, 0.9]
    expected, got = chosen(spec_of(3, 3), runner, corners, scores, 3, 0.5, -np.inf)
    np.testing.assert_array_equal(got, expected)
    assert got[:3, 2].tolist() == [2, 0, 1] and len(got) == 18


def test_a_wrong_share_is_caught():
    _, strict = chosen(spec_of(40, 40), CpuRunner(PORTABLE), *draw(40), 40, 0.1, -np.inf)
    expected, _ = chosen(spec_of(40, 40), CpuRunner(PORTABLE), *draw(40), 40, 0.2, -np.inf)
    assert len(strict) < len(expected)
