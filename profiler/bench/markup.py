"""Parts of a page of HTML that needs nothing else: no network, no script, any width, any ground."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--text:#1b1d21;--soft:#5c626b;--line:#d9dce1;
--card:#f6f7f9;--warn:#fff4d6;--warnline:#d9a400}
@media (prefers-color-scheme:dark){:root{--ground:#15171b;--text:#e4e6ea;--soft:#9aa1ab;
--line:#343941;--card:#1d2026;--warn:#2f2810;--warnline:#b58900}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2em 1em 4em;max-width:76rem;background:var(--ground);
color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
overflow-wrap:anywhere}
h1{font-size:1.6em;line-height:1.25;margin:.4em 0}
h2{font-size:1.25em;margin:2.2em 0 .5em;border-bottom:1px solid var(--line);padding-bottom:.2em}
h3{font-size:1em;margin:0 0 .4em}
p{max-width:48em}
.soft,figcaption{color:var(--soft);font-size:.88em}
.lead{font-size:1.1em}
.warn{background:var(--warn);border-left:4px solid var(--warnline);padding:.6em 1em}
.warn ul{margin:.3em 0 0;padding-left:1.2em}
p.soft{margin:1.4em 0 .3em}
.wide{overflow-x:auto;margin:0 0 .8em}
table{border-collapse:collapse;font-size:.86em;font-variant-numeric:tabular-nums}
th,td{padding:.3em .6em;text-align:right;border-bottom:1px solid var(--line);
white-space:nowrap;vertical-align:top}
th{font-weight:600;white-space:normal;vertical-align:bottom;overflow-wrap:normal}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--ground)}
.text th,.text td{text-align:left;white-space:normal}
.text td:first-child{color:var(--soft);min-width:9em}
.figures{columns:2 26rem;column-gap:1.2em;margin:.8em 0}
figure{margin:0 0 1.2em;padding:.9em;background:var(--card);border-radius:.6em;
break-inside:avoid}
figure svg{display:block;width:100%;height:auto}
figure svg *{stroke-linejoin:round}
figcaption{margin-top:.6em}
details{margin:.8em 0}
summary{cursor:pointer}
"""


def document(title: str, body: Sequence[str]) -> str:
    """The whole page; `title` is text, `body` HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text; `kind` is a class of the style sheet."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(
    name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = ""
) -> str:
    """A table that scrolls sideways by itself; `name` becomes its id."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    # Not a <caption>: that would be as wide as the table, and scroll with it.
    above = paragraph(caption, "soft") if caption else ""
    return (
        f'{above}<div class="wide"><table id="{escape(name)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(name: str, values: Mapping[str, str]) -> str:
    """A table of two columns, of what something is."""
    body = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in values.items()
    )
    return (
        f'<div class="wide"><table class="text" id="{escape(name)}"><tbody>{body}</tbody></table>'
        "</div>"
    )


def warnings(lines: Sequence[str]) -> str:
    """A box that cannot be overlooked; nothing where there is nothing to say."""
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    title = "<strong>Before you believe the figures</strong>"
    return f'<div class="warn">{title}<ul>{items}</ul></div>'


def bullets(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return '<ul class="soft">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def figure(title: str, picture: str, caption: str) -> str:
    """A picture (an `<svg>` element, taken as it is) between its title and what it shows."""
    return (
        f"<figure><h3>{escape(title)}</h3>{picture}<figcaption>{escape(caption)}</figcaption>"
        "</figure>"
    )


def folded(summary: str, inside: str) -> str:
    """What not every reader needs, a click away."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"
