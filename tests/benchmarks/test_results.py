"""Tests of the evaluation of benchmarks.peers' measurements; no peer is needed."""
from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.measure.accuracy import compare, load_judge
from benchmarks.measure.measuring import MIN_TURNS, interleaved
from benchmarks.measure.results import Case, Row, mean_ratio, read_results, write_results
from benchmarks.peers import chosen
from benchmarks.reports.chart import write_chart
from benchmarks.reports.document import PAGES, page_of, write_section
from benchmarks.reports.picture import HEIGHT, PICTURE, RESULTS, WIDTH, write_picture, write_summary
from benchmarks.reports.report import details, every_build, means, report, summary
from benchmarks.runtimes.quantisers import load_items, save_items
from benchmarks.runtimes.runtimes import OPENVINO, ORT, OURS

ROWS = (Row(OURS, "int8", turns=(1.0, 2.0, 1.0), cosine=0.99, error=0.1, metric={"top1": 90.0}),
        Row(OPENVINO, "slow", turns=(9.0, 9.0, 9.0), cosine=0.99, error=0.1),
        Row(OPENVINO, "fast", turns=(2.0, 4.0, 3.0), cosine=0.5, error=0.1, agrees=False),
        Row(ORT, "broken", failure="RuntimeError: too many bins | for this table"))


def case(model: str = "m", rows: tuple[Row, ...] = ROWS, batch: int = 1) -> Case:
    return Case(model, "int8", batch, 1, "ms", rows)


def test_a_peer_is_judged_by_its_fastest_build_turn_by_turn() -> None:
    fastest = case().fastest(OPENVINO, ORT)
    assert fastest is not None and fastest.build == "fast"
    ratio = case().ratio(fastest)
    assert ratio is not None and (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.5)


def test_a_failed_build_is_a_row_with_its_reason() -> None:
    assert case().fastest(ORT) is None and case().ratio(ROWS[3]) is None
    assert "failed: RuntimeError: too many bins / for this table" in details(case())
    assert "| ONNX Runtime | broken | failed |" in details(case())


def test_a_build_that_computes_something_else_is_pointed_out() -> None:
    lines = details(case()).splitlines()
    assert [("DISAGREES" in line) for line in lines[-4:]] == [False, False, True, False]


def test_our_own_failure_leaves_no_ratio() -> None:
    broken = case(rows=(Row(OURS, "int8", failure="no"), *ROWS[1:]))
    assert broken.ratio(ROWS[1]) is None and "failed" in summary([broken])
    assert math.isnan(mean_ratio([broken], OPENVINO))


def test_the_report_has_the_fastest_builds_and_another_page_has_them_all() -> None:
    assert "| slow |" not in report([case()]) and "| fast |" in report([case()])
    assert all(f"| {row.build} |" in every_build([case()]) for row in ROWS)


def test_the_mean_of_ratios_is_geometric_and_of_one_batch() -> None:
    twice = Row(OPENVINO, "x", turns=(8.0, 16.0, 8.0))
    assert mean_ratio([case(), case("n", (ROWS[0], twice))], OPENVINO) == pytest.approx(4)
    assert len(means([case(), case("n"), case(batch=8)]).splitlines()) == 2 + 2


def test_the_chart_shows_the_cases_that_can_be_compared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_chart([case(), case("n", ROWS[:1])], tmp_path / "docs" / "chart.png")
    assert (tmp_path / "docs" / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_the_readme_is_drawn_from_its_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_picture(RESULTS, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as drawn, Image.open(PICTURE) as kept:
        assert drawn.size == kept.size == (WIDTH, HEIGHT) and HEIGHT <= 400


def test_a_summary_has_the_ratio_of_each_peers_fastest_build(tmp_path: Path) -> None:
    write_summary([case()], "python -m benchmarks.peers m.onnx", tmp_path / "results" / "peers.json")
    (row,) = json.loads((tmp_path / "results" / "peers.json").read_text())["cases"]
    assert row["cost"] == 1.0 and list(row["peers"]) == [OPENVINO]
    assert row["peers"][OPENVINO] == {"cost": 3.0, "build": "fast", "ratio": 2.0, "low": 2.0, "high": 2.5}


def test_a_section_is_replaced_on_the_page_that_has_it(tmp_path: Path) -> None:
    for name, section in (("a.md", "first"), ("b.md", "second")):
        (tmp_path / name).write_text(f"# Page\n\n<!-- {section}: begin -->\nold\n<!-- {section}: end -->\n\nafter\n")
    page = page_of("second", tmp_path)
    write_section("second", "new", page)
    assert page.read_text() == "# Page\n\n<!-- second: begin -->\nnew\n<!-- second: end -->\nafter\n"
    assert "old" in (tmp_path / "a.md").read_text()
    assert page_of("gone", tmp_path).name == "machines.md"


@pytest.mark.parametrize("section", ["peers", "peers-builds", "peers-avx512", "ops", "ops-cases", "slower",
                                     "conformance", "transport", "peaks", "building int8", "zoo avx2"])
def test_every_section_that_programs_write_has_a_page(section: str) -> None:
    assert f"<!-- {section}: begin -->" in page_of(section).read_text() and page_of(section).parent == PAGES


def test_results_replace_those_of_the_same_case(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write_results(file, [case("a"), case("b")])
    every = write_results(file, [case("a", ROWS[:1])])
    assert [(c.model, len(c.rows)) for c in every] == [("a", 1), ("b", 4)]
    assert read_results(file) == every


def test_turns_are_taken_by_all_in_alternating_order() -> None:
    called: list[str] = []

    class Clock:
        unit = "calls"

        def of(self, call: Callable[[], object]) -> int:
            call()
            return 1_000_000

    def program(name: str) -> Callable[[], object]:
        return lambda: called.append(name)

    turns = interleaved(Clock(), {name: program(name) for name in "ab"}, seconds=0)
    assert turns == {name: [1.0] * MIN_TURNS for name in "ab"}
    order = [name for name, _ in itertools.groupby(called)]
    assert order == list("ababab")      # a b, b a, a b, b a, a b


def test_outputs_are_compared_by_the_worst_of_them() -> None:
    a, b = np.array([1.0, 0.0]), np.array([2.0, 2.0])
    same = compare([a, b], [a, b])
    assert same.cosine == pytest.approx(1) and same.error == 0
    other = compare([a, b], [np.array([0.0, 1.0]), b])
    assert other.cosine == 0 and other.error == 1
    with pytest.raises(ValueError, match="shape"):
        compare([a], [a[:1]])
    with pytest.raises(ValueError):
        compare([a], [a, b])


def test_a_script_judges_outputs(tmp_path: Path) -> None:
    script = tmp_path / "judge.py"
    script.write_text("def evaluation():\n    yield {'x': 1}\ndef metric(reference, outputs):\n"
                      "    return {'same': float(reference == outputs)}\n")
    judge = load_judge(script)
    assert judge.feeds == [{"x": 1}] and judge.metric([[]], [[]]) == {"same": 1.0}


def test_calibration_items_survive_their_file(tmp_path: Path) -> None:
    items = [{"a:b": np.full((1, 2), i), "c": np.float32([i])} for i in range(12)]
    save_items(tmp_path / "items.npz", items)
    for actual, item in zip(load_items(tmp_path / "items.npz"), items, strict=True):
        assert actual.keys() == item.keys() and all(np.array_equal(actual[name], item[name]) for name in item)


def test_an_option_of_one_model_comes_before_one_for_all() -> None:
    values = ["all.npz", "m=own.npz", "n=x.npz"]
    assert chosen(values, "m") == ["own.npz"] and chosen(values, "other") == ["all.npz"]
