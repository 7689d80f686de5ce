"""Tokens per second of int8 weights beside bfloat16 ones, plainly and with draft trees.

    rooftree calibrate
    rooftree calibrate --quantization int8
    python -m lab.studies.int8_speed [--prompts-per-set 3] [--new-tokens 128]

Each prompt is decoded with every arm in turn, in a new order for each, by the profiles that the
two commands have made. An arm's text is its own weights'.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from decoder.engine import TreeDecoder
from decoder.model.demo_model import DEMO_NAME
from decoder.model.target import Quantization
from decoder.profiling.startup import ProfileChoice
from lab.bench.analysis.ratios import bootstrap_interval, rate_ratios
from lab.studies.common import environment, read_prompts, store

SETS = ("gsm8k", "humaneval", "mt_bench")
WEIGHTS: dict[str, Quantization | None] = {"bfloat16": None, "int8": "int8"}
DRAFTERS = ("ngram", "ngram+demo")
WARM_TOKENS = 16


def decoders() -> dict[str, TreeDecoder]:
    """The arms: plain decoding and trees of each drafter, of both kinds of weights."""
    arms = {}
    for weights, quantization in WEIGHTS.items():
        plain = TreeDecoder.from_pretrained(
            DEMO_NAME, dtype="bfloat16", quantization=quantization, policy="plain"
        )
        arms[f"{weights} plain"] = plain
        for drafter in DRAFTERS:
            trees = TreeDecoder(plain.target, drafter=drafter, profile=ProfileChoice(require=True))
            print(f"{weights} {drafter}: {trees.profile_line}")
            arms[f"{weights} bastion+{drafter}"] = trees
    return arms


def compared(tables: dict[str, np.ndarray], arm: str, base: str) -> dict[str, Any]:
    """The ratio of two arms' rates over all prompts, and its interval."""
    table = np.hstack([tables[arm], tables[base]])
    ratio = float(rate_ratios(table.sum(axis=0)))
    return {"arm": arm, "over": base, "ratio": ratio, "interval_95": bootstrap_interval(table)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts-per-set", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    arms = decoders()
    texts = [prompt for name in SETS for prompt in read_prompts(name, options.prompts_per_set)]
    random = np.random.default_rng(0)
    rows: dict[str, list[tuple[int, float]]] = {name: [] for name in arms}
    rounds = dict.fromkeys(arms, 0)
    for prompt in texts:
        for name in random.permutation(list(arms)).tolist():
            ids = arms[name].encode(prompt["prompt"], chat=True)
            arms[name].generate(ids, max_new_tokens=WARM_TOKENS)
            stats = arms[name].generate(ids, max_new_tokens=options.new_tokens).stats
            rows[name].append((stats.new_tokens - 1, stats.decode_s))
            rounds[name] += stats.rounds
        print(prompt["id"], {name: round(t[-1][0] / t[-1][1], 1) for name, t in rows.items()})
    tables = {name: np.array(row) for name, row in rows.items()}
    ratios = [
        compared(tables, f"int8 {mode}", f"{weights} {other}")
        for mode in ("plain", *(f"bastion+{drafter}" for drafter in DRAFTERS))
        for weights, other in (("bfloat16", mode), ("int8", "plain"))
        if (weights, other) != ("int8", mode)
    ]
    rates = {name: float(table[:, 0].sum() / table[:, 1].sum()) for name, table in tables.items()}
    for ratio in ratios:
        low, high = ratio["interval_95"]
        print(f"{ratio['arm']} over {ratio['over']}: {ratio['ratio']:.3f} ({low:.3f}, {high:.3f})")
    result = {
        "environment": environment("cpu"),
        "target": DEMO_NAME,
        "prompts": len(texts),
        "new_tokens": options.new_tokens,
        "tokens_per_s": rates,
        "tokens_a_round": {name: float(tables[name][:, 0].sum() / rounds[name]) for name in tables},
        "ratios": ratios,
    }
    store("int8_speed", result)


if __name__ == "__main__":
    main()
