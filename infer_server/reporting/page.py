"""Report of a plan as one HTML page, which needs no network: styles, script, drawings and data are in it.

    write_report("model.html", plan, measured(plan, "model.plan"))
"""
from __future__ import annotations

import base64
import hashlib
import os
from importlib import resources
from pathlib import Path

from infer_server.engines.plan.plan import Plan
from infer_server.protos.version import VERSION
from infer_server.reporting import accuracy, kernels, overview
from infer_server.reporting.data import Measured, ReportData
from infer_server.reporting.elements import Element, el, json_script, markup


def write_report(path: str | os.PathLike[str], plan: Plan, measured: Measured | None = None, size: int = 0) -> None:
    """Write the report of a plan.

    Parameters
    ----------
    path : path
        HTML file to write.
    plan : Plan
    measured : Measured, optional
        Measurements of the plan (infer_server.reporting.measuring); parts without data say so in a line.
    size : int
        Bytes of the plan's file; 0 if it has none.

    Raises
    ------
    OSError
    """
    Path(path).write_text(report(plan, measured or Measured(), size), encoding="utf-8")


def report(plan: Plan, measured: Measured, size: int = 0) -> str:
    """Return the report of a plan as HTML."""
    data = ReportData(plan, measured, size)
    sections = [overview.model(data), overview.build(data), kernels.graph(data), kernels.kernels(data),
                kernels.roofline(data), accuracy.search(data), accuracy.layers(data), accuracy.histograms(data),
                accuracy.target(data), kernels.trace_link(data)]
    links = [el("a", section[0].text or "", href=f"#{section.get('id')}") for section in sections]
    machine = data.plan.machine
    title = f"{plan.name}: {plan.precision} for {machine.target}"
    header = el("header", el("h1", plan.name), el("p", f"{plan.precision} engine for {machine.target}", class_="about"))
    body = el("body", header, el("nav", links, aria_label="Sections"),
              el("main", overview.tiles(data), overview.findings(data), sections),
              el("footer", el("p", f"Written by infer-server {VERSION}.", class_="about")),
              json_script("data", kernels.details(data)), el("script", _text("report.js")))
    return f"<!doctype html>\n{markup(el('html', _head(title), body, lang='en'))}\n"


def _head(title: str) -> Element:
    script = base64.b64encode(hashlib.sha256(_text("report.js").encode()).digest()).decode()
    # No other script than our own may run, and nothing may be loaded.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; img-src data:"
    guard = el("meta", content=policy)
    guard.set("http-equiv", "Content-Security-Policy")
    viewport, scheme = ("width=device-width, initial-scale=1", "light dark")
    return el("head", el("meta", charset="utf-8"), guard, el("meta", name="viewport", content=viewport),
              el("meta", name="color-scheme", content=scheme), el("title", title), el("style", _text("report.css")))


def _text(name: str) -> str:
    return (resources.files("infer_server.reporting") / "static" / name).read_text(encoding="utf-8")
