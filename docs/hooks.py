"""Hooks of the documentation site: pages from the repository's root, docstrings as lists.

`on_files` and `on_page_markdown` are called by MkDocs, `AlignedLists` by mkdocstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Docstring, Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
# A line such as `rows   forward times are functions of rows`, at the docstring's indent.
ITEM = re.compile(r"(\w+(?:, \w+)*) {2,}(\S.*)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page, and the other texts of the repository's root."""
    for source, page in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_from_root, text)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to the repository's root at the pages made of its texts."""
    for source, target in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}")
    return LINK.sub(_kept, markdown)


def _from_root(link: re.Match[str]) -> str:
    """A link of a text in the repository's root, for a page of the site."""
    label, target, anchor = link[1], link[2], link[3] or ""
    if target in ROOT_PAGES:
        return f"[{label}]({ROOT_PAGES[target]}{anchor})"
    if target.startswith("docs/"):
        return f"[{label}]({target.removeprefix('docs/')}{anchor})"
    return label  # a file of the repository that is no page


def _kept(link: re.Match[str]) -> str:
    """A link of a page in docs/; one to a file outside of it becomes its label."""
    return link[1] if link[2].startswith("../") else link[0]


class AlignedLists(Extension):
    """Turns the aligned lists of our docstrings into Markdown lists.

    rows     a name, two spaces or more, and its text,
             which goes on below
    """

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of every module, class, function and attribute."""
        if obj.docstring is not None:
            _rewrite(obj.docstring)


def _rewrite(docstring: Docstring) -> None:
    lines: list[str] = []
    inside = False
    for line in docstring.value.splitlines():
        item = ITEM.fullmatch(line)
        if item is not None:
            if not inside:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            lines.append(f"- {names}: {item[2]}")
            inside = True
        elif inside and line.startswith("  "):
            lines.append("  " + line.strip())
        else:
            if inside and line.strip():
                lines.append("")
            inside = False
            lines.append(line)
    docstring.value = "\n".join(lines)
