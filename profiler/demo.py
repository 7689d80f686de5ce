"""The demo: a few prompts decoded plainly and with draft trees of several policies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from decoder import Generation, TreeDecoder
from profiler.render import print_table

NEW_TOKENS = 96
POLICIES = ("plain", "chain", "fixed:15", "bastion")
ADAPTIVE = POLICIES[-1]
PROMPTS = {
    "arithmetic": "A box holds 12 pencils. How many pencils are in 7 boxes? Explain step by step.",
    "code": "Write a Python function that returns the larger of two numbers, and one that returns "
    "the smaller of two numbers.",
    "list": "List the days of the week, and after each day write how many letters it has.",
    "rewrite": "Repeat this sentence three times, then correct its mistake: The sun rise in the "
    "east and set in the west.",
    "story": "Write a short story about a lighthouse keeper and a lost whale.",
}


def compare(
    folder: Path, drafter: str = "ngram+demo", *, say: Callable[[str], None]
) -> dict[str, Any]:
    """Decode each prompt with every policy, in turn on one model; a record of JSON values.

    Times are of this machine as it is: another program running beside shows in them.
    """
    adaptive = TreeDecoder.from_pretrained(folder, policy=ADAPTIVE, drafter=drafter)
    arms = {
        policy: TreeDecoder(adaptive.target, policy=policy, drafter=adaptive.drafter)
        for policy in POLICIES[:-1]
    } | {ADAPTIVE: adaptive}
    say(adaptive.profile_line)
    for decoder in arms.values():
        decoder.generate("Hello", max_new_tokens=8)
    rows = []
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        say(f"decoding {index + 1} of {len(PROMPTS)}: {name}")
        turned = [*POLICIES[index % len(POLICIES) :], *POLICIES[: index % len(POLICIES)]]
        results = {
            policy: arms[policy].generate(prompt, max_new_tokens=NEW_TOKENS, chat=True)
            for policy in turned
        }
        rows.append(_row(name, prompt, results))
    return {
        "profile": adaptive.profile_line,
        "drafter": drafter,
        "prompts": rows,
        "pooled": _pooled(rows),
    }


def print_comparison(comparison: dict[str, Any]) -> None:
    """The replies and the table on stdout."""
    for row in comparison["prompts"]:
        click.echo(f"\n> {row['prompt']}\n{row['text'].strip()}")
    click.echo()
    rows = [*comparison["prompts"], comparison["pooled"]]
    print_table(
        (
            "prompt",
            "plain tokens/s",
            *(f"{policy}" for policy in POLICIES[1:]),
            "tokens/verification",
            "same",
        ),
        [
            [
                row["name"],
                f"{row['arms']['plain']['tokens_per_s']:.1f}",
                *(f"{row['arms'][policy]['speedup']:.2f}x" for policy in POLICIES[1:]),
                f"{row['arms'][ADAPTIVE]['tokens_per_verification']:.2f}",
                "yes" if row["same_tokens"] else "no",
            ]
            for row in rows
        ],
    )
    click.echo(f"Drafter {comparison['drafter']}; tokens per verification are those of {ADAPTIVE}.")
    if not comparison["pooled"]["same_tokens"]:
        click.echo(
            "Outputs may differ in bfloat16 where two tokens score nearly the same: one row and "
            "several rows round differently. In float32 they are equal."
        )


def _row(name: str, prompt: str, results: dict[str, Generation]) -> dict[str, Any]:
    plain = results["plain"].token_ids
    counts = {
        policy: {
            "tokens": result.stats.new_tokens - 1,
            "seconds": result.stats.decode_s,
            "rounds": result.stats.rounds,
        }
        for policy, result in results.items()
    }
    return {
        "name": name,
        "prompt": prompt,
        "text": results[ADAPTIVE].text,
        "same_tokens": all(result.token_ids == plain for result in results.values()),
        "arms": _rates(counts),
    }


def _pooled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All prompts together: tokens over seconds, not a mean of rates."""
    totals = {
        policy: {
            unit: sum(row["arms"][policy][unit] for row in rows)
            for unit in ("tokens", "seconds", "rounds")
        }
        for policy in POLICIES
    }
    return {
        "name": "all",
        "same_tokens": all(row["same_tokens"] for row in rows),
        "arms": _rates(totals),
    }


def _rates(counts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts of each policy with the rates of the tokens after the first, the prefill's."""
    plain = counts["plain"]["tokens"] / counts["plain"]["seconds"]
    found = {}
    for policy, count in counts.items():
        rate = count["tokens"] / count["seconds"]
        found[policy] = count | {
            "tokens_per_s": rate,
            "speedup": rate / plain,
            "tokens_per_verification": count["tokens"] / count["rounds"],
        }
    return found
