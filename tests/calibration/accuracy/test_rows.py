"""Rows after a selection are compared in any order; near ties with the last row are not counted."""
from __future__ import annotations

import numpy as np
import pytest

from infer_server.calibration.accuracy.rows import Matched, decided_rows, match_rows
from infer_server.calibration.accuracy.sources import Selection
from infer_server.engines.ir.graph import Array

RNG = np.random.default_rng(0)
BEHIND = Selection(counts=frozenset({40}))


def detections(seed: int = 0) -> Array:
    """Return detections [2, 40, 6]: a box, a falling score and a class."""
    rng = np.random.default_rng(seed)
    score = np.sort(rng.uniform(0.1, 0.9, (2, 40, 1)), axis=1)[:, ::-1]
    return np.concatenate([rng.uniform(0, 300, (2, 40, 4)), score, rng.integers(0, 9, (2, 40, 1))],
                          axis=2).astype(np.float32)


def matched(expected: Array, value: Array, selection: Selection = BEHIND, tolerance: float = 1e-3) -> Matched:
    return match_rows(expected, value, selection, tolerance, decided_rows([(expected, selection)], tolerance))


def test_rows_that_swap_their_places_match() -> None:
    expected = detections()
    value = expected[:, RNG.permutation(40)]
    found = matched(expected, value)
    assert found.missing == 0 and found.matched.all()
    np.testing.assert_array_equal(found.value, expected)


def test_rows_of_other_boxes_or_classes_are_missing() -> None:
    expected = detections()
    value = expected.copy()
    value[0, 3, 0] += 5
    value[1, 7, 5] += 1
    found = matched(expected, value)
    assert found.missing == 2 and not found.matched[0, 3].any() and not found.matched[1, 7].any()
    assert matched(expected, detections(1)).missing == found.rows


def test_a_row_is_matched_once() -> None:
    expected = detections()
    expected[0, 1] = expected[0, 0]
    value = expected.copy()
    value[0, 1, :4] += 50
    assert matched(expected, value).missing == 1


def test_rows_that_nearly_tie_with_the_last_one_are_not_counted() -> None:
    expected = detections()
    expected[:, 30:, 4] = 0.05
    value = expected.copy()
    value[:, 30:, :4] = RNG.uniform(0, 300, (2, 10, 4))        # other candidates of that score
    found = matched(expected, value)
    assert found.missing == 0 and found.rows == 60


def test_a_ranking_in_one_output_tells_which_rows_of_the_others_count() -> None:
    expected = detections()
    expected[:, 30:, 4] = 0.05
    scores, boxes = expected[:, :, 4], expected[:, :, :4]
    other = boxes.copy()
    other[:, 30:] += 50
    decided = decided_rows([(scores, BEHIND), (boxes, BEHIND)], 1e-3)
    assert match_rows(boxes, other, BEHIND, 1e-3, decided).missing == 0
    assert match_rows(boxes, other, BEHIND, 1e-3, {}).missing == 20


def test_another_number_of_rows_is_compared() -> None:
    expected = np.arange(30).reshape(1, 10, 3)
    assert matched(expected, expected[:, :8], Selection()).missing == 2
    assert matched(expected[:, :8], expected, Selection()).missing == 2
    assert matched(expected[:, :0], expected[:, :0], Selection()).missing == 0


@pytest.mark.parametrize("shape, axis", [((2, 40, 6), 1), ((2, 6, 40), 2), ((1, 1, 10, 7), 2), ((1, 10), 1)])
def test_rows_stand_along_the_axis_of_the_selected_elements(shape: tuple[int, ...], axis: int) -> None:
    expected = RNG.uniform(0, 1, shape).astype(np.float32)
    value = np.take(expected, RNG.permutation(shape[axis]), axis)
    assert matched(expected, value).missing == 0


def test_behind_argmax_elements_are_compared_where_they_stand() -> None:
    expected = RNG.uniform(0, 1, (2, 50)).astype(np.float32)
    value = expected.copy()
    value[0, 0] += 0.1
    assert matched(expected, value, Selection(ordered=False)).missing == 1
    assert matched(expected, expected[:, ::-1], Selection(ordered=False)).missing > 50
