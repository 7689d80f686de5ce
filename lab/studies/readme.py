"""The tables of README, docs and model card from stored results, and the plans that are shown.

python -m lab.studies.readme          # prints the blocks
python -m lab.studies.readme --write  # puts them between their markers, and plans below commands

Plans use shipped profiles only: the commands run with an empty user's directory and as if the
extra `operators` were not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from lab.bench.analysis.hindsight import HindsightRatios
from lab.bench.analysis.ratios import Ratio, compare_arms
from lab.bench.analysis.summary import ResultFigures
from lab.bench.record import PLAIN, Arm, Result, read_result
from lab.bench.report.tables import engine_tables, interval_text, number_text, ratio_text
from lab.studies.common import RESULTS
from lab.studies.trained import blockpilot_table, demo_table
from profiler.cli import run

ROOT = Path(__file__).parents[2]
NAMES = (
    "README.md", "docs/benchmark.md", "docs/families.md", "docs/planning.md", "docs/training.md",
)  # fmt: skip
PAGES = tuple(ROOT / name for name in (*NAMES, "decoder/demo/README.md"))
BEST_ARM, LOOKUP = "bastion+ngram+demo", "transformers:prompt-lookup"
PLANNING = ROOT / "docs" / "planning.md"
PLAN = re.compile(r"```console\n\$ (rooftree plan .*?[^\\])\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"<!-- ([a-z-]+): begin -->\n(.*?)<!-- \1: end -->", re.DOTALL)


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def bench_result(name: str = "bench") -> Result:
    return read_result(RESULTS / f"{name}.json")


def headline() -> str:
    """The stored run in one sentence: the adaptive policy over plain decoding and over a peer."""
    result = bench_result()
    plain, lookup = (compare_arms(result, BEST_ARM, base) for base in (PLAIN, LOOKUP))
    target = result.target.name.rpartition("/")[2]
    return (
        f"{target} ({result.settings.dtype}) on a two-core cloud CPU: **{plain.pooled:.2f}x** the "
        f"tokens per second of plain decoding (95 % interval {plain.low:.2f} to {plain.high:.2f}, "
        f"{len(result.prompts)} prompts) and {lookup.pooled:.2f}x those of transformers' prompt "
        f"lookup, with a drafter trained here ([the whole run](docs/benchmark.md))."
    )


def bench_run() -> str:
    """The stored run: its policies, best sizes and peers, and tokens/s by tree size, 0: plain."""
    result = bench_result()
    sweeps = ResultFigures(result).hindsight.values()
    best = {sweep.single_best for sweep in sweeps}
    arms = [arm.name for arm in result.arms if "policies" in arm.studies or arm.name in best]
    sizes = sorted({size.nodes for sweep in sweeps for size in sweep.sizes})
    rates = [{one.nodes: f"{one.tokens_per_s:.1f}" for one in sweep.sizes} for sweep in sweeps]
    rows = [[sweep.drafter, *map(by.get, sizes)] for sweep, by in zip(sweeps, rates, strict=True)]
    tables = arm_table(result, arms), markdown(["tokens/s by nodes", *map(str, sizes)], rows)
    return "\n\n".join([bench_heading(result), *map("\n".join, tables)])


def bench_arms(name: str) -> str:
    """A stored run: its heading and every arm."""
    result = bench_result(name)
    arms = arm_table(result, [arm.name for arm in result.arms])
    return "\n".join([bench_heading(result), "", *arms])


def bench_engines() -> str:
    """The stored run beside other engines."""
    result = bench_result("peers")
    tables = ["\n".join(markdown(one.columns, one.rows)) for one in engine_tables(result)]
    return "\n\n".join([bench_heading(result), *tables])


def bench_heading(result: Result) -> str:
    """One sentence: machine, target, settings and prompts."""
    machine, settings = result.environment, result.settings
    counts = {name: sum(one.set == name for one in result.prompts) for name in result.sets}
    prompts = ", ".join(f"{count} of {name}" for name, count in counts.items())
    versions = [
        f"{name} {machine.fields[field]}"
        for name, field in (("torch", "torch_version"), ("transformers", "transformers_version"))
        if machine.fields.get(field)
    ]
    return (
        f"{', '.join([machine.device, f'{machine.threads} threads', *versions])}, "
        f"{machine.created_utc[:10]}; {result.target.name}, {settings.dtype}, "
        f"runtime {settings.runtime}, "
        f"T = {settings.temperature:g}, up to {settings.new_tokens} new tokens"
        f"{', --same-text' if settings.same_text else ''}"
        f"{', --by-round' if settings.by_round else ''}; prompts: {prompts}."
    )


def arm_table(result: Result, names: Iterable[str]) -> list[str]:
    """A row for each arm: tokens per verification, and its speed over what the run has."""
    figures = ResultFigures(result)
    against = {own.arm: own for sweep in figures.hindsight.values() for own in sweep.against}
    columns = (
        "arm", "tokens a verification", "over plain", "over `chain`", "over prompt lookup",
        "over the best size", "over the best of each set",
    )  # fmt: skip
    rows = [_arm_cells(figures, result.arm(name), against.get(name)) for name in names]
    filled = [one for one in zip(columns, *rows, strict=True) if any(one[1:])]
    head, *body = zip(*filled, strict=True)
    return markdown(head, body)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str | None]]) -> list[str]:
    """The lines of a Markdown table, None as a dash."""
    head, *body = (f"| {' | '.join(cell or '-' for cell in row)} |" for row in (columns, *rows))
    return [head, "|---" * len(columns) + "|", *body]


def _arm_cells(
    figures: ResultFigures, arm: Arm, against: HindsightRatios | None
) -> list[str | None]:
    result, own = figures.result, figures.of(arm.name)
    names = {one.name for one in result.arms}

    def over(base: str) -> str | None:
        comparable = arm.kind == "policy" and base in names and base != arm.name
        return _cell(compare_arms(result, arm.name, base) if comparable else None)

    return [
        arm.name, number_text(own.tokens_per_verification, ".2f"),
        None if arm.kind == "plain" else _cell(own.over_plain), over(f"chain+{arm.drafter}"),
        over(LOOKUP), _cell(against and against.single), _cell(against and against.per_set),
    ]  # fmt: skip


def _cell(ratio: Ratio | None) -> str | None:
    interval = interval_text(ratio)
    return f"{ratio_text(ratio)} ({interval})" if interval else ratio_text(ratio)


def families_table() -> str:
    from lab.studies.families import Outcome, document_table  # transformers takes seconds

    return document_table([Outcome(**one) for one in result("families")["families"]])


def plans_scored() -> str:
    """Errors of plans by group, the test's behind the stroke, and rivals' on the same rows."""
    groups = result("plans_scored")["groups"]
    lines = ["|rows|planned|TPOT|bias|inside|TTFT|rival/ours: TPOT, TTFT (rows)|", "|---" * 7 + "|"]
    for name in filter(re.compile(r"InferenceX|.*, (?!test)[^ /]+").fullmatch, groups):
        group, test, rivals = groups[name], groups.get(f"{name}, test", {}), []
        if not group["planned"]:
            continue
        for rival, one in group["tpot"]["rivals"].items():
            both = one, group["ttft"]["rivals"][rival]
            beside = ",".join(f"{100 * e['mean']:.0f}/{e['ours']:.0%}" for e in both)
            rivals.append(f"{rival}:{beside}({one['both']})")
        tpot, ttft = (f"{group[m]['mean']:.1%}" + (f"/{test[m]['mean']:.1%}" if m in test else "")
                      for m in ("tpot", "ttft"))  # fmt: skip
        cells = [name, f"{group['planned']}/{group['rows']}", tpot, f"{group['tpot']['bias']:+.0%}"]
        cells += [f"{group['tpot']['inside']:.0%}", ttft, " ".join(rivals)]
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "headline": headline, "bench-run": bench_run,
    "bench-studies": lambda: bench_arms("bench_studies"), "bench-engines": bench_engines,
    "plans-scored": plans_scored, "families": families_table, "trained-demo": demo_table,
    "trained-blockpilot": blockpilot_table,
}  # fmt: skip


def with_numbers(text: str) -> str:
    """`text` with every block between its markers replaced."""

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name}: begin -->\n{BLOCKS[name]()}\n<!-- {name}: end -->"

    return BLOCK.sub(filled, text)


def output_of(command: str) -> str:
    """What a command prints, both streams, in the order in which it does."""
    words = shlex.split(command.replace("\\\n", " "))[1:]
    shown = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as home,
        mock.patch.dict(os.environ, {"ROOFTREE_HOME": home, "COLUMNS": "80"}),
        mock.patch("costmodel.planning.sources.operators_installed", lambda: False),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
    ):
        run(words)
    return shown.getvalue()


def with_output(text: str) -> str:
    """`text` with the output of every `rooftree plan` in its console blocks."""
    return PLAN.sub(lambda m: f"```console\n$ {m[1]}\n{output_of(m[1])}```", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    for page in PAGES:
        text = with_numbers(page.read_text(encoding="utf-8"))
        if write:
            page.write_text(text, encoding="utf-8")
        else:
            print("\n\n".join(match[0] for match in BLOCK.finditer(text)))
    if write:
        PLANNING.write_text(with_output(PLANNING.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
