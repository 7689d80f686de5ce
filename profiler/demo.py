"""The demo: a few prompts decoded plainly and with draft trees, side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from decoder import Generation, TreeDecoder
from profiler.render import print_table

NEW_TOKENS = 96
PROMPTS = {
    "arithmetic": "A box holds 12 pencils. How many pencils are in 7 boxes? Explain step by step.",
    "code": "Write a Python function that returns the larger of two numbers, and one that returns "
    "the smaller of two numbers.",
    "list": "List the days of the week, and after each day write how many letters it has.",
    "rewrite": "Repeat this sentence three times, then correct its mistake: The sun rise in the "
    "east and set in the west.",
    "story": "Write a short story about a lighthouse keeper and a lost whale.",
}


def compare(folder: Path, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Decode each prompt both ways, in turn on one model; a record of JSON values.

    Times are of this machine as it is: another program running beside shows in them.
    """
    trees = TreeDecoder.from_pretrained(folder, policy="bastion")
    plain = TreeDecoder(trees.target, policy="plain")
    say(trees.profile_line)
    for decoder in (plain, trees):
        decoder.generate("Hello", max_new_tokens=8)
    rows = []
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        say(f"decoding {index + 1} of {len(PROMPTS)}: {name}")
        order = [plain, trees] if index % 2 == 0 else [trees, plain]
        results = {
            id(decoder): decoder.generate(prompt, max_new_tokens=NEW_TOKENS, chat=True)
            for decoder in order
        }
        rows.append(_row(name, prompt, results[id(plain)], results[id(trees)]))
    return {"profile": trees.profile_line, "prompts": rows, "pooled": _pooled(rows)}


def print_comparison(comparison: dict[str, Any]) -> None:
    """The replies and the table on stdout."""
    for row in comparison["prompts"]:
        click.echo(f"\n> {row['prompt']}\n{row['text'].strip()}")
    click.echo()
    cells = [
        [
            row["name"],
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['tree_tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['tokens_per_verification']:.2f}",
            "yes" if row["same_tokens"] else "no",
        ]
        for row in [*comparison["prompts"], comparison["pooled"]]
    ]
    print_table(
        ("prompt", "plain tokens/s", "tree tokens/s", "speedup", "tokens/verification", "same"),
        cells,
    )
    if not comparison["pooled"]["same_tokens"]:
        click.echo(
            "Outputs may differ in bfloat16 where two tokens score nearly the same: one row and "
            "several rows round differently. In float32 they are equal."
        )


def _row(name: str, prompt: str, plain: Generation, trees: Generation) -> dict[str, Any]:
    return {
        "name": name,
        "prompt": prompt,
        "text": trees.text,
        "same_tokens": plain.token_ids == trees.token_ids,
        **_rates(
            {"tokens": plain.stats.new_tokens - 1, "seconds": plain.stats.decode_s},
            {"tokens": trees.stats.new_tokens - 1, "seconds": trees.stats.decode_s},
            trees.stats.rounds,
        ),
    }


def _pooled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All prompts together: tokens over seconds, not a mean of rates."""
    totals = {
        way: {unit: sum(row[way][unit] for row in rows) for unit in ("tokens", "seconds")}
        for way in ("plain", "tree")
    }
    rounds = sum(row["rounds"] for row in rows)
    return {
        "name": "all",
        "same_tokens": all(row["same_tokens"] for row in rows),
        **_rates(totals["plain"], totals["tree"], rounds),
    }


def _rates(plain: dict[str, float], tree: dict[str, float], rounds: int) -> dict[str, Any]:
    """Rates of the tokens after the first, which the prefill gives."""
    plain_rate = plain["tokens"] / plain["seconds"]
    tree_rate = tree["tokens"] / tree["seconds"]
    return {
        "plain": plain,
        "tree": tree,
        "rounds": rounds,
        "plain_tokens_per_s": plain_rate,
        "tree_tokens_per_s": tree_rate,
        "speedup": tree_rate / plain_rate,
        "tokens_per_verification": tree["tokens"] / rounds,
    }
