"""Measurements of a case (model, precision, batch, number of threads) and their evaluation."""
from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

from benchmarks.runtimes.runtimes import OURS


@dataclass(frozen=True)
class Row:
    """Result of one build. turns: the cost of a call in each turn, in the case's unit; empty if it failed."""
    runtime: str
    build: str                      # model that the runtime was given: "fp32", "our Q/DQ", "nncf", ...
    turns: tuple[float, ...] = ()
    cosine: float = math.nan        # similarity to ONNX Runtime's float32 outputs, the minimum of all outputs
    error: float = math.nan         # max |difference| / max |reference|, the maximum of all outputs
    agrees: bool = True             # the cosine is in the range expected of the precision
    metric: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    failure: str = ""

    @property
    def cost(self) -> float:
        return median(self.turns) if self.turns else math.inf


@dataclass(frozen=True)
class Ratio:
    """Time of a peer over ours: median over the turns, and quartiles."""
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Case:
    model: str
    precision: str
    batch: int
    threads: int
    unit: str
    rows: tuple[Row, ...]

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.model, self.precision, self.batch, self.threads

    @property
    def ours(self) -> Row:
        return next(row for row in self.rows if row.runtime == OURS)

    def fastest(self, *runtimes: str) -> Row | None:
        """Return the fastest build of these runtimes; None if none of them ran."""
        rows = [row for row in self.rows if row.runtime in runtimes and row.turns]
        return min(rows, key=lambda row: row.cost) if rows else None

    def ratio(self, row: Row) -> Ratio | None:
        """Return the cost of a row over ours; None if either failed."""
        if not row.turns or not self.ours.turns:
            return None
        ratios = [a / b for a, b in zip(row.turns, self.ours.turns, strict=True)]
        low, middle, high = quantiles(ratios, n=4, method="inclusive")
        return Ratio(middle, low, high)


def mean_ratio(cases: Iterable[Case], *runtimes: str) -> float:
    """Return the geometric mean of the ratios to the fastest build of these runtimes; NaN without any."""
    ratios = [ratio.median for case in cases if (row := case.fastest(*runtimes)) and (ratio := case.ratio(row))]
    return geometric_mean(ratios) if ratios else math.nan


# ---- files
def write_results(path: Path, cases: Sequence[Case]) -> list[Case]:
    """Add cases to a JSON file, replacing those with equal keys; return all its cases, sorted."""
    by_key = {case.key: case for case in (read_results(path) if path.exists() else [])}
    by_key |= {case.key: case for case in cases}
    every = [by_key[key] for key in sorted(by_key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(case) for case in every], indent=1))
    return every


def read_results(path: Path) -> list[Case]:
    """Return the cases in a file of results. Raises OSError, ValueError, TypeError or KeyError if it is invalid."""
    def row(fields: dict[str, Any]) -> Row:
        return Row(**{**fields, "turns": tuple(fields["turns"])})

    return [Case(**{**fields, "rows": tuple(map(row, fields["rows"]))}) for fields in json.loads(path.read_text())]
