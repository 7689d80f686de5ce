"""`rooftree train-blockpilot`: train the predictor of a DFlash drafter's block size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiler.commands.options import (
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
    from lab.papers.blockpilot.recipe import Corpus


@click.command(name="train-blockpilot")
@target_option
@click.option("--drafter", required=True, help="demo, or folder or hub id of a DFlash drafter.")
@click.option(
    "--texts",
    type=click.Path(path_type=Path),
    help="The folder `texts` of a train-drafter run, on which acceptance is counted.",
)
@prompts_option("JSONL files of prompts to decode, instead of --texts.")
@output_folder_option("Folder for the sweeps and the predictor.")
@count_option("--limit", "Most prompts to use.", default=1000)
@count_option("--max-new-tokens", "Most new tokens of a text.", default=256, least=2)
@count_option(
    "--radius",
    "Candidates are the trained block size and so many on each side.",
    default=2,
    most=64,
)
@count_option("--hidden", "Width of the predictor's layers.", default=2048)
@count_option("--epochs", "Passes over the samples.", default=100)
@learning_rate_option(default=1e-5, help="Constant learning rate.")
@click.option(
    "--best",
    type=click.Choice(["length", "rate"]),
    default="length",
    show_default=True,
    help="Criterion for the best block size: acceptance length, or that over a cycle's time.",
)
@seed_option(help="Seed of texts and training.")
@device_option
@json_option
def command(drafter: str, output: Path, as_json: bool, **given: Any) -> None:
    """Train BlockPilot's predictor, which chooses a DFlash drafter's block size for each prompt.

    Every block size near the trained one is tried on every prompt: along the target's known text
    with --texts, by decoding with --prompts. After an interruption the same command continues.
    Prompts of evaluation sets are refused. The other commands take the folder `pilot` in OUTPUT
    as `--drafter`; `--drafter FOLDER@block=N` has a fixed block size, for comparison.
    """
    from dataclasses import asdict

    from decoder.drafters.factory import shipped
    from decoder.model.target import make_target
    from lab.bench.environment import machine
    from lab.papers.blockpilot.recipe import PilotRecipe, PilotTraining, train_blockpilot
    from lab.papers.blockpilot.sweeps import Sweep
    from lab.training.recipe import load_target
    from profiler.report.console import note, print_json

    target, seed = make_target(load_target(given["target"], given["device"])), given["seed"]
    recipe = PilotRecipe(
        sweep=Sweep(radius=given["radius"], max_new_tokens=given["max_new_tokens"], seed=seed),
        training=PilotTraining(
            epochs=given["epochs"],
            learning_rate=given["learning_rate"],
            hidden=given["hidden"],
            best=given["best"],
            seed=seed,
        ),
    )
    prompts = _prompts(target, given["texts"], given["prompts"], given["limit"], seed)
    place, result = train_blockpilot(target, shipped(drafter), prompts, output, recipe, note)
    figures = result.held_out or result.trained
    sizes = result.predictor.config.candidates
    if as_json:
        head = {"kind": "blockpilot", "drafter": str(place), "epoch": result.epoch}
        parts = {"trained": result.trained, "held_out": result.held_out}
        print_json(
            {**head, "block_sizes": list(sizes)}
            | {name: part and asdict(part) for name, part in parts.items()}
            | {"settings": asdict(recipe.training), "sweep": asdict(recipe.sweep)}
            | {"environment": asdict(machine(target.device)[0])}
        )
        return
    fixed = ", ".join(
        f"{length:.2f} with {size}" for size, length in zip(sizes, figures.fixed, strict=True)
    )
    note(
        f"epoch {result.epoch}; on {figures.samples} prompts "
        f"{'that chose it' if result.held_out else 'of training'}: {figures.chosen:.2f} tokens a "
        f"verification, {fixed}, {figures.hindsight:.2f} with the best for each"
    )
    click.echo(place)


def _prompts(
    target: Any, texts: Path | None, files: tuple[Path, ...], limit: int, seed: int
) -> list[list[int]] | Corpus:
    from costmodel.errors import InputError
    from lab.bench.prompts import read_files
    from lab.papers.blockpilot.recipe import Corpus, prompts_of_texts

    if (texts is None) == (not files):
        raise InputError(
            "the prompts come from one place",
            hint="Give --texts, the folder that train-drafter made, or --prompts.",
        )
    if texts is not None:
        return Corpus(texts, limit)
    texts_of_files = [text.prompt for text in read_files(files, None, seed)[0]]
    return prompts_of_texts(target, texts_of_files[:limit])
