"""A plan as one page of HTML that needs nothing else: tables, notes and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from costmodel.capacity.planner import Plan
from profiler.plan_plots import plan_png
from profiler.plan_simulation import (
    SIMULATED_COLUMNS,
    simulated_lines,
    simulated_rows,
    simulated_title,
)
from profiler.planning import COLUMNS, heading, option_cells, problems

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}th,td{padding:.3em .8em;text-align:right;"
    "border-bottom:1px solid #ccc}th:first-child,td:first-child{text-align:left}"
    "img{max-width:100%}"
)


def plan_page(plan: Plan) -> str:
    """The whole page."""
    best = plan.best
    parts = [f"<h1>Capacity plan</h1><p>{escape(heading(plan))}</p>"]
    if plan.acceptance is not None:
        parts.append(f"<p>Acceptance: {escape(plan.acceptance.label)}</p>")
    parts.append(_table(COLUMNS, [option_cells(option) for option in plan.options]))
    parts.append(_list(problems(plan)))
    if plan.simulated:
        parts.append(f"<h2>{escape(simulated_title(plan))}</h2>")
        parts.append(_table(SIMULATED_COLUMNS, simulated_rows(plan)))
        parts.append(_list(simulated_lines(plan)))
    parts.append(
        '<img alt="Cost against the goal for the time per token; best tree size"'
        f' src="data:image/png;base64,{plan_png(plan)}">'
    )
    if best is not None:
        rows = [
            [str(p.running), p.shape, str(p.nodes), f"{p.committed:.2f}", f"{p.tpot_s * 1e3:.1f}",
             f"{p.ttft_s * 1e3:.0f}", f"{p.requests_per_s:.2f}"]
            for p in best.points
        ]  # fmt: skip
        columns = (
            "at once",
            "shape",
            "nodes",
            "tokens a cycle",
            "tpot ms",
            "ttft ms",
            "requests/s",
        )
        parts.append(f"<h2>{escape(best.gpu)}, one server</h2>{_table(columns, rows)}")
    parts.append(_list(plan.notes))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>rooftree plan</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | None]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell or '-')}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""
