"""Report of a plan: a page that holds all it needs, shows the plan's data, and takes names for text."""
from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer_server import build_engine
from infer_server.cli import build_engine as build_command
from infer_server.cli import inspect_engine
from infer_server.cli import profile as profiling
from infer_server.engines.plan.file import read_plan, write_plan
from infer_server.reporting import accuracy
from infer_server.reporting.data import Measured, ReportData
from infer_server.reporting.elements import number
from infer_server.reporting.page import report
from tests.engines.compiler.program_models import chosen_rows
from tests.infer_server.reporting.models import BROKEN, HOSTILE, built
from tests.infer_server.reporting.pages import Page


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the plan and the report of an INT8 build."""
    folder = tmp_path_factory.mktemp("int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "SECONDS", 0.001)
        return built(folder, "--int8", "--calib", str(folder / "items.npy"), "--timing-cache", str(folder / "times"))


def page_of(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


# ---- the page holds all it needs
def check(page: Page) -> None:
    """Check what holds for every page."""
    assert set(page.values("src")) == set()
    ids = page.values("id")
    assert len(ids) == len({*ids})
    for address in page.values("href"):
        assert address.startswith("data:application/json;base64,") or address[0] == "#" and address[1:] in ids, address
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert {tag for tag, _ in page.elements}.isdisjoint({"iframe", "object", "embed", "link", "img", "base", "form"})
    assert not re.search(r"url\((?!#)|@import", "".join(page.values("style")))
    assert len(page.scripts) == 2 and isinstance(json.loads(page.scripts[0]), list)
    (policy,) = (meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


def test_the_page_of_an_int8_build_needs_nothing_else(int8: tuple[Path, Path]) -> None:
    check(page_of(int8[1]))
    assert int8[1].stat().st_size < 400_000


def test_names_are_text(int8: tuple[Path, Path]) -> None:
    page, plan = page_of(int8[1]), read_plan(int8[0])
    shown = BROKEN.replace("\x01", "\ufffd")
    assert HOSTILE in page.text and shown in page.text
    assert {HOSTILE, BROKEN} <= {name for one in json.loads(page.scripts[0]) for name in one["fuses"]}
    assert {HOSTILE, BROKEN} <= {name for step in plan.machine.steps for name in step.fuses}
    named = Page(report(replace(plan, name="</title><script>"), Measured()))
    check(named)
    assert named.text.count("</title><script>") >= 2


def test_the_browsers_script_makes_no_markup_of_text() -> None:
    script = Page(report(build_engine(chosen_rows(), cache=False, timing=False).plan, Measured())).scripts[1]
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttpRequest", script)


# ---- its contents
def card(page: Path, title: str) -> list[str]:
    """Return the lines of a card of findings."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"<li>(.*?)</li>", text.partition(f"<h2>{title}</h2>")[2].partition("</article>")[0])


def test_the_costliest_layers_are_those_of_the_record(int8: tuple[Path, Path]) -> None:
    actual = read_plan(int8[0]).metadata["sensitivity"]
    layers = [one["layer"] for one in sorted(actual, key=lambda one: -one["noise"])]
    assert {*layers} == {HOSTILE, BROKEN, "conv3", "gemm"}
    lines = card(int8[1], "Layers that cost most accuracy")
    assert [Page(line.partition("<b>")[0]).text for line in lines] == [
        layer.replace("\x01", "\ufffd") for layer in layers[:3]]


def test_the_slowest_kernels_are_those_of_the_table(int8: tuple[Path, Path]) -> None:
    kernels = json.loads(page_of(int8[1]).scripts[0])
    slowest = sorted(range(len(kernels)), key=lambda index: -kernels[index]["us"])[:3]
    links = [Page(line).values("href") for line in card(int8[1], "Kernels that take most time")]
    assert links == [[f"#k{index}"] for index in slowest] and kernels[slowest[0]]["us"] > 0


def test_the_steps_of_the_search_have_errors_before_and_after(int8: tuple[Path, Path]) -> None:
    plan, page = read_plan(int8[0]), page_of(int8[1])
    trials = plan.metadata["search"]
    assert list(dict.fromkeys(one["stage"] for one in trials)) == [
        "equalisation", "bias correction", "rounding", "calibrator", "range"]
    (chosen,) = [one for one in trials if one["stage"] == "calibrator" and one["kept"]]
    assert chosen["trial"] == plan.metadata["calibrator"].removesuffix(", refined")
    lines = card(int8[1], "What the calibration tried")
    assert len(lines) == 5 and "5 tried" in lines[3] and f"{chosen['peak_db']:.1f} dB" in lines[3]
    assert f"All {len(trials)} trials" in page.text


def test_each_quantised_tensor_has_a_histogram_with_its_range(int8: tuple[Path, Path]) -> None:
    actual = read_plan(int8[0]).metadata["histograms"]
    assert len(page_of(int8[1]).all("figure")) == len(actual) >= 4
    for one in actual.values():
        assert len(base64.b64decode(one["bins"])) == 128 and 0 <= one["clipped"] < 0.05
        assert one["low"] <= 0 <= one["high"] and one["range"][0] <= 0 < one["range"][1]


