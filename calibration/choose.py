"""Choose among calibrators by the error that each makes: no rule is the best for every model.

`evaluate` builds and runs the quantised model on calibration items and compares its outputs with the float model's
(`compare`). The score is the worst output's signal to noise ratio in the 4-norm, which the peaks dominate; top-1
agreement moves in steps of 1 or 2 % with a few dozen items, and only breaks ties.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibration.accuracy.measures import Powers, cosine, powers, top1_agreement, typical
from calibration.table import CalibrationTable
from engines.errors import CalibrationError
from engines.ir.graph import Array

TIE_DB = 0.1        # scores nearer than this are equal
MIN_CLASSES = 3     # an output of [items, classes] with at least so many is taken for a classifier's


@dataclass(frozen=True)
class Errors:
    """The errors of the worst quantised output against its float counterpart, over all items.

    peak_db     signal to noise ratio in the 4-norm: what choices go by
    sqnr_db     signal to quantisation noise ratio
    cosine      of the angle between them, mean over items
    top1        share of items with the same largest element, 0..1; None if no output looks like a classifier's
    """
    peak_db: float
    sqnr_db: float
    cosine: float
    top1: float | None

    def __str__(self) -> str:
        top1 = "" if self.top1 is None else f"  {100 * self.top1:5.1f} %"
        return f"{self.peak_db:7.2f} dB  {self.sqnr_db:7.2f} dB  {self.cosine:.5f}{top1}"


Evaluate = Callable[[CalibrationTable], Errors]


@dataclass(frozen=True)
class CalibratorChoice:
    """The calibration table that was chosen, its name, and every candidate's errors, the best first."""
    name: str
    table: CalibrationTable
    errors: Mapping[str, Errors]

    def __str__(self) -> str:
        width = max(len("calibrator"), *map(len, self.errors))
        head = f"  {'calibrator':{width}}  {'peak SNR':>10}  {'SQNR':>10}  {'cosine':7}  {'top-1':>7}"
        return "\n".join([head, *(f"{'*' if name == self.name else ' '} {name:{width}}  {errors}"
                                  for name, errors in self.errors.items())])


def compare(reference: Sequence[Mapping[str, Array]], outputs: Iterable[Mapping[str, Array]]) -> Errors:
    """The errors of `outputs` against `reference`: runs of the same feeds in the same order.

    Items lie on the leading axis of an output. Only floating point outputs count; CalibrationError if there is none,
    or nothing but zeros in them.
    """
    items: dict[str, list[Powers]] = {}
    cosines: dict[str, list[float]] = {}
    agreements: list[float] = []
    for expected, found in zip(reference, outputs, strict=True):
        for name in (name for name, array in expected.items() if array.dtype.kind == "f"):
            a, b = (np.atleast_1d(run[name]) for run in (expected, found))
            items.setdefault(name, []).extend(map(powers, a, b))
            cosines.setdefault(name, []).extend(map(cosine, a, b))
            if a.ndim == 2 and a.shape[1] >= MIN_CLASSES:
                agreements += [top1_agreement(row, other) for row, other in zip(a, b, strict=True)]
    measured = [found for found in map(typical, items.values()) if found]
    if not measured:
        raise CalibrationError("calibrators cannot be compared: the model has no floating point output, or only zeros "
                               "in it; choose one yourself (--calibrator)")
    return Errors(min(found.peak_snr_db for found in measured), min(found.sqnr_db for found in measured),
                  min(float(np.mean(values)) for values in cosines.values()),
                  float(np.mean(agreements)) if agreements else None)


def choose(candidates: Mapping[str, CalibrationTable], evaluate: Evaluate) -> CalibratorChoice:
    """Evaluate every candidate and take the best; of equals, the one that agrees in more items, then the first."""
    assert candidates, "nothing to choose from"
    errors = {name: evaluate(table) for name, table in candidates.items()}
    ranked = dict(sorted(errors.items(), key=lambda item: -item[1].peak_db))
    best = max(error.peak_db for error in errors.values())
    equals = [name for name in candidates if errors[name].peak_db >= best - TIE_DB]
    name = max(equals, key=lambda name: errors[name].top1 or 0.0)   # max: the first of the largest
    return CalibratorChoice(name, candidates[name], ranked)
