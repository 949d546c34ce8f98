"""Results as Markdown: a summary with a line for each case, geometric means, and every build of every case."""
from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure.results import Case, Row, mean_ratio
from benchmarks.reports.document import Cell, machine, markdown_table
from benchmarks.runtimes.runtimes import OPENVINO, ORT, OURS, versions

PEERS = ((OPENVINO,), (ORT,), (OPENVINO, ORT))


def report(cases: Sequence[Case]) -> str:
    """Return the overview and a table of each case, as Markdown."""
    return "\n\n".join([overview(cases), "Each case, by the fastest builds:", summary(cases)])


def overview(cases: Sequence[Case]) -> str:
    """Return the overview in Markdown. A ratio is peer / ours for the peer's fastest build: above 1, ours is faster."""
    packages = ", ".join(f"{package} {version}" for package, version in versions().items())
    return "\n\n".join([
        f"On {machine()}; {packages}. Costs are medians over turns, in the case's unit; ratios are those of the peer's "
        "fastest\nbuild to ours, turn by turn: median and quartiles. Above 1, ours is faster.",
        "Geometric means of the ratios:", means(cases)])


def every_build(cases: Sequence[Case]) -> str:
    return "\n\n".join(map(details, cases))


def summary(cases: Sequence[Case]) -> str:
    header = ["model", "precision", "batch", "threads", OURS, "unit", OPENVINO, "its build", "ratio", ORT, "its build",
              "ratio", "metric of ours"]
    rows: list[list[Cell]] = []
    for case in cases:
        line: list[Cell] = [case.model, case.precision, case.batch, case.threads, _cost(case.ours), case.unit]
        for runtime in (OPENVINO, ORT):
            line += _peer(case, case.fastest(runtime))
        rows.append([*line, _metric(case.ours)])
    return markdown_table(header, rows)


def means(cases: Sequence[Case]) -> str:
    """Return a Markdown table of geometric means by precision, batch and number of threads."""
    groups: dict[tuple[str, int, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.precision, case.batch, case.threads), []).append(case)
    rows: list[list[Cell]] = [[*key, len(group), *(mean_ratio(group, *peers) for peers in PEERS)]
                              for key, group in sorted(groups.items())]
    return markdown_table(["precision", "batch", "threads", "models", *(f"to {' or '.join(p)}" for p in PEERS)], rows)


def details(case: Case) -> str:
    header = ["runtime", "build", f"median, {case.unit}", "least", "ratio", "cosine", "error", "metric", "remarks"]
    rows: list[list[Cell]] = [
        [row.runtime, row.build, _cost(row), min(row.turns, default="-"), str(case.ratio(row) or "-"),
         "-" if row.failure else f"{row.cosine:.5f}", "-" if row.failure else row.error, _metric(row), _remarks(row)]
        for row in case.rows]
    return (f"{case.model}, {case.precision}, batch {case.batch}, {case.threads} thread{'s' * (case.threads > 1)}:\n\n"
            + markdown_table(header, rows))


def _cost(row: Row) -> Cell:
    return row.cost if row.turns else "failed"


def _peer(case: Case, row: Row | None) -> list[Cell]:
    return ["failed", "-", "-"] if row is None else [_cost(row), row.build, str(case.ratio(row) or "-")]


def _metric(row: Row) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in row.metric.items()) or "-"


def _remarks(row: Row) -> str:
    disagrees = "" if row.agrees or row.failure else "DISAGREES with float32"
    return "; ".join(filter(None, (row.failure and f"failed: {row.failure}", disagrees, row.note))).replace("|", "/")