def test_the_trace_is_that_of_the_kernels(int8: tuple[Path, Path]) -> None:
    page = page_of(int8[1])
    (link,) = [address for address in page.values("href") if address.startswith("data:")]
    events = [event for event in json.loads(base64.b64decode(link.partition(",")[2]))["traceEvents"]
              if event["ph"] == "X"]
    assert [event["name"] for event in events] == [step.name for step in read_plan(int8[0]).machine.steps]
    assert all(abs(a["ts"] + a["dur"] - b["ts"]) < 0.01 for a, b in zip(events, events[1:], strict=False))


def test_a_plans_file_gives_the_same_page_without_the_model(int8: tuple[Path, Path], tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "SECONDS", 0.001)
    assert inspect_engine.main([str(int8[0]), "--report", str(tmp_path / "page.html")]) == 0
    page, before = page_of(tmp_path / "page.html"), page_of(int8[1])
    check(page)
    assert len(page.all("figure")) == len(before.all("figure"))
    assert "SQNR of layers: the model's file was not given" in page.text and "SQNR of layers:" not in before.text
    assert card(tmp_path / "page.html", "What the calibration tried") == card(int8[1], "What the calibration tried")


def test_a_float_build_says_what_it_has_not(tmp_path: Path) -> None:
    _, file = built(tmp_path, "--no-timing")
    page = page_of(file)
    check(page)
    for line in ("There is no roofline: the build was asked for no timing.",
                 "No ranges were searched: the build is fp32.", "The plan has no histograms",
                 "The plan was built without an accuracy target", "there is no trace"):
        assert line in page.text
    assert "SQNR of layers:" not in page.text and any(
        attributes.get("id") == "layers-figure_1" for attributes in page.all("g"))


TARGET = {"metric": "top1", "max_drop": 0.01, "met": False, "items": 200, "float": 0.95, "int8": 0.9, "score": 0.93,
          "kept": [HOSTILE, "gemm"], "float_type": "bf16", "kept_fp32": [HOSTILE],
          "tried": [{"kept": 4, "score": 0.95, "us": 20.0}, {"kept": 0, "score": 0.9, "us": 10.0},
                    {"kept": 1, "score": 0.93, "us": 12.5}, {"kept": 1, "score": 0.91, "us": 0.0}],
          "layers": [{"layer": HOSTILE, "sqnr_db": 20.0, "noise": 0.6, "us": 2.5},
                     {"layer": "gemm", "sqnr_db": 18.0, "noise": 0.2, "us": 1.5}]}


def test_sets_of_layers_are_points_if_their_time_is_known() -> None:
    assert accuracy._points(TARGET) == [(0, 10.0, 0.9), (1, 12.5, 0.93), (4, 20.0, 0.95)]


def test_the_curve_of_a_target_has_its_points(int8: tuple[Path, Path]) -> None:
    plan = read_plan(int8[0])
    plan = replace(plan, metadata={**plan.metadata, "target": TARGET, "sensitivity": None})
    page = Page(report(plan, Measured()))
    check(page)
    assert "top1 at least 0.94: NOT met" in page.text and "microseconds an item" in page.text
    assert "of these in fp32" in page.text
    data = ReportData(plan)
    assert [one["layer"] for one in data.sensitivity] == [HOSTILE, "gemm"]


def test_the_page_is_written_without_matplotlib(int8: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    page = Page(report(read_plan(int8[0]), Measured()))
    check(page)
    assert "pip install 'infer-server[plot]'" in page.text and page.all("figure")


def test_stripped_plans_and_programs_have_a_page(int8: tuple[Path, Path], tmp_path: Path) -> None:
    write_plan(read_plan(int8[0]).strip(), tmp_path / "stripped.plan")
    check(Page(report(read_plan(tmp_path / "stripped.plan"), Measured())))
    program = build_engine(chosen_rows(), cache=False, timing=False).plan
    assert program.program
    page = Page(report(program, Measured()))
    check(page)
    assert "the page shows the largest one" in page.text


def test_a_page_that_cannot_be_written_is_refused_before_the_build(tmp_path: Path,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    lost = str(tmp_path / "none" / "page.html")
    assert build_command.main(["none.onnx", "-o", str(tmp_path / "m.plan"), "--report", lost]) == 2
    assert f"cannot write {lost}" in capsys.readouterr().err
    assert inspect_engine.main([str(tmp_path), "--report", lost]) == 2


@pytest.mark.parametrize("value, digits, text", [
    (None, 3, "–"), (float("nan"), 3, "–"), (float("inf"), 3, "exact"), (0.0, 3, "0"), (1234.5, 3, "1,234"),
    (999.6, 3, "1,000"), (0.012345, 3, "0.0123"), (1e-7, 3, "1e-07"), (-1234.0, 3, "-1,234"), (12.0, 3, "12")])
def test_numbers_are_short(value: float | None, digits: int, text: str) -> None:
    assert number(value, digits) == text


def test_metadata_of_another_form_is_left_out(int8: tuple[Path, Path]) -> None:
    plan = read_plan(int8[0])
    odd: dict[str, Any] = {"search": [{"stage": "x"}], "sensitivity": [{"layer": 3}, {"layer": "y", "noise": "<b>"}],
                           "target": {"met": True}, "histograms": {}}
    page = Page(report(replace(plan, metadata={**plan.metadata, **odd}), Measured()))
    check(page)
    assert "The plan has no histograms" in page.text and "no record of a search" in page.text
