"""Reads a page of HTML as a browser without a network would, strictly."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input"}


class PageReader(HTMLParser):
    """Every element with its attributes, the tables' cells, and the text of captions.

    Raises ValueError where elements are not closed in turn.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, list[str]] = {}  # by tag, one entry an element
        self._open: list[str] = []
        self._table: list[list[str]] = []
        self.feed(page)
        self.close()
        if self._open:
            raise ValueError(f"never closed: {self._open}")

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.elements.append((tag, values))
        if tag in VOID:
            return
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self._table = self.tables.setdefault(values["id"], [])
        elif tag == "tr":
            self._table.append([])
        elif tag in ("th", "td"):
            self._table[-1].append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            raise ValueError(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data
        if self._open and self._open[-1] in ("th", "td"):
            self._table[-1][-1] += data

    def attributes(self, name: str) -> list[str]:
        """The values of one attribute over all elements."""
        return [values[name] for _, values in self.elements if name in values]

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.elements)

    def columns(self, table: str) -> dict[str, list[str]]:
        """A table's rows by their first cell, the head left out."""
        return {row[0]: row for row in self.tables[table][1:]}
