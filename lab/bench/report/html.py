"""Self-contained HTML pages from templates: no network, no script, readable on a phone.

Every text that goes into them is escaped; only the pictures
that `inline_svg` makes are inserted unchanged.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from costmodel.errors import InputError
from costmodel.io import write_atomic
from lab.bench.report.drawing import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent
Row = Sequence[str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text cells, None where there is no figure; `name` is its id on the page."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The drawn pictures of a section, and a line for each that there is no data for."""

    drawn: Sequence[tuple[Picture, Markup]]
    missing: Sequence[str]


@cache
def _environment(folder: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: Path, **values: Any) -> str:
    """The page that a template makes of these values, all of which are escaped.

    A template may lie anywhere; it extends `page.html` here.
    """
    return _environment(template.parent).get_template(template.name).render(**values)


def save_page(path: str | Path, page: str) -> None:
    """Write a page in one step. Raises InputError where it cannot be written."""
    write_atomic(Path(path), page, InputError)


def draw(pictures: Sequence[Picture]) -> Figures:
    """Draw the pictures that there is data for."""
    return Figures(
        drawn=[
            (picture, inline_svg(picture.draw(), name=picture.name, label=picture.title))
            for picture in pictures
            if picture.draw is not None
        ],
        missing=[f"Not drawn: {one.title}: {one.missing}." for one in pictures if not one.draw],
    )


_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_FONT_FAMILY = re.compile(r"font-family:[^;]*;?\s*")
_FONT = re.compile(r"font: [^;]*?([\d.]+px)[^;]*")  # as older versions of matplotlib write it
_WITHOUT_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def inline_svg(figure: Figure, *, name: str, label: str) -> Markup:
    """The figure as one `<svg>` element without outside references.

    Text stays text in the page's font. What the figure draws in black takes the page's text
    colour, so that the picture is readable on a light and on a dark ground.

    name   letters, digits and dashes, unique on the page; prefix of the ids inside
    label  description for screen readers
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=_WITHOUT_METADATA)
    root = ElementTree.fromstring(text.getvalue())
    _clean(root, name)
    _, _, width, height = root.attrib["viewBox"].split()
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "width": width,
        "height": height,
        "fill": "currentColor",  # matplotlib leaves black text without a fill
        "role": "img",
        "aria-label": label,
    }
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _clean(element: ElementTree.Element, name: str) -> None:
    """Give an element and its children the page's namespace, colours and fonts."""
    for child in list(element):
        if child.tag in (
            f"{_SVG}style",
            f"{_SVG}metadata",
        ):  # a style rules the whole page
            element.remove(child)
        else:
            _clean(child, name)
    element.tag = element.tag.removeprefix(_SVG)
    attributes = element.attrib
    if _LINK in attributes:
        attributes["href"] = "#" + name + attributes.pop(_LINK).removeprefix("#")
    if element.tag == "g":
        attributes.pop("id", None)
    elif "id" in attributes:
        attributes["id"] = name + attributes["id"]
    if "clip-path" in attributes:
        attributes["clip-path"] = attributes["clip-path"].replace("url(#", f"url(#{name}")
    if "style" in attributes:
        style = _FONT_FAMILY.sub("", _FONT.sub(r"font-size: \1", attributes["style"]))
        attributes["style"] = style.replace("#000000", "currentColor").strip()
    element.text = element.text if element.text and element.text.strip() else None
    element.tail = None
