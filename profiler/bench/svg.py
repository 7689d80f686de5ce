"""A matplotlib figure as SVG that may stand inside a page: no outside reference, one text colour.

Text stays text, in the page's font; what the figure draws in black takes the page's text
colour, so the picture is readable on a light and on a dark ground.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_FONT_FAMILY = re.compile(r"font-family:[^;]*;?\s*")
_FONT = re.compile(r"font: [^;]*?([\d.]+px)[^;]*")  # how older versions of matplotlib write it
_WITHOUT_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def inline_svg(figure: Figure, *, name: str, label: str) -> str:
    """The figure as one `<svg>` element.

    name   letters, digits and dashes, unique on the page: the ids inside begin with it
    label  what a screen reader says in place of the picture
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
        "fill": "currentColor",  # what the figure left at the default, black
        "role": "img",
        "aria-label": label,
    }
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element, name: str) -> None:
    """Bring an element and those inside it into the page's namespace, colours and fonts."""
    for child in list(element):
        if child.tag in (f"{_SVG}style", f"{_SVG}metadata"):  # a style would rule the whole page
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
