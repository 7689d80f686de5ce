"""`rooftree train-drafter`: train a drafter for a target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from profiler.commands.options import (
    Numbers,
    count_option,
    device_option,
    json_option,
    learning_rate_option,
    output_folder_option,
    prompts_option,
    seed_option,
    target_option,
)

if TYPE_CHECKING:
    from lab.training.prompts import Kinds


@click.command(name="train-drafter")
@target_option
@prompts_option("JSONL files of prompts to train on [default: generated prompts].")
@output_folder_option("Folder for texts, features, checkpoints and the drafter.")
@click.option(
    "--kind",
    type=click.Choice(["dflash", "specblock"]),
    default="dflash",
    show_default=True,
    help="dflash: all positions of a block at once; specblock: short blocks, chained.",
)
@click.option(
    "--openings",
    type=click.Choice(["free", "templates"]),
    default="free",
    show_default=True,
    help="Generated prompts: from templates alone, or half of them from a word or two that the "
    "target continues.",
)
@click.option(
    "--from", "start", help="Trained drafter to continue from: its folder, hub id, or demo."
)
@count_option("--layers", "Layers of the drafter [default: dflash 3, specblock 2].", most=16)
@count_option(
    "--block-size", "Tokens of a block [default: dflash 8, specblock 4].", least=2, most=64
)
@click.option(
    "--feature-layers",
    type=Numbers(),
    help="Hidden states of the target to read, from 1 [default: spread over its layers].",
)
@click.option(
    "--without",
    type=click.Choice(["no-broadcast", "no-shift", "no-mask", "no-rank-head"]),
    multiple=True,
    help="Parts of SpecBlock to leave out, as its paper's table 2 does.",
)
@count_option(
    "--texts",
    "Number of training texts that the target writes, in batches of 64.",
    default=2688,
    least=64,
)
@count_option("--steps", "Optimiser steps.", default=3000)
@learning_rate_option(help="Largest learning rate [default: dflash 2e-3, specblock 1.5e-3].")
@seed_option(help="Seed of texts and training.")
@device_option
@json_option
def command(  # noqa: PLR0913 - one argument an option
    target: str | None,
    prompts: tuple[Path, ...],
    output: Path,
    kind: str,
    openings: Kinds,
    start: str | None,
    layers: int | None,
    block_size: int | None,
    feature_layers: tuple[int, ...] | None,
    without: tuple[str, ...],
    texts: int,
    steps: int,
    learning_rate: float | None,
    seed: int,
    device: str | None,
    as_json: bool,
) -> None:
    """Train a drafter for a target, on texts that the target writes itself.

    After an interruption the same command continues; with more --steps or --texts it continues a
    finished run. Prompts of evaluation sets are refused. The other commands take the folder
    `drafter` in OUTPUT as `--drafter`.
    """
    from dataclasses import asdict, replace

    from lab.bench.environment import machine
    from lab.bench.prompts import read_files
    from lab.papers.specblock.training.objective import SpecBlockSettings
    from lab.papers.specblock.training.recipe import SpecBlockRecipe, train_specblock
    from lab.training.corpus import Collecting
    from lab.training.dflash import DFlashTraining
    from lab.training.recipe import Recipe, load_target, train_dflash
    from profiler.report.console import note, print_json

    if without and kind == "dflash":
        raise click.UsageError("--without names parts of a SpecBlock drafter.")
    if start is not None and any((layers, block_size, feature_layers, without)):
        raise click.UsageError("--from brings its own layers, block, features and parts.")
    given_prompts = [text.prompt for text in read_files(prompts, None, seed)[0]]
    batches = -(-(len(given_prompts) or texts) // Collecting().batch)
    collecting = Collecting(batches=batches, openings=openings, seed=seed)
    settings = replace(
        Recipe().settings if kind == "dflash" else SpecBlockRecipe().settings,
        steps=steps,
        seed=seed,
        save_every=min(max(200, steps // 4), 500),
    )
    if learning_rate is not None:
        settings = replace(settings, learning_rate=learning_rate)
    loaded = load_target(target, device)
    if kind == "dflash":
        drafter = DFlashTraining(
            layers=layers or 3,
            block_size=block_size or 8,
            target_layers=feature_layers and tuple(number - 1 for number in feature_layers),
        )
        recipe = Recipe(collecting=collecting, drafter=drafter, settings=settings, start=start)
        trained = train_dflash(loaded, output, recipe, given_prompts, note)
    else:
        spec = SpecBlockSettings(
            layers=layers or 2,
            block_length=block_size or 4,
            feature_layers=feature_layers,
            without=frozenset(without),
            rank_from_step=steps * 2 // 3,
        )
        block_recipe = SpecBlockRecipe(
            collecting=collecting, drafter=spec, settings=settings, start=start
        )
        trained = train_specblock(loaded, output, block_recipe, given_prompts, note)
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
