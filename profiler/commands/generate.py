"""`rooftree generate`: decode prompts with draft trees sized by the profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from costmodel.errors import InputError

if TYPE_CHECKING:
    from decoder import Generation, TreeDecoder
    from decoder.run import DecodeRun
    from decoder.statistics import Statistics

GENERATION_OPTIONS = ("max_new_tokens", "chat", "stop", "temperature", "top_p", "top_k", "seed")


@click.command(name="generate")
@click.option("--target", help="Folder, hub id or known target [default: fits this device].")
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; may be repeated.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    help="JSONL file with a `prompt` (and an `id`) on each line.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Take only the first prompts.")
@click.option("--chat", is_flag=True, help="Wrap each prompt in the chat template.")
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the argmax.")
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--top-k", default=0, show_default=True)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1))
@click.option("--stop", multiple=True, help="End the text at this string; may be repeated.")
@click.option(
    "--drafter",
    default="ngram",
    show_default=True,
    help="ngram; demo, the trained one for the demo model; a folder or hub id of a DFlash, "
    "SpecBlock or EAGLE-3 drafter, a BlockPilot predictor or a smaller model; A@block=N, a DFlash "
    "drafter with blocks of N; A+B, two together, as ngram+demo.",
)
@click.option(
    "--policy",
    default="bastion",
    show_default=True,
    help="bastion, bastion:paper, fixed:N, chain, beam:WxD, static-tree:DxB, dynatree or plain.",
)
@click.option("--max-nodes", type=int, help="Largest draft tree.")
@click.option(
    "--acceptance",
    default="auto",
    show_default=True,
    help="walk, recursive, traversal or auto; what a temperature above 0 accepts by.",
)
@click.option(
    "--estimator",
    type=click.Choice(["static", "ema", "ema+calib"]),
    help="How measured times correct the profile [default: as the profile needs].",
)
@click.option("--together", type=click.IntRange(min=1), help="Prompts to decode in one batch.")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Append every round to this JSONL file."
)
@click.option("--device", help="cpu, cuda or cuda:N [default: CUDA where there is one].")
@click.option("--dtype", help="bfloat16, float16, float32 [default: the device's].")
@click.option(
    "--runtime",
    type=click.Choice(["auto", "graphs", "eager"]),
    default="auto",
    show_default=True,
    help="graphs captures the forwards (CUDA only); auto: graphs on CUDA.",
)
@click.option("--weights", default="pretrained", help="pretrained, or random to try a shape.")
@click.option("--profile", type=click.Path(path_type=Path), help="Use this profile file.")
@click.option("--calibrate/--no-calibrate", default=True, help="Probe when no profile is found.")
@click.option("--require-profile", is_flag=True, help="Fail when no profile is found.")
@click.option("--stats", is_flag=True, help="Print rates and stage times.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt on stdout.")
def command(**options: Any) -> None:
    """Generate text with a target model and draft trees sized by the profile.

    The output is what plain decoding gives. The line on stderr says which
    profile chooses the tree sizes.
    """
    texts = read_prompts(options["prompts"], options["file"], options["limit"])
    decoder = _decoder(options)
    click.echo(decoder.profile_line, err=True)
    for warning in decoder.cost_source.warnings if decoder.cost_source else ():
        click.echo(f"warning: {warning}", err=True)
    generation = {name: options[name] for name in GENERATION_OPTIONS}
    if options["together"]:
        _generate_together(decoder, texts, generation, options)
        return
    for identity, text in texts:
        if options["as_json"]:
            result = decoder.generate(text, **generation)
            click.echo(json.dumps(to_record(identity, result)))
        else:
            if len(texts) > 1:
                click.secho(f"[{identity}]", bold=True)
            _show(decoder.stream(text, **generation), stats=options["stats"])


def _generate_together(
    decoder: TreeDecoder,
    texts: list[tuple[str, str]],
    generation: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Decode in batches; texts come out when their batch has ended."""
    size = options["together"]
    for first in range(0, len(texts), size):
        group = texts[first : first + size]
        results = decoder.generate_batch([text for _, text in group], **generation)
        for (identity, _), result in zip(group, results, strict=True):
            if options["as_json"]:
                click.echo(json.dumps(to_record(identity, result)))
                continue
            if len(texts) > 1:
                click.secho(f"[{identity}]", bold=True)
            click.echo(result.text)
            if options["stats"]:
                _show_stats(result.stats)


def _decoder(options: dict[str, Any]) -> TreeDecoder:
    from decoder import TreeDecoder
    from decoder.startup import ProfileChoice

    return TreeDecoder.from_pretrained(
        options["target"],
        dtype=options["dtype"],
        device=options["device"],
        weights=options["weights"],
        runtime=options["runtime"],
        drafter=options["drafter"],
        policy=options["policy"],
        acceptance=options["acceptance"],
        trace=options["trace"],
        stage_times=options["stats"] or options["as_json"],
        max_nodes=options["max_nodes"],
        profile=ProfileChoice(
            path=options["profile"],
            calibrate=options["calibrate"],
            require=options["require_profile"],
            estimator=options["estimator"],
        ),
    )


def read_prompts(
    prompts: tuple[str, ...], file: Path | None, limit: int | None
) -> list[tuple[str, str]]:
    """(id, text) of every prompt; InputError names the file and line of a bad one."""
    texts = [(f"prompt-{index}", text) for index, text in enumerate(prompts)]
    if file is not None:
        texts += _read_file(file)
    texts = texts[:limit]
    if not texts:
        raise InputError("there is no prompt", hint="Give --prompt TEXT or --prompts FILE.jsonl.")
    empty = next((identity for identity, text in texts if not text.strip()), None)
    if empty is not None:
        raise InputError(f"the prompt is empty ({empty})", hint="Give some text.")
    return texts


def _read_file(file: Path) -> list[tuple[str, str]]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # a text may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(
            f"cannot read the prompts in {file}: {reason}", hint="Check the path of --prompts."
        ) from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parse(line)
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if not isinstance(prompt, str):
            raise InputError(
                f"{file}, line {number} is not a JSON object with a text `prompt`",
                hint='Write one object a line, as {"id": "a", "prompt": "..."}.',
            )
        texts.append((str(record.get("id", f"line-{number}")), prompt))
    return texts


def _parse(line: str) -> Any:
    """The JSON value of a line; None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def to_record(identity: str, result: Generation) -> dict[str, Any]:
    """The stable JSON form of one generation."""
    return {
        "id": identity,
        "text": result.text,
        "token_ids": result.token_ids,
        "stats": result.stats.to_dict(),
    }


def _show(run: DecodeRun, *, stats: bool) -> None:
    """Print pieces as they come."""
    for piece in run:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if stats:
        _show_stats(run.stats)


def _show_stats(stats: Statistics) -> None:
    for line in stats.lines():
        click.echo(line, err=True)
