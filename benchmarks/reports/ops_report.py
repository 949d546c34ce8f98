"""Report of benchmarks.ops as text: ratios by class, the worklist, and a line for every case.

A ratio is peer / ours, of the peer's fastest build: above 1, ours is faster.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import geometric_mean

from benchmarks.deepbench import CLASSES, problems
from benchmarks.measure.results import Case, Ratio
from benchmarks.reports.document import Cell, machine, markdown_table
from benchmarks.runtimes.runtimes import OPENVINO, ORT, versions

PEERS = (OPENVINO, ORT)
GOAL = 1.0          # the goal of each ratio; operators below it are on the worklist


def report(cases: Sequence[Case]) -> str:
    """Return the ratios by class and precision in Markdown."""
    packages = ", ".join(f"{package} {version}" for package, version in versions().items())
    total = {kind: sum(known == kind for known in _kinds().values()) for kind in CLASSES}
    return "\n\n".join([
        f"DeepBench's inference problems as models of one node, one thread, on {machine()}; {packages}.\n"
        "Ratios are those of a peer's fastest build to ours, turn by turn: the median. Above 1, ours is faster.",
        f"Measured: {len(cases)} cases; in each precision there are "
        + ", ".join(f"{count} of class {kind}" for kind, count in total.items()) + ".",
        _summary(cases)])


def every_case(cases: Sequence[Case]) -> str:
    """Return a Markdown table with a row for each case."""
    header = ["problem", "precision", "ours", "unit"]
    rows: list[list[Cell]] = [[case.model, case.precision, case.ours.cost, case.unit] for case in cases]
    for peer in PEERS:
        header += [peer, "its build", "ratio"]
        for case, row in zip(cases, rows, strict=True):
            row += _peer(case, peer)
    return markdown_table(header, rows)


def worklist(cases: Sequence[Case]) -> str:
    """Return the cases in which a peer is faster in Markdown."""
    below = slower(cases)
    if not below:
        return "No case is slower than a peer's."
    return (f"Slower than a peer: {len(below)} of {len(cases)} cases.\n\n" + every_case(below))


def slower(cases: Sequence[Case]) -> list[Case]:
    """Return the cases in which our build failed or a peer is faster, worst ratio first."""
    return sorted((case for case in cases if _least(case) < GOAL), key=_least)


def _summary(cases: Sequence[Case]) -> str:
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((_kinds()[case.model], case.precision), []).append(case)
    rows: list[list[Cell]] = [[kind, precision, len(group), *(cell for peer in PEERS for cell in _spread(group, peer))]
                              for (kind, precision), group in sorted(groups.items())]
    return markdown_table(["class", "precision", "cases", *(f"{peer}: {figure}" for peer in PEERS
                                                            for figure in ("mean", "least", "below 1"))], rows)


def _spread(group: Sequence[Case], peer: str) -> list[Cell]:
    """Return the geometric mean of the ratios, the smallest, and the number below 1."""
    ratios = [ratio.median for case in group if (ratio := _ratio(case, peer))]
    if not ratios:
        return ["-", "-", "-"]
    return [f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", sum(ratio < GOAL for ratio in ratios)]


def _peer(case: Case, peer: str) -> list[Cell]:
    row, ratio = case.fastest(peer), _ratio(case, peer)
    return ["failed", "-", "-"] if row is None else [row.cost, row.build, str(ratio or "-")]


def _ratio(case: Case, peer: str) -> Ratio | None:
    row = case.fastest(peer)
    return case.ratio(row) if row else None


def _least(case: Case) -> float:
    """Return the smaller ratio of the two peers, or 0 if our build failed."""
    if not case.ours.turns:
        return 0.0
    return min((ratio.median for peer in PEERS if (ratio := _ratio(case, peer))), default=GOAL)


@cache
def _kinds() -> dict[str, str]:
    """Return the class of each problem by its name."""
    return {problem.name: problem.kind for problem in problems()}
