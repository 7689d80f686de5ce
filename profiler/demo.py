"""The demo: a few prompts decoded plainly and with draft trees of several policies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from decoder.model.making import make_target
from profiler.measure.samples import in_turn
from profiler.report.console import print_table

NEW_TOKENS = (32, 96)  # of a text, at least and at most
BUDGET_S = 60.0  # that all texts take, where that allows the least
WARM_TOKENS = 8
POLICIES = ("plain", "chain", "fixed:15", "bastion")
ADAPTIVE = POLICIES[-1]
UNITS = ("tokens", "seconds", "rounds")  # that are counted
DRAFTER = "ngram+demo"  # the trained drafter of the demo model, and what the text repeats
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
    """Decode each prompt with every policy, one round of each in turn; returns JSON values.

    Whatever slows the machine for a while then slows all policies alike. Each policy has its
    own target and KV cache around the same weights.
    """
    plain = TreeDecoder.from_pretrained(folder, policy="plain", drafter="ngram")
    loaded = plain.target.loaded
    drafter = load_drafter(DRAFTER, make_target(loaded))
    arms = {"plain": plain} | {
        policy: TreeDecoder(make_target(loaded), policy=policy, drafter=drafter.unlearnt())
        for policy in POLICIES[1:]
    }
    say(arms[ADAPTIVE].profile_line)
    for decoder in arms.values():
        decoder.generate("Hello", max_new_tokens=WARM_TOKENS)
    options = {"max_new_tokens": _planned_tokens(plain), "chat": True}
    rows: list[dict[str, Any]] = []
    for name, prompt in PROMPTS.items():
        say(f"decoding {len(rows) + 1} of {len(PROMPTS)}: {name}")
        runs = {policy: decoder.stream(prompt, **options) for policy, decoder in arms.items()}
        texts = dict.fromkeys(runs, "")
        for policy, pieces in in_turn({policy: run.rounds() for policy, run in runs.items()}):
            texts[policy] += "".join(pieces)
        counts = {
            policy: dict(zip(UNITS, (one.new_tokens - 1, one.decode_s, one.rounds), strict=True))
            for policy, one in ((policy, run.stats) for policy, run in runs.items())
        }
        same = all(run.token_ids == runs["plain"].token_ids for run in runs.values())
        row = {"name": name, "prompt": prompt, "text": texts[ADAPTIVE]}
        rows.append(row | {"same_tokens": same, "arms": _rates(counts)})
    return {
        "profile": arms[ADAPTIVE].profile_line,
        "drafter": DRAFTER,
        "prompts": rows,
        "pooled": _pooled(rows),
    }


def _planned_tokens(plain: TreeDecoder) -> int:
    """The tokens of a text with which all texts take about `BUDGET_S` on this machine."""
    stats = plain.generate("Hello", max_new_tokens=WARM_TOKENS).stats
    token_s = max(stats.decode_s / max(stats.new_tokens - 1, 1), 1e-9)
    return int(np.clip(BUDGET_S / (token_s * len(PROMPTS) * len(POLICIES)), *NEW_TOKENS))


def _pooled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All prompts together: total tokens over total seconds, not a mean of rates."""
    totals = {
        policy: {unit: sum(row["arms"][policy][unit] for row in rows) for unit in UNITS}
        for policy in POLICIES
    }
    same = all(row["same_tokens"] for row in rows)
    return {"name": "all", "same_tokens": same, "arms": _rates(totals)}


def print_comparison(comparison: dict[str, Any]) -> None:
    for row in comparison["prompts"]:
        click.echo(f"\n> {row['prompt']}\n{row['text'].strip()}")
    click.echo()
    rows = [*comparison["prompts"], comparison["pooled"]]

    def shown(value: float | None, form: str, unit: str = "") -> str | None:
        return None if value is None else format(value, form) + unit

    columns = ("prompt", "plain tokens/s", *POLICIES[1:], "tokens/verification", "same")
    cells = [
        [
            row["name"],
            shown(row["arms"]["plain"]["tokens_per_s"], ".1f"),
            *(shown(row["arms"][policy]["speedup"], ".2f", "x") for policy in POLICIES[1:]),
            shown(row["arms"][ADAPTIVE]["tokens_per_verification"], ".2f"),
            "yes" if row["same_tokens"] else "no",
        ]
        for row in rows
    ]
    print_table(columns, cells)
    speedups = [row["arms"][ADAPTIVE]["speedup"] for row in rows]
    if None not in speedups:
        low, high = min(speedups[:-1]), max(speedups[:-1])
        click.echo(
            f"{ADAPTIVE} is {speedups[-1]:.2f} times as fast as plain decoding on all prompts, "
            f"{low:.2f} to {high:.2f} times on one."
        )
    click.echo(f"Drafter {comparison['drafter']}; tokens a verification are those of {ADAPTIVE}.")
    if not comparison["pooled"]["same_tokens"]:
        click.echo(
            "Texts differ where two tokens score nearly the same: on a GPU, and where a CPU runs "
            "the model eagerly, one row and several round differently. In float32 they are equal."
        )


def _rates(counts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The counts of each policy, with their rates; None without a token after the first."""

    def ratio(value: float, by: float) -> float | None:
        return value / by if by else None

    plain = counts["plain"]
    return {
        policy: one
        | {
            "tokens_per_s": ratio(one["tokens"], one["seconds"]),
            "speedup": ratio(one["tokens"] * plain["seconds"], one["seconds"] * plain["tokens"]),
            "tokens_per_verification": ratio(one["tokens"], one["rounds"]),
        }
        for policy, one in counts.items()
    }
