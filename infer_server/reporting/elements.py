"""Elements of an HTML page; the standard library's serialiser escapes all text and attributes."""
from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree

Element = ElementTree.Element
Child = Element | str | float | None | Iterable["Child"]
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")       # not allowed in HTML


def el(tag: str, *children: Child, **attributes: str | float | None) -> Element:
    """Return an element. Attributes: class_="x" for class, data_k=1 for data-k; None leaves one out."""
    element = Element(tag, {name.strip("_").replace("_", "-"): clean(str(value)) for name, value in attributes.items()
                            if value is not None})
    _extend(element, children)
    return element


def _extend(parent: Element, children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Element):
            parent.append(child)
        elif isinstance(child, str | int | float):
            _add_text(parent, clean(str(child)))
        else:
            _extend(parent, child)


def _add_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def clean(text: str) -> str:
    """Replace characters that HTML does not allow."""
    return CONTROLS.sub("\ufffd", text)


def markup(element: Element) -> str:
    """Return an element as HTML."""
    return ElementTree.tostring(element, "unicode", "html")


def json_script(identifier: str, value: Any) -> Element:
    """Return a script element that holds JSON data, which cannot end the element. Infinite numbers become null."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return el("script", text.replace("<", "\\u003c"), type="application/json", id=identifier)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# ---- parts of a page
def section(identifier: str, title: str, *children: Child, about: str = "") -> Element:
    """Return a section with a heading and an explaining paragraph."""
    return el("section", el("h2", title), el("p", about, class_="about") if about else None, *children, id=identifier)


def missing(reason: str) -> Element:
    """Return the line that replaces a part without data."""
    return el("p", reason, class_="missing")


def facts(rows: Iterable[tuple[str, Child]]) -> Element:
    """Return a list of labels and values."""
    return el("dl", [el("div", el("dt", label), el("dd", value)) for label, value in rows], class_="facts")


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return names separated by commas, with the number of those beyond `most`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits, "exact" for an infinite SQNR, and "–" for None."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "exact" if value > 0 else "–"
    return f"{value:,.0f}" if abs(value) >= 10 ** digits - 0.5 else f"{value:.{digits}g}"


def decibels(value: float | None) -> str:
    """Return dB with one decimal, "exact" for infinity, "–" for None."""
    return number(value) if value is None or not math.isfinite(value) else f"{value:.1f}"


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]], identifier: str = "",
          row_attributes: Iterable[dict[str, str]] = ()) -> Element:
    """Return a sortable table.

    Parameters
    ----------
    columns : sequence of (str, str)
        Title and class of each column: "number" for numbers, which sort as such, "bar" for shares with a bar.
    rows : iterable of sequences
        Cells: text, an element, or (value to sort by, text or element).
    identifier : str
        Id of the table.
    row_attributes : iterable of dict
        Attributes of each row.
    """
    head = el("tr", [el("th", el("button", title, type="button") if title else None, scope="col", class_=kind or None)
                     for title, kind in columns])
    attributes = list(row_attributes)
    body = []
    for index, cells in enumerate(rows):
        row = el("tr", [_cell(cell, kind) for cell, (_, kind) in zip(cells, columns, strict=True)])
        row.attrib.update(attributes[index] if attributes else {})
        body.append(row)
    return el("div", el("table", el("thead", head), el("tbody", body), class_="sortable", id=identifier or None),
              class_="scroll", tabindex=0)


def _cell(cell: Any, kind: str) -> Element:
    if not isinstance(cell, tuple):
        return el("td", cell, class_=kind or None)
    value, shown = cell
    known = value is not None and not (isinstance(value, float) and math.isnan(value))
    return el("td", shown, class_=kind or None, data_v=f"{value:.8g}" if known and not isinstance(value, str) else
              value if known else "")


def bar(share: float, text: str, kind: str = "") -> Element:
    """Return a number with a bar; share: 0 to 1."""
    width = f"{100 * min(max(share, 0.0), 1.0):.1f}%"
    return el("div", el("span", text), el("i", style=f"width:{width}", class_=kind or None), class_="bar")
