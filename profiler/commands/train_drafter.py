"""`rooftree train-drafter`: a drafter of one's own for a target."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="train-drafter")
@click.option("--target", help="Folder, hub id or known target [default: fits this device].")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="JSONL files of prompts to train on [default: prompts made here].",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for texts, features, checkpoints and the drafter.",
)
@click.option("--layers", type=click.IntRange(1, 16), default=3, show_default=True)
@click.option("--block-size", type=click.IntRange(2, 64), default=8, show_default=True)
@click.option(
    "--texts",
    type=click.IntRange(min=64),
    default=2688,
    show_default=True,
    help="Texts that the target writes to train on, in batches of 64.",
)
@click.option("--steps", type=click.IntRange(min=1), default=3000, show_default=True)
@click.option("--learning-rate", type=click.FloatRange(0, 1, min_open=True), default=2e-3)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--device", help="cpu, cuda or cuda:N [default: CUDA where there is one].")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def command(  # noqa: PLR0913 - one argument an option
    target: str | None,
    prompts: tuple[Path, ...],
    output: Path,
    layers: int,
    block_size: int,
    texts: int,
    steps: int,
    learning_rate: float,
    seed: int,
    device: str | None,
    as_json: bool,
) -> None:
    """Train a DFlash drafter for a target, on texts that the target writes itself.

    Stopped at any point, the same command goes on where it was. Prompts of the sets on which
    drafters are measured are refused. The folder `drafter` in OUTPUT is what `--drafter` of
    the other commands takes.
    """
    from decoder.device import parse_dtype, select_device
    from decoder.loading import default_target, load_model
    from decoder.training.corpus import Collecting
    from decoder.training.dflash import DFlashTraining
    from decoder.training.loop import Settings
    from decoder.training.recipe import Recipe, train_dflash
    from profiler.bench.prompts import read_files
    from profiler.render import note, print_json

    where = select_device(device)
    own = [text.prompt for text in read_files(prompts, None, seed)[0]]
    batch = Collecting().batch
    recipe = Recipe(
        collecting=Collecting(batches=-(-(len(own) or texts) // batch), seed=seed),
        drafter=DFlashTraining(layers=layers, block_size=block_size),
        settings=Settings(steps=steps, learning_rate=learning_rate, seed=seed),
    )
    loaded = load_model(
        target or default_target(where),
        weights="pretrained",
        dtype=parse_dtype(None, where),
        device=where,
        download=True,
    )
    trained = train_dflash(loaded, output, recipe, own, note)
    last = trained.history[-1]
    if as_json:
        counts = {"texts": trained.texts[0], "held_out": trained.texts[1]}
        print_json({"drafter": str(trained.folder), **counts, "tokens": trained.tokens, **last})
        return
    note(
        f"trained on {trained.texts[0]} texts ({trained.tokens} tokens); on {trained.texts[1]} "
        f"held out: {last['chain']:.2f} tokens a verification as a chain, {last['tree']:.2f} as "
        "a tree of 16 nodes"
    )
    click.echo(trained.folder)
