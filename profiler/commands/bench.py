"""`rooftree bench`: policies, drafters and outside peers over the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands.calibrate import Numbers

if TYPE_CHECKING:
    from profiler.bench.record import Result
    from profiler.bench.session import BenchOptions

html_option = click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write one page with all."
)
plot_option = click.option(
    "--plot", type=click.Path(file_okay=False, path_type=Path), help="Write pictures here, as PNG."
)


class Names(click.ParamType):
    """Names separated by commas; `none` for none."""

    name = "name,name,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = [part.strip() for part in str(value).split(",")]
        return tuple(name for name in names if name and name != "none")


@click.group(invoke_without_command=True)
@click.option("--target", help="Folder, hub id or known target [default: fits this device].")
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    help="As in generate, and A@adapt=bandit or A@adapt=always, a SpecBlock drafter that learns "
    "between texts; may be repeated [default: ngram].",
)
@click.option(
    "--prompts",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="JSONL file with id, category and prompt; may be repeated [default: five built in].",
)
@click.option("--per-file", type=click.IntRange(min=1), help="So many prompts of each file.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="As in generate; may be repeated; plain always runs [default: chain, bastion].",
)
@click.option(
    "--study",
    "studies",
    type=Names(),
    default=(),
    help="More arms: sweep, shape, estimator, dynatree.",
)
@click.option(
    "--sweep",
    type=Numbers(),
    default="1,3,7,15,31",
    show_default=True,
    help="Tree sizes of the sweep.",
)
@click.option(
    "--peers",
    type=Names(),
    help="transformers' own: plain, prompt-lookup, assisted, or none [default: what can run].",
)
@click.option(
    "--chat/--raw", default=None, help="Use the chat template [default: where there is one]."
)
@click.option("--new-tokens", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0))
@click.option("--repeat", "repeats", default=1, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**31 - 1),
    help="Which prompts, and sampling.",
)
@click.option(
    "--same-text",
    is_flag=True,
    help="Each of our arms writes plain decoding's text, in low precision too.",
)
@click.option(
    "--by-round",
    is_flag=True,
    help="Our arms decode a prompt together, a round each in turn, so that all meet a machine's "
    "slow moments alike.",
)
@click.option("--max-nodes", type=click.IntRange(min=1), help="Largest adaptive tree.")
@click.option("--acceptance", default="auto", show_default=True, help="As in generate.")
@click.option("--device", help="cpu, cuda or cuda:N [default: CUDA where there is one].")
@click.option("--dtype", help="bfloat16, float16, float32 [default: the device's].")
@click.option(
    "--runtime", type=click.Choice(["auto", "graphs", "eager"]), default="auto", show_default=True
)
@click.option("--weights", default="pretrained", help="pretrained, or random to try a shape.")
@click.option("--profile", type=click.Path(path_type=Path), help="Use this profile file.")
@click.option("--require-profile", is_flag=True, help="Fail when no profile is found.")
@click.option("--stage-times", is_flag=True, help="End every stage with a synchronisation.")
@click.option(
    "--json",
    "output",
    type=click.Path(path_type=Path),
    help="Write the result here; an interrupted run goes on from beside it.",
)
@click.option("--fresh", is_flag=True, help="Drop what an unfinished run has done.")
@plot_option
@html_option
@click.pass_context
def command(ctx: click.Context, html: Path | None, plot: Path | None, **values: Any) -> None:
    """Decode the same prompts with every policy and with transformers' own generate.

    Arms take turns prompt by prompt after a warm-up; all are timed by one clock and
    their tokens counted alike. Plain decoding always runs, and ratios to it come with
    95 % intervals over prompts. With --json an interrupted run loses nothing: the
    same command goes on where it stopped.
    """
    if ctx.invoked_subcommand is not None:
        return
    result = _run(_options(values))
    _report(result, html, plot)
    if values["output"] is not None:
        click.echo(f"result: {values['output']}")


@command.command(short_help="Say which arms became faster or slower.")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--end-to-end", is_flag=True, help="Whole calls, the prefill included.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON on stdout.")
def compare(first: Path, second: Path, end_to_end: bool, as_json: bool) -> None:
    """Compare two results of the same prompts: SECOND is faster, slower, or undecided.

    Beside plain: with the times of each prompt divided by those of plain decoding in
    the same run, which takes away what made the whole machine faster or slower.
    """
    from dataclasses import asdict

    from profiler.bench.compare import compare_results
    from profiler.bench.store import read_result
    from profiler.bench.tables import print_comparison
    from profiler.render import print_json

    part = "total" if end_to_end else "decode"
    comparison = compare_results(read_result(first), read_result(second), part)
    if as_json:
        data = asdict(comparison)
        for record, own in zip(data["arms"], comparison.arms, strict=True):
            record["verdict"] = own.verdict
        print_json(data)
    else:
        print_comparison(comparison)


@command.command(short_help="Show a stored result.")
@click.argument("path", type=click.Path(path_type=Path))
@plot_option
@html_option
def show(path: Path, html: Path | None, plot: Path | None) -> None:
    """Print the tables of a stored result, and draw it where asked for."""
    from profiler.bench.store import read_result

    _report(read_result(path), html, plot)


def _options(values: dict[str, Any]) -> BenchOptions:
    from decoder.startup import ProfileChoice
    from profiler.bench.arms import DEFAULT_POLICIES, ArmChoice
    from profiler.bench.lineup import DecoderChoice
    from profiler.bench.session import BenchOptions

    arms = ArmChoice(
        policies=values["policies"] or DEFAULT_POLICIES,
        drafters=values["drafters"] or ("ngram",),
        studies=values["studies"],
        sweep=values["sweep"],
        peers=values["peers"],
        max_nodes=values["max_nodes"],
    )
    decoder = DecoderChoice(
        runtime=values["runtime"],
        temperature=values["temperature"],
        max_nodes=values["max_nodes"],
        acceptance=values["acceptance"],
        stage_times=values["stage_times"],
        same_text=values["same_text"],
        by_round=values["by_round"],
        profile=ProfileChoice(path=values["profile"], require=values["require_profile"]),
    )
    same = ("target", "files", "per_file", "seed", "chat", "new_tokens", "repeats", "device",
            "dtype", "weights", "output", "fresh")  # fmt: skip
    return BenchOptions(arms=arms, decoder=decoder, **{name: values[name] for name in same})


def _run(options: BenchOptions) -> Result:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from profiler.bench.run import Progress
    from profiler.bench.session import Listeners, bench

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("decoding", total=None)

        def progress(done: Progress) -> None:
            bar.update(task, completed=done.done, total=done.of)

        return bench(options, Listeners(say=console.print, progress=progress))


def _report(result: Result, html: Path | None, plot: Path | None) -> None:
    from profiler.bench.tables import print_result

    print_result(result)
    if plot is not None:
        from profiler.bench.plots import write_plots

        write_plots(result, plot)
        click.echo(f"pictures: {plot}")
    if html is not None:
        from profiler.bench.page import write_page

        write_page(result, html)
        click.echo(f"page: {html}")
