"""`rooftree fit`: calibrations fitted to a table of forward times, and a profile of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from costmodel.plugins import READERS, plugin_names
from profiler.commands.options import OutputPath, json_option
from profiler.report.console import note, print_json, print_table

FORMATS = ("csv", *plugin_names(READERS, "times."))


@click.command(short_help="Fit calibrations to a table of forward times.")
@click.argument("points", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--from", "format", type=click.Choice(FORMATS), default="csv",
              show_default=True, help="What wrote FILE.")  # fmt: skip
@click.option("--device", required=True, help="The device by slug, name or alias, such as "
              "rtx-a6000; cpu: this machine.")  # fmt: skip
@click.option("--target", required=True, help="The target model, such as Qwen/Qwen3-8B.")
@click.option("--tp", "tensor_parallel", default=1, show_default=True,
              type=click.IntRange(min=1), help="Tensor-parallel degree.")  # fmt: skip
@click.option("--output", type=OutputPath("either"),
              help="Make a profile: a .yaml file, or a folder of profiles.")  # fmt: skip
@click.option("--source", help="Tool and version that measured, where FILE does not say.")
@click.option("--context", type=click.IntRange(min=0),
              help="Cached tokens of a request while a DSpark table was measured.")  # fmt: skip
@json_option
def command(
    points: Path, output: Path | None, source: str | None, as_json: bool, **options: Any
) -> None:
    """Fit every calibration to the times in FILE and report the error of each; with --output,
    make a profile of them, which plans and exports take.

    A CSV needs the columns new_tokens and context_tokens, and one column of times: seconds,
    microseconds, forward_us, or the only name that ends in _s, _ms or _us. batch is optional.
    Rows with an empty time are left out. The other formats are files of llama.cpp
    (llama-bench -o jsonl; the output of scripts/bench-models.sh) and SGLang (DSpark tables).

    Errors are of points left out, by cross-validation. mape and p95 give every row count
    the same weight.
    """
    from costmodel.imports import imported_profile
    from profiler.calibrate.imported import fit_table, read_file
    from profiler.commands.compose import save_and_show

    table, subject = read_file(points, **options)
    if output is not None:
        profile = imported_profile(table, subject, path=points, source=source)
        save_and_show(profile, output, as_json)
        return
    result = fit_table(table, subject, points)
    if as_json:
        print_json(result)
        return
    if "warning" in result:
        note(f"warning: {result['warning']}")
    note(
        f"{result['target']} on {result['device']}: {result['fitted']} of {result['points']}"
        f" points fitted"
    )
    rows = []
    for name, calibration in result["calibrations"].items():
        held_out = calibration["held_out"]
        keys = ("mape", "p95", "worst", "regret", "regret_worst")
        values = [held_out[key] for key in keys]
        rows.append([name, *(None if x is None else f"{100 * x:.2f}%" for x in values)])
    print_table(("calibration", "mean", "p95", "worst", "regret", "worst regret"), rows)
    note(f"selected: {result['selected']}")
