"""Parsed reports: elements, texts, scripts and references of a page."""
from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "img", "link", "hr"}


class Page(HTMLParser):
    """A parsed page. It refuses elements that are not closed in order.

    Attributes
    ----------
    elements : list of (str, dict)
        Tag and attributes of each element.
    text : str
        Text outside of scripts and styles.
    scripts : list of str
        Contents of the scripts.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif not self._open or self._open[-1] != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]
