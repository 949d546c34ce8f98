"""docs/python.md: its blocks run, one after the other, as a reader would run them."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def blocks(text: str) -> list[tuple[int, str]]:
    """(the line before it, code) of each ```python block."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block.group(1)) for block in found]


def test_the_blocks_of_the_page_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    names = {"__name__": "notebook"}
    found = blocks(PAGE.read_text())
    assert len(found) > 5
    for line, code in found:
        exec(compile("\n" * line + code, str(PAGE), "exec"), names)     # an error names the line of the page


def test_every_option_of_a_build_is_on_the_page() -> None:
    from dataclasses import fields

    from engines.compiler.builder import BuildConfig
    page = PAGE.read_text()
    assert not [field.name for field in fields(BuildConfig) if f"`{field.name}`" not in page]
