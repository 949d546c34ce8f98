"""Sections about accuracy: the calibration search, histograms, sensitivity and SQNR of layers, the accuracy target."""
from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infer_server.reporting import charts
from infer_server.reporting.data import ReportData
from infer_server.reporting.elements import (
    Child,
    Element,
    bar,
    decibels,
    el,
    facts,
    listed,
    missing,
    number,
    section,
    table,
)

WIDE, TALL = 128, 40      # size of a histogram's drawing
STAGES = {"scaled rows": "scales by row", "smoothing": "smoothing of channels",
          "equalisation": "equalisation of channels", "bias correction": "bias correction",
          "rounding": "rounding of weights", "calibrator": "calibrators", "range": "single ranges"}
Trial = Mapping[str, Any]


# ---- the search
@dataclass(frozen=True)
class Stage:
    """One step of the search: its trials, and the errors before and after it."""
    name: str
    trials: tuple[Trial, ...]
    before: Trial
    after: Trial

    @property
    def kept(self) -> list[str]:
        """Labels of the trials that changed the result."""
        return [one["trial"] for one in self.trials if one["kept"] and one["trial"] != "without"]

    @property
    def tried(self) -> int:
        return sum(one["trial"] != "without" for one in self.trials)

    @property
    def outcome(self) -> str:
        if not self.kept:
            return "left out" if self.name in ("scaled rows", "smoothing", "equalisation", "bias correction") else (
                "none kept")
        if self.name == "range":
            return f"{len(self.kept)} kept"
        return "kept" if self.kept == ["with"] else f"{self.kept[0]} kept"


def stages_of(data: ReportData) -> list[Stage]:
    """Return the steps of the recorded search in their order."""
    fields = {"stage", "trial", "kept", "sqnr_db", "peak_db"}
    trials = [one for one in data.record.get("search", ()) if fields <= set(one)]
    stages: list[Stage] = []
    for name in dict.fromkeys(one["stage"] for one in trials):
        of_stage = tuple(one for one in trials if one["stage"] == name)
        before = stages[-1].after if name == "range" and stages else of_stage[0]
        kept = [one for one in of_stage if one["kept"]]
        stages.append(Stage(name, of_stage, before, kept[-1] if kept else before))
    return stages


def search(data: ReportData) -> Element:
    """Return the section about the calibration search."""
    stages = stages_of(data)
    if not stages:
        return section("search-section", "Calibration search", missing(_no_search(data)))
    items = data.record.get("calibration_items")
    about = (f"Each trial builds the quantised model with other ranges and measures its outputs against the float "
             f"model's on calibration items{f' ({items} items in all)' if items else ''}, in dB of the worst output "
             "part. Peak SNR weighs large values and decides between ranges; SQNR decides about the steps before them.")
    columns = [("step", ""), ("tried", "number"), ("outcome", ""), ("SQNR before", "number"), ("SQNR after", "number"),
               ("peak SNR before", "number"), ("peak SNR after", "number"), ("top-1 before", "number"),
               ("top-1 after", "number"), ("cosine after", "number")]
    rows = [(STAGES.get(stage.name, stage.name), (stage.tried, str(stage.tried)), stage.outcome,
             *(cell for key in ("sqnr_db", "peak_db", "top1") for one in (stage.before, stage.after)
               for cell in [_error(one, key)]), _error(stage.after, "cosine")) for stage in stages]
    trials = [one for stage in stages for one in stage.trials]
    every = table([("step", ""), ("trial", "name"), ("SQNR", "number"), ("peak SNR", "number"), ("cosine", "number"),
                   ("top-1 %", "number"), ("kept", "")],
                  [(STAGES.get(one["stage"], one["stage"]), one["trial"],
                    *(_error(one, key) for key in ("sqnr_db", "peak_db", "cosine", "top1")), "kept" * one["kept"])
                   for one in trials])
    return section("search-section", "Calibration search", table(columns, rows),
                   charts.trials(trials) if len(trials) > 1 else None,
                   el("details", el("summary", f"All {len(trials)} trials"), every), about=about)


