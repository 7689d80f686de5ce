"""`rooftree fit`: fit calibrations to a table of forward times, no model or device needed."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Fit calibrations to a table of forward times.")
@click.argument("points", type=click.Path(path_type=Path))
@click.option("--device", required=True, help="The device: a name or slug, as rtx-a6000.")
@click.option("--target", required=True, help="The target model, as Qwen/Qwen3-8B.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel degree.")
@click.option(
    "--points",
    "count",
    type=int,
    help="Fit only this many points, chosen without seeing the other times; "
    "all others are held out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def command(
    points: Path, device: str, target: str, tp: int, count: int | None, as_json: bool
) -> None:
    """Fit every calibration to POINTS, a CSV with a header, and report the error of each.

    POINTS needs the columns new_tokens and context_tokens and one of seconds, microseconds
    or forward_us (any name ending in _s, _ms or _us, where only one does); batch is optional.
    Rows with an empty time are left out.

    Errors are those of held-out points: with --points of all points that were not chosen,
    otherwise by cross-validation. mape and p95 count every row count alike.
    """
    from profiler.fit_report import fit_table, print_fit
    from profiler.render import print_json

    result = fit_table(points, device=device, target=target, tensor_parallel=tp, count=count)
    if as_json:
        print_json(result)
    else:
        print_fit(result)
