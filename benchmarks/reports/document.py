"""Sections of the pages in docs/benchmarks that programs write, between a pair of comments that name the section."""
from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
Cell = str | int | float


def page_of(name: str, pages: Path = PAGES) -> Path:
    """Return the page that has the section `name`; machines.md if none has."""
    mark = f"<!-- {name}: begin -->"
    return next((page for page in sorted(pages.glob("*.md")) if mark in page.read_text()), pages / "machines.md")


def write_section(name: str, text: str, document: Path | None = None) -> None:
    """Replace the section `name`, or append it to the document (default: `page_of` the name)."""
    document = document or page_of(name)
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text.strip()}\n{end}\n"
    old = document.read_text() if document.exists() else "# Benchmarks\n"
    if begin in old:
        head, rest = old.split(begin, 1)
        new = head + section + rest.split(end, 1)[1].lstrip("\n")
    else:
        new = f"{old.rstrip()}\n\n{section}"
    document.parent.mkdir(exist_ok=True)
    document.write_text(new)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a Markdown table; floats get at least three significant digits."""
    def text(cell: Cell) -> str:
        if not isinstance(cell, float):
            return str(cell)
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"

    lines = [header, ["---"] * len(header), *([text(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """Return the processor's name and the number of cores that this process may use."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.processor() or platform.machine()}, {cores} cores"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
