"""Tests of the axes of a load test's picture."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from infer_server.clients.load.generator import LoadLevel
from infer_server.clients.load.measure import Latency, Summary
from infer_server.clients.load.plot import _draw_batches, _draw_curve, _draw_parts, knee, write_plot
from infer_server.clients.load.report import Report
from infer_server.clients.load.schedule import Closed
from infer_server.clients.load.statistics import ServerSplit


def level(concurrency: int, throughput: float, mean: float) -> LoadLevel:
    latency = Latency(mean, 0.9 * mean, 1.2 * mean, 1.3 * mean, 1.5 * mean, 2 * mean)
    split = ServerSplit(0.1 * mean, 0.0, 0.5 * mean, 0.1 * mean, 100, 3.0, {2: 50, 4: 50})
    summary = Summary(1.0, 100, throughput, latency, {}, 0.0, 0.0)
    return LoadLevel(Closed(concurrency), summary, split, "stable", {}, client_busy=0.0)


LEVELS = [level(1, 100.0, 10.0), level(4, 390.0, 10.5), level(16, 400.0, 40.0)]
REPORT = Report("m", "", "a:1", 1, 1.0, 0.0, 0, 25.0, LEVELS)
UNKNOWN = [replace(each, server=None) for each in LEVELS]
FAILED = replace(LEVELS[0], client=replace(LEVELS[0].client, requests=0))


def test_the_knee_is_where_throughput_grows_no_more() -> None:
    assert knee(LEVELS) is LEVELS[1] and knee(LEVELS[:2]) is None and knee([*LEVELS[:2], FAILED]) is None


def test_the_curve_has_a_point_a_load_the_knee_and_the_goal() -> None:
    axes = Figure().add_subplot()
    _draw_curve(axes, REPORT)
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["p99"].get_xdata()) == [100.0, 390.0, 400.0]
    assert list(lines["p99"].get_ydata()) == [15.0, 15.75, 60.0]
    assert list(lines["knee: most throughput / latency"].get_xdata()) == [390.0]
    assert list(lines["goal of p99: 25 ms"].get_ydata()) == [25.0, 25.0]
    assert [text.get_text() for text in axes.texts] == ["1", "4", "16"]


def test_the_parts_are_stacked_to_the_mean_latency() -> None:
    axes = Figure().add_subplot()
    _draw_parts(axes, REPORT)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["client", "network", "queue", "compute"]
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    assert tops == pytest.approx([10.0, 10.5, 40.0])
    assert [bar.get_height() for bar in axes.containers[0]] == pytest.approx([6.0, 6.3, 24.0])


def test_batches_are_areas_by_their_share() -> None:
    axes = Figure().add_subplot()
    _draw_batches(axes, REPORT)
    assert [list(dots.get_sizes()) for dots in axes.collections] == [[160.0, 160.0]] * 3
    assert list(axes.get_lines()[0].get_ydata()) == [3.0, 3.0, 3.0]


def test_a_server_without_statistics_is_plotted_from_outside() -> None:
    for draw in (_draw_parts, _draw_batches):
        axes = Figure().add_subplot()
        draw(axes, replace(REPORT, levels=UNKNOWN))
        assert [text.get_text() for text in axes.texts] == ["no statistics from the server"]


@pytest.mark.parametrize("report", [
    REPORT, replace(REPORT, goal_ms=None, levels=[FAILED]), replace(REPORT, against=replace(REPORT, url="b:1")),
    replace(REPORT, against=replace(REPORT, levels=UNKNOWN))], ids=["one", "failed", "two", "two, one without"])
def test_every_report_has_a_picture(tmp_path: Path, report: Report) -> None:
    write_plot(report, tmp_path / "plot")
    with Image.open(tmp_path / "plot") as picture:
        assert picture.format == "PNG" and picture.width >= 1000