def not_calibrated(data: ReportData) -> str:
    """Return the reason why a build without ranges has none."""
    quantised = data.plan.precision in ("int8", "best")
    return "the model was quantised before" if quantised else f"the build is {data.plan.precision}"


def _no_search(data: ReportData) -> str:
    if "calibrator" not in data.record:
        return f"No ranges were searched: {not_calibrated(data)}."
    return "The plan has no record of a search: its ranges came from a calibration cache, or from an older version."


def _error(trial: Trial, key: str) -> Any:
    value = trial.get(key)
    if not isinstance(value, int | float):
        return None, "–"
    return value, f"{100 * value:.1f}" if key == "top1" else f"{value:.5f}" if key == "cosine" else f"{value:.2f}"


# ---- histograms
def histograms(data: ReportData) -> Element:
    """Return the section with the histograms of activations and their ranges."""
    recorded = data.record.get("histograms") or {}
    if not recorded:
        return section("histograms-section", "Histograms", missing(
            "The plan has no histograms: builds that calibrate keep them, and those from a calibration cache do not."))
    about = ("Values of each quantised tensor of the float model, with counts on a logarithmic scale. The band is the "
             "chosen range; values outside of it are clipped.")
    kernel = {name: row.index for row in data.rows for name in row.tensors}
    clipped = sorted(recorded, key=lambda name: -float(recorded[name].get("clipped", 0.0)))
    cards = [_histogram(name, recorded[name], kernel.get(name)) for name in clipped]
    return section("histograms-section", "Histograms", el("div", cards, class_="histograms", tabindex=0),
                   about=f"{about} {len(cards)} tensors, those that clip most first.")


def _histogram(name: str, one: Mapping[str, Any], kernel: int | None) -> Element:
    low, high, (begin, end) = float(one["low"]), float(one["high"]), map(float, one["range"])
    bins = base64.b64decode(one["bins"])
    heights = "".join(f"V{TALL - TALL * height / 255:.0f}h{WIDE / len(bins):g}" for height in bins)
    width = high - low or 1.0
    left, right = (min(max((edge - low) / width, -0.02), 1.02) * WIDE for edge in (begin, end))
    band = el("rect", x=f"{left:.1f}", y=-2, width=f"{max(right - left, 0.5):.1f}", height=TALL + 4, class_="range")
    svg = el("svg", band, el("path", d=f"M0 {TALL}{heights}V{TALL}Z"), viewBox=f"-3 -2 {WIDE + 6} {TALL + 4}",
             role="img", aria_label=f"Histogram of {name}")
    svg.set("preserveAspectRatio", "none")
    share = float(one.get("clipped", 0.0))
    title: Child = el("bdi", el("a", name, href=f"#k{kernel}") if kernel is not None else name)
    clips = f"clips {100 * share:.2g} %" if share else "clips nothing"
    scale = el("p", el("span", number(low)), el("b", f"{number(begin)} to {number(end)}"), el("span", number(high)),
               class_="scale")
    return el("figure", el("figcaption", title), svg, scale, el("p", clips, class_="about"))


# ---- layers
def layers(data: ReportData) -> Element:
    """Return the section about the accuracy of single layers."""
    return section("layers-section", "Layers", _sensitivity(data), _sqnr(data))


def _sensitivity(data: ReportData) -> Iterator[Element]:
    ranked = sorted(data.sensitivity, key=lambda one: -float(one["noise"]))
    yield el("h3", "Sensitivity")
    if not ranked:
        yield missing("The sensitivity of layers was not measured: an INT8 build with --report, --max-drop or "
                      "--max-slowdown does so.")
        return
    yield el("p", "Noise power that this layer adds to the outputs, with it alone in INT8 and the others in float, as "
             "a share of that of all layers in INT8.", class_="about")
    kernel = {name: row.index for row in data.rows for name in row.step.fuses}
    most = max(float(ranked[0]["noise"]), 1e-12)
    rows = [(_link(one["layer"], kernel), (one["noise"], bar(one["noise"] / most, f"{100 * one['noise']:.1f}")),
             (one.get("sqnr_db"), decibels(one.get("sqnr_db"))), (one.get("us"), number(one.get("us"))))
            for one in ranked]
    has_cost = any(one.get("us") for one in ranked)
    columns = [("layer", "name"), ("accuracy cost, %", "share"), ("SQNR alone, dB", "number"),
               ("in float, +µs", "number")]
    yield table(columns if has_cost else columns[:3], [row if has_cost else row[:3] for row in rows], "sensitivity")


