"""The whole search for ranges: the best calibrator for the model, then better ranges for single tensors."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calibration.choose import CalibratorChoice, Evaluate, choose
from calibration.histogram import Histogram
from calibration.refine import Refinement, refine
from calibration.table import CalibrationTable, make_table

# The default first: it is taken where others are no better. Percentile 99.9999 is min-max without single outliers.
CANDIDATES = ("entropy", "percentile", "percentile:99.9999", "mse", "minmax")
ALTERNATIVES = ("percentile:99.9", "percentile:99.999")     # for single tensors; too bold, or too shy, for all


@dataclass(frozen=True)
class Search:
    """What was found, step by step; prints as the steps' reports."""
    choice: CalibratorChoice
    refinement: Refinement | None       # None: not asked for

    @property
    def table(self) -> CalibrationTable:
        return self.refinement.table if self.refinement else self.choice.table

    def __str__(self) -> str:
        return f"{self.choice}\n  refined: {self.refinement}" if self.refinement else str(self.choice)


def search(histograms: Mapping[str, Histogram], graph_hash: str, items: int, evaluate: Evaluate,
           evaluations: int = 32, candidates: Sequence[str] = CANDIDATES) -> Search:
    """The table with the least error that the candidates and then `evaluations` trials with single ranges give.

    evaluate: builds and runs the quantised model with a table's ranges (see calibration.choose); it is called once for
    each candidate and `evaluations` times more. 0 leaves the refinement out.
    """
    def table(name: str) -> CalibrationTable:
        return make_table(name, graph_hash, items, histograms)

    choice = choose({name: table(name) for name in candidates}, evaluate)
    if not evaluations:
        return Search(choice, None)
    others = {name: table(name) for name in ALTERNATIVES}
    return Search(choice, refine(choice.table, others, evaluate, evaluations))
