"""`rooftree fit`: calibrations fitted to a table of forward times, and a profile of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands.options import json_option

if TYPE_CHECKING:
    from profiler.calibrate.imported import FitRequest

FORMATS = (
    "csv",
    "vllm-forward",
    "llama-bench",
    "sglang-one-batch",
    "sglang-dspark",
    "nvidia-forward",
)


@click.command(short_help="Fit calibrations to a table of forward times.")
@click.argument("points", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--from", "format", type=click.Choice(FORMATS), default="csv",
              show_default=True, help="What wrote FILE.")  # fmt: skip
@click.option(
    "--device",
    required=True,
    help="The device by slug, name or alias, such as rtx-a6000; cpu: this machine.",
)
@click.option("--target", required=True, help="The target model, such as Qwen/Qwen3-8B.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel degree.")
@click.option(
    "--points",
    "count",
    type=int,
    help="Fit only this many points, chosen without looking at the times; all others are held out.",
)
@click.option("--output", type=click.Path(path_type=Path),
              help="Make a profile: a .yaml file, or a folder of profiles.")  # fmt: skip
@click.option("--source", help="Tool and version that measured, where FILE does not say.")
@click.option("--context", type=click.IntRange(min=0),
              help="Cached tokens of a request while a DSpark table was measured.")  # fmt: skip
@click.option("--where", multiple=True, metavar="COLUMN=VALUE",
              help="Read these rows of a table of several settings.")  # fmt: skip
@json_option
def command(points: Path, output: Path | None, as_json: bool, **options: Any) -> None:
    """Fit every calibration to the times in FILE and report the error of each; with --output,
    make a profile of them, which plans and exports take.

    A CSV needs the columns new_tokens and context_tokens, and one column of times: seconds,
    microseconds, forward_us, or the only name that ends in _s, _ms or _us. batch is optional.
    Rows with an empty time are left out. The other formats are files of vLLM (bench forward),
    llama.cpp (llama-bench -o jsonl), SGLang (bench_one_batch, DSpark tables) and NVIDIA
    (fpm_forward_perf.parquet, which needs pyarrow).

    Errors are those of held-out points: with --points, all points that were not chosen;
    otherwise by cross-validation. mape and p95 give every row count the same weight.
    """
    from profiler.calibrate.imported import fit_file, import_file
    from profiler.commands.compose import save_and_show
    from profiler.report.console import print_json
    from profiler.report.fits import print_fit

    request = _request(points, **options)
    if output is not None:
        if request.count is not None:
            raise click.UsageError("--points is for a report; a profile is fitted to all points.")
        save_and_show(import_file(request), output, as_json)
        return
    result = fit_file(request)
    if as_json:
        print_json(result)
    else:
        print_fit(result)


def _request(path: Path, *, tp: int, context: int | None, where: tuple[str, ...],
             **options: Any) -> FitRequest:  # fmt: skip
    from costmodel.imports.table import ReadOptions
    from profiler.calibrate.imported import FitRequest

    pairs = [part.partition("=") for part in where]
    if not all(name and equals for name, equals, _ in pairs):
        raise click.UsageError("--where takes COLUMN=VALUE, such as --where dp=1.")
    chosen = {name: value for name, _, value in pairs}
    return FitRequest(
        path=path,
        options=ReadOptions(tensor_parallel=tp, context=context, where=chosen),
        **options,
    )