def _link(layer: str, kernel: Mapping[str, int]) -> Any:
    return layer, el("a", layer, href=f"#k{kernel[layer]}") if layer in kernel else layer


def _sqnr(data: ReportData) -> Iterator[Element]:
    yield el("h3", "SQNR along the network")
    comparison = data.measured.comparison
    if comparison is None:
        yield missing(f"SQNR of layers: {data.measured.no_comparison}. compare-engine measures it.")
        return
    yield el("p", f"{comparison.a} against {comparison.b}, on {comparison.items} items of {comparison.source}. Errors "
             "of all layers before count, so a step down marks a layer that adds noise.", class_="about")
    yield table([("output", "name"), ("SQNR dB", "number"), ("largest error", "number"), ("of range", "number"),
                 ("cosine", "number"), ("", "")],
                [(errors.name, (errors.sqnr_db, decibels(errors.sqnr_db)), (errors.largest, number(errors.largest)),
                  (errors.relative, f"{errors.relative:.1e}"), (errors.cosine, f"{errors.cosine:.5f}"), errors.wrong)
                 for errors in comparison.outputs])
    known = [row for row in data.rows if row.sqnr_db is not None]
    yield charts.layers(data.rows, comparison.threshold) if len(known) > 1 else missing(
        " ".join(comparison.notes) or "The plan and the model share no inner tensors by name.")
    if len(known) > 1:
        yield from (el("p", note, class_="about") for note in comparison.notes)


# ---- target
def target(data: ReportData) -> Element:
    """Return the section about the accuracy target."""
    record = data.record.get("target")
    if not isinstance(record, Mapping) or "score" not in record:
        return section("target-section", "Speed against accuracy", missing(
            "The plan was built without an accuracy target: build-engine --max-drop draws this curve."))
    metric, reference = str(record.get("metric", "")), float(record.get("float", math.nan))
    allowed = reference - float(record.get("max_drop", 0.0))
    kept, exact = list(record.get("kept", ())), list(record.get("kept_fp32", ()))
    rows = facts((("target", f"{metric} at least {number(allowed, 6)}: {'met' if record.get('met') else 'NOT met'}"),
                  ("float", number(reference, 6)), ("all INT8", number(record.get("int8"), 6)),
                  ("this plan, items that chose the layers",
                   f"{number(float(record['score']), 6)}, {record.get('items', '–')} items"),
                  ("this plan, test items", _tested(record.get("test"))),
                  (f"kept in {record.get('float_type') or 'float'}",
                   f"{len(kept)} layers: {listed(kept)}" if kept else "none"),
                  *([("of these in fp32", f"{len(exact)} layers: {listed(exact)}")] if exact else [])))
    points = _points(record)
    curve = charts.target_curve(points, allowed, len(kept), metric) if len(points) > 1 else missing(
        "INT8 alone meets the target, so no other point was measured.")
    return section("target-section", "Speed against accuracy", rows, curve,
                   about="Each point is a set of layers in float, scored on the evaluation items. The circle is "
                   "this plan; times are sums of the kernels' times.")


def _tested(test: object) -> str:
    """Return the scores on the items that nothing was chosen on."""
    if not isinstance(test, Mapping):
        return "none: too few items, or no --test"
    return f"{number(float(test['score']), 6)}, in float {number(float(test['float']), 6)}, {test['items']} items"


def _points(record: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    """Return (layers in float, microseconds, score) of each measured set of layers whose time is known."""
    return sorted((one["kept"], float(one["us"]), float(one["score"])) for one in record.get("tried", ())
                  if one.get("us"))
