"""`rooftree train-blockpilot`: train the predictor of a DFlash drafter's block size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lab.commands.train_drafter import (
    output_folder_option,
    prompts_option,
    setting_option,
    with_settings,
)
from profiler.commands.options import json_option, target_option


@click.command(name="train-blockpilot")
@target_option
@click.option("--drafter", required=True, help="demo, or folder or hub id of a DFlash drafter.")
@click.option(
    "--texts",
    type=click.Path(path_type=Path),
    help="The folder `texts` of a train-drafter run [default: the target writes new ones].",
)
@prompts_option("JSONL files of prompts of new texts [default: generated prompts].")
@output_folder_option("Folder for texts and the predictor.")
@setting_option(
    "texts, radius, max_new_tokens, temperature, input, layers, hidden, epochs, held_out, best, ..."
)
@json_option
def command(  # noqa: PLR0913 - one argument an option
    target: str | None,
    drafter: str,
    texts: Path | None,
    prompts: tuple[Path, ...],
    output: Path,
    given: tuple[tuple[str, Any], ...],
    as_json: bool,
) -> None:
    """Train BlockPilot's predictor, which chooses a DFlash drafter's block size for each prompt.

    Every block size near the trained one is tried along the target's own text after every prompt.
    Prompts of evaluation sets are refused. The other commands take the folder `pilot` in OUTPUT as
    `--drafter`; `--drafter FOLDER@block=N` has a fixed block size, for comparison.
    """
    from dataclasses import asdict

    from decoder.drafters.factory import DEMO_DRAFTER
    from decoder.model.making import make_target
    from lab.bench.environment import machine
    from lab.bench.prompts import training_prompts
    from lab.papers.blockpilot.recipe import PilotTraining, Sweep, distinct, train_blockpilot
    from lab.training.corpus import Collecting, collect, read_corpus
    from lab.training.recipe import load_target
    from profiler.report.console import note, print_json

    if texts is not None and (prompts or "template" in dict(given)):
        raise click.UsageError("--texts has its own prompts: leave out --prompts and template.")
    sweep, training = with_settings(given, Sweep(), PilotTraining())
    loaded = load_target(target)
    if texts is None:
        texts = output / "texts"
        asked = training_prompts(prompts)[: training.texts]
        collecting = Collecting(
            batches=-(-(len(asked) or training.texts) // Collecting().batch_texts),
            answer_tokens=sweep.max_new_tokens,
            template=sweep.template,
            answer_temperature=sweep.temperature,
        )
        collect(loaded, texts, collecting, asked, note)
    corpus = read_corpus(texts, loaded.architecture.vocab, sweep.temperature)
    chosen = distinct(corpus, training.texts)
    name = str(DEMO_DRAFTER) if drafter == "demo" else drafter
    place, result, figure = train_blockpilot(
        make_target(loaded), name, chosen, output, (sweep, training), note
    )
    figures = result.held_out or result.trained
    if as_json:
        parts = {"trained": result.trained, "held_out": result.held_out}
        print_json(
            {"kind": "blockpilot", "drafter": str(place), "epoch": result.epoch}
            | {"block_sizes": list(result.predictor.config.candidates), "figure_3": figure}
            | {name: part and asdict(part) for name, part in parts.items()}
            | {"settings": asdict(training), "sweep": asdict(sweep)}
            | {"environment": asdict(machine(loaded.model.device)[0])}
        )
        return
    for row in figure:
        note(
            f"block of {row['block_size']}: {row['length']:.2f} tokens a verification, "
            f"{row['over_plain']:.2f} times plain decoding, best for {row['best_for']:.0%} of texts"
        )
    note(
        f"epoch {result.epoch}; on {figures.samples} prompts "
        f"{'that chose it' if result.held_out else 'of training'}: {figures.chosen:.2f} tokens a "
        f"verification, {figures.hindsight:.2f} with the best block for each"
    )
    click.echo(place)
