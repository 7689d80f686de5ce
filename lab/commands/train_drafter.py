"""`rooftree train-drafter`: train a drafter for a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from profiler.commands.options import (
    Decorated,
    NamedValue,
    OutputPath,
    count_option,
    json_option,
    target_option,
)

SIZES = {"layers", "block_size", "block_length", "target_layers", "feature_layers", "without"}


def prompts_option(help: str) -> Callable[[Decorated], Decorated]:
    """`--prompts` of a training command: JSONL files."""
    return click.option("--prompts", type=click.Path(path_type=Path), multiple=True, help=help)


def output_folder_option(help: str) -> Callable[[Decorated], Decorated]:
    """`--output` of a training command: a folder, which must be given."""
    return click.option("--output", required=True, type=OutputPath("folder"), help=help)


def setting_option(names: str) -> Callable[[Decorated], Decorated]:
    """`--set NAME=VALUE`, the settings of a recipe."""
    return click.option(
        "--set",
        "given",
        type=NamedValue(),
        multiple=True,
        help=f"A setting of the recipe: {names}. May be repeated.",
    )


def with_settings(given: Sequence[tuple[str, Any]], *parts: Any) -> list[Any]:
    """The dataclasses with the settings that are given, checked against their types.

    Raises InputError for an unknown name or a wrong value.
    """
    from dataclasses import fields

    from pydantic import TypeAdapter, ValidationError

    from costmodel.errors import InputError

    values = dict(given)
    names = sorted({field.name for part in parts for field in fields(part)})
    for name in values:
        if name not in names:
            raise InputError(f"there is no setting '{name}'", hint=f"Set {', '.join(names)}.")
    try:
        return [
            TypeAdapter(type(part)).validate_python(
                {one.name: values.get(one.name, getattr(part, one.name)) for one in fields(part)}
            )
            for part in parts
        ]
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        problem = f"--set {first['loc'][0]}={first['input']}: {first['msg']}"
        raise InputError(problem, hint="Give another value, or leave it out.") from None


@click.command(name="train-drafter")
@target_option
@prompts_option("JSONL files of prompts to train on [default: generated prompts].")
@output_folder_option("Folder for texts, features, checkpoints and the drafter.")
@click.option(
    "--kind",
    type=click.Choice(["dflash", "jetspec", "dspark", "dflash2", "domino", "specblock"]),
    default="dflash",
    show_default=True,
    help="dflash, jetspec: all positions of a block at once; dspark, dflash2, domino: behind the "
    "tokens before; specblock: short blocks, chained.",
)
@click.option(
    "--from", "start", help="Trained drafter to continue from: its folder, hub id, or demo."
)
@count_option(
    "--texts",
    "Number of training texts that the target writes, in batches of 64.",
    default=2688,
    least=64,
)
@count_option("--steps", "Optimiser steps.", default=3000)
@setting_option(
    "layers, block_size (specblock: block_length), learning_rate, seed, openings=templates, "
    'without=["no-shift"] for an ablation of SpecBlock, ...'
)
@json_option
def command(  # noqa: PLR0913 - one argument an option
    target: str | None,
    prompts: tuple[Path, ...],
    output: Path,
    kind: str,
    start: str | None,
    texts: int,
    steps: int,
    given: tuple[tuple[str, Any], ...],
    as_json: bool,
) -> None:
    """Train a drafter for a target, on texts that the target writes itself.

    After an interruption the same command continues; with more --steps or --texts it continues a
    finished run. Prompts of evaluation sets are refused. The other commands take the folder
    `drafter` in OUTPUT as `--drafter`.
    """
    from dataclasses import asdict, replace

    from profiler.report.console import note, print_json

    if start is not None and SIZES & dict(given).keys():
        raise click.UsageError("--from brings its own layers, block, features and parts.")
    note("loading the target")
    from lab.bench.environment import machine
    from lab.bench.prompts import training_prompts
    from lab.papers.specblock.training.objective import SpecBlockSettings
    from lab.papers.specblock.training.recipe import RUN, train_specblock
    from lab.training.corpus import Collecting
    from lab.training.dflash import DFlashTraining
    from lab.training.loop import TrainingSettings
    from lab.training.recipe import Recipe, load_target, train_dflash

    asked = training_prompts(prompts)
    run = replace(
        RUN if kind == "specblock" else TrainingSettings(),
        steps=steps,
        save_every=min(max(200, steps // 4), 500),
    )
    sizes: Any = DFlashTraining(soft=float(kind == "jetspec"))  # its published loss
    if kind == "specblock":
        sizes = SpecBlockSettings(rank_from_step=steps * 2 // 3)
    batches = -(-(len(asked) or texts) // Collecting().batch_texts)
    collecting, sizes, settings = with_settings(given, Collecting(batches=batches), sizes, run)
    recipe = Recipe(collecting=collecting, drafter=sizes, kind=kind, settings=settings, start=start)
    train = train_specblock if kind == "specblock" else train_dflash
    loaded = load_target(target)
    trained = train(loaded, output, recipe, asked, note)
    last = trained.history[-1]
    if as_json:
        counts = {"texts": trained.texts[0], "held_out": trained.texts[1]}
        print_json(
            {"kind": kind, "from": start, "drafter": str(trained.folder)}
            | counts
            | {"tokens": trained.tokens}
            | {"settings": asdict(settings), "collecting": asdict(collecting)}
            | {"last": last, "history": trained.history}
            | {"environment": asdict(machine(loaded.model.device)[0])}
        )
        return
    figures = ", ".join(f"{name} {value:.3g}" for name, value in last.items() if name != "seconds")
    note(
        f"trained on {trained.texts[0]} texts ({trained.tokens} tokens), "
        f"{trained.texts[1]} held out: {figures}"
    )
    click.echo(trained.folder)
