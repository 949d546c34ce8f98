"""Charts of a report, drawn by matplotlib as SVG that takes the page's colours and fonts."""
from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from infer_server.engines.plan.roofline import Peaks
from infer_server.reporting.data import Row
from infer_server.reporting.elements import Element, clean, el, missing

# Colours in matplotlib -> variables of report.css, which differ in the dark scheme.
COLOURS = {"#010101": "--ink", "#020202": "--soft", "#030303": "--line", "#040404": "--accent", "#050505": "--warn"}
INK, SOFT, LINE, ACCENT, WARN = COLOURS
PRECISIONS = {"int8": "#060601", "fp32": "#060602", "bf16": "#060603", "fp16": "#060604", "reference": "#060605"}
COLOURS |= {colour: f"--{precision}" for precision, colour in PRECISIONS.items()}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 8.5, "axes.edgecolor": LINE,
         "axes.labelcolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "text.color": INK, "axes.linewidth": 1,
         "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": LINE,
         "grid.linewidth": 0.6, "axes.axisbelow": True, "text.parse_math": False, "legend.frameon": False,
         "legend.labelcolor": INK, "lines.linewidth": 1.6, "font.family": "DejaVu Sans", "svg.image_inline": True}
MAX_POINTS = 400        # points of the roofline: the slowest kernels


