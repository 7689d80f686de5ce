"""`rooftree fit`: calibrations fitted to a table of forward times, without model or device."""

from __future__ import annotations

from pathlib import Path

import click

from profiler.commands.options import json_option


@click.command(short_help="Fit calibrations to a table of forward times.")
@click.argument("points", metavar="TABLE", type=click.Path(path_type=Path))
@click.option(
    "--device", required=True, help="The device by slug, name or alias, such as rtx-a6000."
)
@click.option("--target", required=True, help="The target model, such as Qwen/Qwen3-8B.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel degree.")
@click.option(
    "--points",
    "count",
    type=int,
    help="Fit only this many points, chosen without looking at the times; all others are held out.",
)
@json_option
def command(
    points: Path, device: str, target: str, tp: int, count: int | None, as_json: bool
) -> None:
    """Fit every calibration to TABLE, a CSV with a header, and report the error of each.

    TABLE needs the columns new_tokens and context_tokens, and one column of times: seconds,
    microseconds, forward_us, or the only name that ends in _s, _ms or _us. batch is optional.
    Rows with an empty time are left out.

    Errors are those of held-out points: with --points, all points that were not chosen;
    otherwise by cross-validation. mape and p95 give every row count the same weight.
    """
    from profiler.report.console import print_json
    from profiler.report.fits import fit_table, print_fit

    result = fit_table(points, device=device, target=target, tensor_parallel=tp, count=count)
    if as_json:
        print_json(result)
    else:
        print_fit(result)
