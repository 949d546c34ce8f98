"""Sections about kernels: the drawn graph, the table of kernels, the roofline and the trace."""
from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from infer_server.reporting import charts
from infer_server.reporting.data import ReportData, Row
from infer_server.reporting.drawing import MAX_BOXES, drawn
from infer_server.reporting.elements import Element, bar, decibels, el, missing, number, section, table
from infer_server.reporting.trace import trace

COLOURINGS = (("precision", "precision"), ("time", "time"), ("sqnr", "SQNR"), ("noise", "accuracy cost"))


def graph(data: ReportData) -> Element:
    """Return the section with the drawn graph and its controls."""
    about = ("A box is a kernel with the operators that it fuses; an edge is a tensor. Drag to move; click into it, "
             "then use the wheel to zoom; click a box for its details.")
    count = sum(not row.is_border for row in data.rows)
    if not count:
        return section("graph-section", "Graph", missing("The plan has no kernels to draw."))
    if count > MAX_BOXES:
        about += f" The plan has {count} kernels, so neighbours share a box."
    able = {"precision": True, "time": bool(data.basis), "sqnr": any(row.sqnr_db is not None for row in data.rows),
            "noise": any(row.noise is not None for row in data.rows)}
    first = "time" if able["time"] else "precision"
    choices = [el("label", el("input", type="radio", name="colour", value=value,
                              checked="" if value == first else None), label)
               for value, label in COLOURINGS if able[value]]
    precisions = dict.fromkeys(row.precision for row in data.rows if not row.is_border)
    legend = el("span", [el("span", el("i", class_=f"p-{name}"), name) for name in precisions], class_="legend")
    buttons = [el("button", text, type="button", data_zoom=kind, aria_label=label)
               for kind, text, label in (("in", "+", "Zoom in"), ("out", "−", "Zoom out"), ("fit", "Fit", "Show all"))]
    controls = el("div", el("fieldset", el("legend", "Colour by"), choices), legend,
                  el("span", buttons, class_="zoom"), class_="controls")
    drawing = el("div", drawn(data), el("aside", el("p", "Click a kernel for its details.", class_="about"),
                                        id="details", aria_live="polite"), class_=f"drawing by-{first}", id="drawing")
    return section("graph-section", "Graph", controls, drawing, about=about)


def kernels(data: ReportData) -> Element:
    """Return the section with the table of kernels."""
    about = f"Times of one item, {data.basis}." if data.basis else "The plan has no times: it was built without timing."
    if data.measured.profile is None:
        about += f" Bounds are left out: {data.measured.no_profile}."
    has_noise = any(row.noise is not None for row in data.rows)
    has_sqnr = any(row.sqnr_db is not None for row in data.rows)
    columns = [("#", "number"), ("kernel", "name"), ("operators", ""), ("precision", ""),
               *([("µs", "number"), ("% of time", "share")] if data.basis else []),
               *([("bound µs", "number"), ("bound by", "")] if data.measured.profile else []),
               ("M MAC", "number"), ("KB", "number"), *([("SQNR dB", "number")] if has_sqnr else []),
               *([("accuracy cost %", "number")] if has_noise else []), ("tactic", "")]
    longest = max((row.us or 0.0 for row in data.rows), default=0.0) or 1.0
    borders = [row for row in data.rows if row.is_border]
    if borders:
        us = sum(row.us or 0.0 for row in borders)
        about += f" Left out: {len(borders)} kernels that only write borders{f', {number(us)} µs' if us else ''}."
    listed = [row for row in data.rows if not row.is_border]
    rows = [list(_cells(data, row, longest, has_sqnr, has_noise)) for row in listed]
    search = el("label", "Filter ", el("input", type="search", id="filter", autocomplete="off", spellcheck="false"))
    body = table(columns, rows, "kernels", ({"id": f"k{row.index}", "data-k": str(row.index)} for row in listed))
    return section("kernels-section", "Kernels", el("div", search, class_="controls"), body, about=about)


def _cells(data: ReportData, row: Row, longest: float, has_sqnr: bool, has_noise: bool) -> Iterator[Any]:
    step, us = row.step, row.us or 0.0
    yield row.index, str(row.index)
    yield step.name, el("span", step.name, title=" + ".join(step.fuses) or None)
    yield row.title
    yield row.precision, el("span", el("i", class_=f"p-{row.precision}"), row.precision + " (kept)" * row.kept,
                            class_="precision")
    if data.basis:
        yield row.us, number(row.us)
        share = us / data.total_us if data.total_us else 0.0
        yield share, bar(us / longest, f"{100 * share:.1f}")
    if data.measured.profile:
        yield row.bound_us, number(row.bound_us)
        yield row.limit
    yield step.macs, number(step.macs / 1e6)
    yield step.bytes, number(step.bytes / 1e3)
    if has_sqnr:
        yield row.sqnr_db, decibels(row.sqnr_db)
    if has_noise:
        yield row.noise, number(None if row.noise is None else 100 * row.noise)
    yield step.tactic or step.reason


def roofline(data: ReportData) -> Element:
    """Return the section with the roofline."""
    profile = data.measured.profile
    if profile is None:
        return section("roofline-section", "Roofline", missing(f"There is no roofline: {data.measured.no_profile}."))
    peaks = profile.peaks
    about = (f"Each point is a kernel, larger the longer it takes. The lines are what {peaks.processor} reached in a "
             "measurement just before: multiply-accumulates of each precision, and reads from each level of memory. "
             "A kernel far below both has time to gain, and one by Winograd's method may be above, as it needs fewer "
             "products. A click shows a kernel in the table.")
    return section("roofline-section", "Roofline", charts.roofline(data.rows, peaks), about=about)


def trace_link(data: ReportData) -> Element:
    """Return the section with the link to the Chrome trace."""
    text = trace(data)
    if not text:
        return section("trace-section", "Trace", missing("The plan has no times, so there is no trace."))
    address = f"data:application/json;base64,{base64.b64encode(text.encode()).decode()}"
    link = el("a", f"Download the trace of one inference ({len(text) / 1e3:.0f} KB)", href=address,
              download="inference.trace.json", class_="button")
    return section("trace-section", "Trace", el("p", link), about="A Chrome trace: open the file in Perfetto "
                   f"(ui.perfetto.dev) or chrome://tracing. Kernels follow each other, {data.basis}.")


def details(data: ReportData) -> list[dict[str, Any]]:
    """Return the data of each kernel for the panel next to the graph."""
    return [{"name": row.step.name, "ops": row.title, "fuses": list(row.step.fuses[:40]), "precision": row.precision,
             "tactic": row.step.tactic, "shape": "×".join(map(str, row.shape)), "us": row.us, "bound": row.bound_us,
             "limit": row.limit, "macs": row.step.macs, "bytes": row.step.bytes, "sqnr": row.sqnr_db,
             "noise": row.noise, "reason": row.step.reason} for row in data.rows]
