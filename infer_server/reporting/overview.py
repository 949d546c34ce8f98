"""Sections at the top of a report: the key numbers, the findings, the model and the build's decisions."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from infer_server.engines.plan.coverage import coverage_of
from infer_server.engines.plan.extents import text
from infer_server.engines.plan.roofline import expected
from infer_server.engines.plan.weights import weights_text
from infer_server.engines.summary import tensor
from infer_server.reporting.accuracy import STAGES, not_calibrated, stages_of
from infer_server.reporting.data import ReportData, Row
from infer_server.reporting.elements import Child, Element, decibels, el, facts, listed, missing, number, section

TOP = 3


# ---- key numbers
def tiles(data: ReportData) -> Element:
    """Return the key numbers."""
    return el("dl", [el("div", el("dt", label), el("dd", value, class_="value"), el("dd", about, class_="about"))
                     for label, value, about in _tiles(data)], class_="tiles")


def _tiles(data: ReportData) -> Iterator[tuple[str, str, str]]:
    profile = data.measured.profile
    if profile:
        yield ("time of an inference", _time(profile.run * 1e6),
               f"batch 1, one thread; {profile.percent_of_peak:.0f} % of the core's peak arithmetic")
    elif data.total_us:
        yield "time of an inference", _time(data.total_us), f"sum of the kernels, {data.basis}"
    comparison, stages = data.measured.comparison, stages_of(data)
    if comparison:
        worst = min(comparison.outputs, key=lambda errors: errors.sqnr_db)
        yield ("SQNR of the outputs", decibels(worst.sqnr_db) + " dB" * math.isfinite(worst.sqnr_db),
               f"cosine {worst.cosine:.5f}, {comparison.items} items against the model")
    if stages and "top1" in stages[-1].after:
        yield ("agreement with float", f"{100 * stages[-1].after['top1']:.1f} %",
               "largest class, on the calibration items: optimistic")
    rows = [row for row in data.rows if not row.is_border]
    lost = sum(bool(row.step.fallback) for row in rows)
    yield "kernels", str(len(rows)), f"{lost} of them by reference" if lost else "all compiled"
    if data.size:
        yield "size of the plan", _bytes(data.size), f"{_bytes(_constants(data))} of constants for the kernels"


def _time(us: float) -> str:
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count / 1e3:.3g} KB"


def _constants(data: ReportData) -> int:
    return sum(len(plan.machine.constants) for plan in data.plan.within() if not plan.machine.shared)


# ---- findings
def findings(data: ReportData) -> Element:
    """Return the cards at the top: the least accurate layers, the slowest kernels, and the calibration's trials."""
    cards = [_card("Layers that cost most accuracy", *_costly(data)),
             _card("Kernels that take most time", *_slow(data)), _card("What the calibration tried", *_tried(data))]
    return el("div", cards, class_="cards")


def _card(title: str, body: Child, about: str) -> Element:
    return el("article", el("h2", title), body, el("p", about, class_="about") if about else None)


def _link(row: Row) -> Element:
    return el("a", row.step.fuses[0] if row.step.fuses else row.step.name, href=f"#k{row.index}")


def _costly(data: ReportData) -> tuple[Child, str]:
    ranked = sorted(data.sensitivity, key=lambda one: -float(one["noise"]))[:TOP]
    kernel = {name: row.index for row in data.rows for name in row.step.fuses}
    if ranked:
        body = [el("li", el("a" if one["layer"] in kernel else "span", one["layer"],
                         href=f"#k{kernel[one['layer']]}" if one["layer"] in kernel else None),
                   el("b", f"{100 * float(one['noise']):.1f} %")) for one in ranked]
        return (el("ol", body),
                "Noise that this layer alone in INT8 adds to the outputs, as a share of that of all layers.")
    known = sorted((row for row in data.rows if row.sqnr_db is not None), key=lambda row: row.sqnr_db or 0.0)[:TOP]
    if known:
        return (el("ol", [el("li", _link(row), el("b", f"{decibels(row.sqnr_db)} dB")) for row in known]),
                "Layers of the least SQNR against the model; errors of the layers before them count.")
    return missing("Not measured: build with --report, and --calib for INT8."), ""


def _slow(data: ReportData) -> tuple[Child, str]:
    rows = data.slowest(TOP)
    if not rows:
        return missing("The plan has no times: it was built without timing."), ""
    body = [el("li", _link(row), el("b", f"{number(row.us)} µs, {100 * (row.us or 0.0) / data.total_us:.1f} %"))
            for row in rows]
    gains = [row for row in data.rows if row.us and row.bound_us is not None]
    gain = max(gains, key=lambda row: (row.us or 0.0) - (row.bound_us or 0.0), default=None)
    about = f"Times of one item, {data.basis}."
    if gain is not None:
        about += (f" Most above its bound: {gain.step.name}, {number(gain.us)} µs where the roofline has "
                  f"{number(gain.bound_us)}.")
    return el("ol", body), about


