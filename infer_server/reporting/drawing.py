"""Drawing of a plan's kernels as an SVG graph: a box for each kernel, edges from its inputs."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer_server.reporting.data import ReportData, Row
from infer_server.reporting.elements import Element, decibels, el, number
from infer_server.reporting.layout import HEIGHT, WIDTH, Layout, layered

MAX_BOXES = 1500        # boxes; of larger plans, neighbouring kernels share a box
LETTERS = 32            # characters of a line in a box


@dataclass(frozen=True)
class Box:
    """One box: an input, an output, or one kernel or more.

    Attributes
    ----------
    title, subtitle : str
    rows : tuple of Row
        Kernels; () for an input or output.
    """
    title: str
    subtitle: str
    rows: tuple[Row, ...] = ()

    @property
    def us(self) -> float:
        return sum(row.us or 0.0 for row in self.rows)

    @property
    def precision(self) -> str:
        """Precision of most of its kernels, by time."""
        shares: Counter[str] = Counter()
        for row in self.rows:
            shares[row.precision] += 1 + int(1e3 * (row.us or 0.0)) 
        return shares.most_common(1)[0][0] if shares else "io"

    @property
    def sqnr_db(self) -> float | None:
        return min((row.sqnr_db for row in self.rows if row.sqnr_db is not None), default=None)

    @property
    def noise(self) -> float | None:
        known = [row.noise for row in self.rows if row.noise is not None]
        return sum(known) if known else None


def boxes_of(data: ReportData, max_boxes: int = MAX_BOXES) -> tuple[list[Box], list[tuple[int, int]]]:
    """Return the boxes in topological order and the edges between them; kernels that only write borders are left out.

    Consecutive kernels share a box if there are more than `max_boxes`. The order of execution is topological, so edges
    between such groups still point forwards.
    """
    rows = [row for row in data.rows if not row.is_border]
    size = max(-(-len(rows) // max_boxes), 1)
    graph = data.graph
    inputs, outputs = list(graph.get("inputs", ()))[:MAX_BOXES], list(graph.get("outputs", ()))[:MAX_BOXES]
    shapes = graph.get("types", {})
    boxes = [Box(name, f"input {_shape(shapes.get(name, {}).get('shape', ()))}") for name in inputs]
    index_of: dict[int, int] = {}
    for first in range(0, len(rows), size):
        group = tuple(rows[first:first + size])
        index_of |= {row.index: len(boxes) for row in group}
        boxes.append(_box(group))
    edges = [(index_of[before], index_of[row.index]) for row in rows for before in row.step.depends
             if before in index_of]
    by_name = {row.step.name: index_of[row.index] for row in rows}
    sources = _Sources(graph, by_name, inputs)
    for node in graph.get("nodes", ()):
        if (target := by_name.get(node["name"])) is not None:
            read = frozenset().union(*map(sources.of, node["inputs"]))
            edges += [(source, target) for source in read if source < len(inputs)]
    for name in outputs:
        edges += [(source, len(boxes)) for source in sources.of(name)]
        boxes.append(Box(name, f"output {_shape(shapes.get(name, {}).get('shape', ()))}"))
    return boxes, [(source, target) for source, target in edges if source < target]


class _Sources:
    """Boxes that tensors come from, through nodes without a kernel, such as views."""

    def __init__(self, graph: Mapping[str, Any], by_name: Mapping[str, int], inputs: Sequence[str]) -> None:
        self._known: dict[str, frozenset[int]] = {name: frozenset({index}) for index, name in enumerate(inputs)}
        for node in graph.get("nodes", ()):     # in topological order
            index = by_name.get(node["name"])
            sources = frozenset().union(*map(self.of, node["inputs"])) if index is None else frozenset({index})
            self._known |= dict.fromkeys(node["outputs"], sources)

    def of(self, tensor: str) -> frozenset[int]:
        """Return the indices of the boxes; none for a constant."""
        return self._known.get(tensor, frozenset())


def _box(rows: Sequence[Row]) -> Box:
    if len(rows) == 1:
        return Box(rows[0].title, rows[0].step.name, tuple(rows))
    return Box(f"{len(rows)} kernels", f"{rows[0].step.name} … {rows[-1].step.name}", tuple(rows))


def _shape(shape: Sequence[object]) -> str:
    return "×".join(map(str, shape))


def drawn(data: ReportData) -> Element:
    """Return the graph as an SVG element whose boxes have classes and variables for the page's colours."""
    boxes, edges = boxes_of(data)
    layout = layered(len(boxes), edges)
    longest = max((box.us for box in boxes), default=0.0) or 1.0
    max_boxes = max((box.noise or 0.0 for box in boxes), default=0.0) or 1.0
    paths = el("path", d="".join(_curve(points) for points in layout.edges.values()), class_="edges")
    svg = el("svg", el("g", paths, [_drawn(index, box, layout, longest, max_boxes) for index, box in enumerate(boxes)]),
             viewBox=f"0 0 {layout.width:.0f} {layout.height:.0f}", id="graph", role="img", tabindex=0,
             aria_label="Graph of the kernels")
    svg.set("preserveAspectRatio", "xMidYMin meet")
    return svg


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return the path of an edge: curves between layers, vertical lines across them."""
    x, y = points[0]
    text = f"M{x:.0f} {y:.0f}"
    for index, (to_x, to_y) in enumerate(points[1:]):
        middle = (y + to_y) / 2
        text += (f"V{to_y:.0f}" if index % 2 or abs(to_x - x) < 0.5 else
                 f"C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}")
        x, y = to_x, to_y
    return text


def _drawn(index: int, box: Box, layout: Layout, longest: float, max_boxes: float) -> Element:
    x, y = layout.nodes[index]
    us = f"{number(box.us)} µs" if box.us else ""
    sqnr, noise = box.sqnr_db, box.noise
    # Shares of 0 to 1 that the page's colours are mixed by; SQNR from 50 dB, good, to 10 dB.
    shares = {"t": box.us / longest, "s": 0.0 if sqnr is None else min(max((50.0 - sqnr) / 40.0, 0.0), 1.0),
              "n": max(noise or 0.0, 0.0) / max_boxes}
    style = ";".join(f"--{name}:{100 * share:.0f}%" for name, share in shares.items() if box.rows)
    label = f"{box.title}\n{box.subtitle}" + f"\n{us}" * bool(us) + (
        f"\nSQNR {decibels(sqnr)} dB" if sqnr is not None else "")
    group = el("g", el("title", label), el("rect", width=f"{WIDTH:.0f}", height=f"{HEIGHT:.0f}", rx=7),
               el("text", _cut(box.title, LETTERS - (8 if us else 3)), x=10, y=21, class_="op"),
               el("text", us, x=f"{WIDTH - 10:.0f}", y=21, class_="us") if us else None,
               el("text", _short(box.subtitle, LETTERS), x=10, y=40, class_="name"),
               class_=f"box p-{box.precision}", style=style or None, data_k=box.rows[0].index if box.rows else None,
               data_last=box.rows[-1].index if len(box.rows) > 1 else None)
    group.set("transform", f"translate({x - WIDTH / 2:.0f} {y - HEIGHT / 2:.0f})")
    return group


def _cut(text: str, max_boxes: int) -> str:
    return text if len(text) <= max_boxes else f"{text[:max_boxes - 1]}…"


def _short(text: str, max_boxes: int) -> str:
    """Shorten a text from its beginning: the ends of names differ."""
    return text if len(text) <= max_boxes else f"…{text[1 - max_boxes:]}"
