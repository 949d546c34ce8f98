"""Split of an accuracy target's items: for the ranges, for the choice of layers, and for the score that is reported.

A score is optimistic on the items that chose the layers, so a part that chose nothing is set aside if there are enough.

    data                    ranges          choice of layers            reported score
    --calib alone           two quarters    every fourth, from the 4th  every fourth, from the 2nd
    --calib and --eval      all of --calib  three quarters of --eval    every fourth of --eval, from the 4th
    ... and --test          all of --calib  all of --eval               all of --test

With fewer than FEWEST_ITEMS items in the set that would be divided, no test items are set aside.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from infer_server.calibration.data.items import CalibrationData
from infer_server.engines.errors import CalibrationError

STEP = 4                # every fourth item
EVALUATION, TEST = 3, 1     # first items of the parts of --calib
FEWEST_ITEMS = 128      # for test items of their own: 32 of them resolve a share to 3 %


@dataclass(frozen=True)
class LabelledItems:
    """Items with the class of each; labels: None if there are none."""
    data: CalibrationData
    labels: Sequence[int] | None = None

    def every(self, step: int, start: int) -> LabelledItems:
        """Return the items start, start + step, start + 2 step, ..."""
        return LabelledItems(self.data.every(step, start), None if self.labels is None else self.labels[start::step])

    def without_every(self, step: int, start: int) -> LabelledItems:
        """Return the items that `every` leaves out."""
        labels = None if self.labels is None else [
            label for number, label in enumerate(self.labels) if number < start or (number - start) % step]
        return LabelledItems(self.data.without_every(step, start), labels)


@dataclass(frozen=True)
class Split:
    """Items of an accuracy target.

    evaluation  items on which layers are chosen
    test        items on which nothing is chosen; None if there are too few
    source      where the test items are from, for messages; "" if there are none
    """
    evaluation: LabelledItems
    test: LabelledItems | None
    source: str


def for_ranges(data: CalibrationData, has_evaluation: bool, has_test: bool) -> CalibrationData:
    """Return the calibration items that ranges are chosen on. The arguments say whether --eval and --test are given."""
    if has_evaluation:
        return data
    if has_test or not _is_enough(data):
        return data.without_every(STEP, EVALUATION)
    return data.every(STEP // 2)


def split_of(calibration: Callable[[], CalibrationData], evaluation: LabelledItems | None,
             test: LabelledItems | None) -> Split:
    """Return the items for the choice of layers and for the reported score.

    Parameters
    ----------
    calibration : callable
        Returns all calibration items; called without evaluation items.
    evaluation, test : LabelledItems, optional
        Items of --eval and --test.

    Raises
    ------
    CalibrationError
        The number of labels is not that of the items.
    """
    if evaluation is None:
        items = LabelledItems(calibration())
        chosen = items.every(STEP, EVALUATION)
        if test is None and _is_enough(items.data):
            return Split(chosen, items.every(STEP, TEST), "every fourth calibration item")
    else:
        chosen, count = evaluation, evaluation.data.count
        if evaluation.labels is not None and count is not None and len(evaluation.labels) != count:
            raise CalibrationError(f"{len(evaluation.labels)} labels for {count} evaluation items")
        if test is None and _is_enough(evaluation.data):
            return Split(evaluation.without_every(STEP, EVALUATION), evaluation.every(STEP, EVALUATION),
                         "every fourth item of --eval")
    return Split(chosen, test, "--test" if test else "")


def _is_enough(data: CalibrationData) -> bool:
    """Return True if the items can be divided once more."""
    count = sum(1 for _ in islice(data, FEWEST_ITEMS)) if data.count is None else data.count
    return count >= FEWEST_ITEMS