def _tried(data: ReportData) -> tuple[Child, str]:
    stages = stages_of(data)
    if not stages:
        if calibrator := data.record.get("calibrator"):
            return missing(f"Ranges of '{calibrator}' came from a calibration cache, without a record of a search."), ""
        return missing(f"Nothing: {not_calibrated(data)}."), ""
    body = []
    for stage in stages:
        unit = "peak_db" if stage.name in ("calibrator", "range") else "sqnr_db"
        change = f"{stage.before[unit]:.1f} → {stage.after[unit]:.1f} dB"
        body.append(el("li", el("span", f"{STAGES.get(stage.name, stage.name)}: {stage.tried} tried, {stage.outcome}"),
                       el("b", change)))
    return (el("ul", body), "Peak SNR of calibrators and ranges, else SQNR, of the outputs on calibration items. "
            "A calibrator's change is from the first one that was tried.")


# ---- model and build
def model(data: ReportData) -> Element:
    """Return the section about the model."""
    part, graph = data.plan.open_part, data.graph
    return section("model-section", "Model", facts([
        ("inputs", _lines(tensor(io) for io in part.inputs)), ("outputs", _lines(tensor(io) for io in part.outputs)),
        ("parameters", _parameters(graph)),
        ("multiply-accumulates", f"{number(sum(row.step.macs for row in data.rows) / 1e6)} M an item"),
        ("ONNX nodes", _nodes(data)), ("operators", _operators(data))]))


def _lines(texts: Iterator[str]) -> list[Element]:
    lines = list(texts)
    return [el("div", line) for line in (*lines[:8], *([f"and {len(lines) - 8} more"] if len(lines) > 8 else []))]


def _parameters(graph: Mapping[str, Any]) -> str:
    nodes = graph.get("nodes", ())
    computed = {name for node in nodes for inner in (node, *node.get("body", ())) for name in inner["outputs"]}
    read = {name for node in nodes for name in node["inputs"]} - computed - set(graph.get("inputs", ()))
    shapes = [graph["types"][name]["shape"] for name in read if name in graph.get("types", {})]
    count = sum(math.prod(shape) for shape in shapes if all(isinstance(extent, int) for extent in shape))
    if not graph:
        return "unknown: the plan has no graph"
    return f"{count / 1e6:.3g} M" if count >= 1e6 else f"{count:,}"


def _nodes(data: ReportData) -> str:
    names = {name for row in data.rows for name in row.step.fuses}
    kernels = sum(not row.is_border for row in data.rows)
    return f"{len(names)}, fused into {kernels} kernels"


def _operators(data: ReportData) -> str:
    counts = Counter(name for row in data.rows for name in row.ops)
    return listed([f"{count} {name}" for name, count in counts.most_common()], 14)


def build(data: ReportData) -> Element:
    """Return the section about the build's decisions."""
    notices = [str(notice) for notice in data.metadata.get("notices", ())]
    details = el("details", el("summary", f"{len(notices)} notices of the build"),
                 el("ul", [el("li", notice) for notice in notices]), class_="notices") if notices else None
    return section("build-section", "Build", facts(_decisions(data)), details)


def _decisions(data: ReportData) -> Iterator[tuple[str, Child]]:
    plan, record, metadata = data.plan, data.record, data.metadata
    machine = data.shown.machine
    counts = Counter(row.precision for row in data.rows if not row.is_border)
    shares = ", ".join(f"{count} kernels in {name}" for name, count in counts.most_common())
    yield "precision", f"{plan.precision}: {shares}"
    if weights := weights_text(metadata):
        yield "weights", _lines(iter(weights.removeprefix("weights: ").splitlines()))
    yield "target", f"{machine.target} ({machine.backend}), on {machine.cpu.get('model', 'an unknown processor')}"
    yield "coverage", coverage_of(plan).line.removeprefix("coverage: ")
    yield "batch", (f"up to {plan.max_batch}" if plan.max_batch else "the declared shape") + (
        f"; items depend on each other: {plan.dependence}" if plan.dependence else "")
    if plan.open:
        yield "specialised for", listed([text(one.extents) for one in (plan, *plan.open.others)])
    if plan.program:
        yield "program", f"{len(plan.program.segments)} segments; the page shows the largest one"
    if calibrator := record.get("calibrator"):
        yield "ranges", f"{calibrator}, on {record.get('calibration_items', '–')} items"
        yield "biases", "corrected" if record.get("biases_corrected") else "not corrected"
        yield "smoothing", f"{record.get('tensors_smoothed') or 'no'} tensors"
        yield "scales by row", f"{record.get('tensors_scaled_by_row') or 'no'} tensors"
    if preprocess := record.get("preprocess"):
        yield "preprocessing", ", ".join(f"{name} {value}" for name, value in preprocess.items()
                                         if value not in (None, ""))
    if kept := list(metadata.get("kept_float", ())):
        yield "kept in float", f"{len(kept)} nodes: {listed(kept)}"
    if line := expected(plan):
        yield "expected", line
    buffers = sum(buffer.bytes for buffer in machine.buffers)
    yield "memory", f"{_bytes(_constants(data))} of constants, {_bytes(buffers)} of activations" + (
        " for a full batch" if plan.max_batch > 1 else "")
    if compiler := metadata.get("compiler"):
        yield "compiler", f"version {compiler}"