def chart(identifier: str, label: str, draw: Callable[[Any], None], width: float = 8.6, height: float = 3.4) -> Element:
    """Return a chart.

    Parameters
    ----------
    identifier : str
        Prefix of the ids in it.
    label : str
        Description for those who cannot see it.
    draw : callable
        Draws on matplotlib axes.
    width, height : float
        Size in inches.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return missing("This chart needs matplotlib: pip install 'infer-server[plot]', and write the report again.")
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: no display, no global state
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):      # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(
            ("Date", "Creator", "Format", "Type")))
    return el("div", _inline(file.getvalue(), identifier, label), class_="scroll chart", tabindex=0)


def _inline(text: str, prefix: str, label: str) -> Element:
    """Return matplotlib's SVG without namespaces and metadata, with unique ids and the page's colours."""
    text = re.sub(r"#[0-9a-f]{6}\b", lambda match: f"var({COLOURS[match[0]]})" if match[0] in COLOURS else match[0],
                  text)
    root = ElementTree.fromstring(text)
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith(("metadata", "RDF"))]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name in list(element.attrib):
            value = element.attrib.pop(name)
            if name.endswith("}href"):
                name = "href"
                value = value if value.startswith("#k") else f"#{prefix}-{value[1:]}"
            value = f"{prefix}-{value}" if name == "id" else value.replace("url(#", f"url(#{prefix}-")
            if name == "style":
                value = re.sub(r"font: ([\d.]+)px [^;]*", r"font-size: \1px", value)
            element.set(name, value)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": clean(label)}
    return root


def roofline(rows: Sequence[Row], peaks: Peaks) -> Element:
    """Return arithmetic rate over arithmetic intensity of each kernel, below the roofs of the machine."""
    known = sorted((row for row in rows if row.us and row.step.macs and row.step.bytes),
                   key=lambda row: -(row.us or 0.0))[:MAX_POINTS]
    if not known:
        return missing("No kernel multiplies, so there is no roofline to draw.")

    def draw(axes: Any) -> None:
        intensity = [row.step.macs / row.step.bytes for row in known]
        low, high = min(intensity) / 2, max(intensity) * 2
        roofs = {precision: peaks.macs_per_second[precision] for precision in dict.fromkeys(
            row.step.precision for row in known) if precision in peaks.macs_per_second}
        top = max(roofs.values(), default=max(peaks.macs_per_second.values()))
        for precision, rate in roofs.items():
            axes.axhline(rate / 1e9, color=PRECISIONS.get(precision, SOFT), linewidth=1.2)
            axes.text(high, rate / 1e9, f"{precision} peak ", ha="right", va="bottom", color=SOFT)
        for level in peaks.levels:
            axes.plot([low, top / level.bytes_per_second],
                      [low * level.bytes_per_second / 1e9, top / 1e9], color=SOFT, linewidth=0.9, linestyle="--")
            axes.text(1.04 * low, 1.14 * low * level.bytes_per_second / 1e9, level.name, va="bottom", color=SOFT)
        for precision in dict.fromkeys(row.step.precision for row in known):
            of_precision = [row for row in known if row.step.precision == precision]
            points = axes.scatter(
                [row.step.macs / row.step.bytes for row in of_precision],
                [row.step.macs / (row.us or 1.0) / 1e3 for row in of_precision],
                s=[18 + 160 * (row.us or 0.0) / (known[0].us or 1.0) for row in of_precision], label=precision,
                alpha=0.75, color=PRECISIONS.get(precision, SOFT), linewidth=0)
            points.set_urls([f"#k{row.index}" for row in of_precision])
        axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="multiply-accumulates per byte",
                 ylabel="G MAC/s")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.legend(loc="lower right")
    return chart("roof", "Roofline of the kernels", draw, height=4.4)


def trials(listed: Sequence[Mapping[str, Any]]) -> Element:
    """Return the errors of each trial of the search in its order, with the best so far."""
    def draw(axes: Any) -> None:
        stages = list(dict.fromkeys(one["stage"] for one in listed))
        for criterion, colour, name in (("sqnr_db", ACCENT, "SQNR"), ("peak_db", WARN, "peak SNR")):
            values = [one[criterion] for one in listed]
            axes.plot(range(1, len(listed) + 1), values, color=colour, linewidth=0.8, alpha=0.6)
            for kept in (False, True):
                chosen = [(position, value) for position, (value, one) in enumerate(zip(values, listed, strict=True), 1)
                          if one["kept"] == kept]
                axes.scatter([position for position, _ in chosen], [value for _, value in chosen], color=colour,
                             s=46 if kept else 9, label=f"{name}, kept" if kept else name, linewidth=0, zorder=3)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.16 * (high - low))
        for stage in stages:
            first = next(position for position, one in enumerate(listed, 1) if one["stage"] == stage)
            axes.axvline(first - 0.5, color=LINE, linewidth=1)
            axes.text(first - 0.4, high + (0.13 - 0.07 * (stages.index(stage) % 2)) * (high - low), stage, va="top",
                      color=SOFT)
        axes.set(xlabel="trial", ylabel="dB, of the worst output part", xlim=(0.5, len(listed) + 0.5))
        axes.legend(loc="lower right", ncols=2)
    return chart("trials", "Errors of the trials of the calibration search", draw)


def layers(rows: Sequence[Row], threshold: float) -> Element:
    """Return the SQNR of each layer in the order of execution."""
    known = [row for row in rows if row.sqnr_db is not None and row.sqnr_db < 200]

    def draw(axes: Any) -> None:
        axes.axhline(threshold, color=WARN, linewidth=1, linestyle="--")
        axes.plot([row.index for row in known], [row.sqnr_db for row in known], color=ACCENT, linewidth=0.9, alpha=0.6)
        points = axes.scatter([row.index for row in known], [row.sqnr_db for row in known], s=22, linewidth=0, zorder=3,
                              color=[PRECISIONS.get(row.precision, ACCENT) for row in known])
        points.set_urls([f"#k{row.index}" for row in known])
        axes.set(xlabel="kernel, in the order of execution", ylabel="SQNR in dB")
    return chart("layers", "SQNR of each layer", draw, height=3.0)


def target_curve(points: Sequence[tuple[int, float, float]], limit: float, chosen: int, metric: str) -> Element:
    """Return accuracy over time with the first layers in float. points: (number of layers, microseconds, score)."""
    def draw(axes: Any) -> None:
        axes.plot([us for _, us, _ in points], [score for _, _, score in points], color=ACCENT, marker="o",
                  markersize=5)
        axes.axhline(limit, color=WARN, linewidth=1, linestyle="--")
        axes.annotate("allowed drop", (1, limit), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                      color=SOFT)
        for count, us, score in points:
            axes.annotate(f"{count}", (us, score), xytext=(0, 8), textcoords="offset points", ha="center",
                          color=INK if count == chosen else SOFT)
            if count == chosen:
                axes.scatter([us], [score], s=120, facecolor="none", edgecolor=WARN, linewidth=2, zorder=4)
        axes.margins(0.06, 0.16)
        axes.ticklabel_format(useOffset=False)
        axes.set(xlabel="microseconds an item, by the kernels' times", ylabel=metric)
    return chart("target", f"{metric} over time with layers in float", draw)
