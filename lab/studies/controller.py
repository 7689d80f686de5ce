"""The adaptive policy against fixed tree sizes at published acceptance, live on a CPU.

    python -m lab.studies.controller [--prompts-per-set 5]

SmolLM2-135M in bfloat16 decodes prompts of three sets plainly, and with a simulated drafter by each
policy. The model and its times are real, acceptance is simulated at the rates of a published table
for the set. All arms decode the text that plain decoding wrote, together: each has its own target
around the same weights and runs one round in its turn, so that a slow moment of the machine
affects all alike. `rooftree bench --by-round --same-text` does the same with real drafters. Stored
are tokens/s, the best fixed size in hindsight, and paired bootstrap intervals over the prompts.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch

from costmodel.acceptance import published
from decoder.engine import TreeDecoder
from decoder.model.demo_model import DEMO_NAME, ensure_demo_model
from decoder.model.loading import LoadedModel
from decoder.model.target import make_target
from lab.bench.arms.given_text import GivenTextTarget
from lab.bench.simulated import SimulatedDrafter, Truth
from lab.studies.common import environment, pooled_ratio, read_prompts, store
from profiler.measure.samples import in_turn

SETS = ("gsm8k", "humaneval", "mt_bench")
TABLES = ("bastion", "ddtree")
FIXED = tuple(f"fixed:{nodes}" for nodes in (1, 3, 7, 15, 31, 63))
PAPER = ("bastion:paper", "bastion:printed")
POLICIES = ("bastion", *PAPER, "chain", *FIXED)
MOST = 127
WARM_UP_TOKENS = 96

Rows = list[dict[str, float]]  # of one arm, a row a prompt


def open_arms(drafter: SimulatedDrafter, loaded: LoadedModel) -> dict[str, TreeDecoder]:
    """A decoder for each policy, each with a target of its own around the same weights."""
    return {
        policy: TreeDecoder(
            GivenTextTarget(make_target(loaded)), drafter=drafter, policy=policy, max_nodes=MOST
        )
        for policy in POLICIES
    }


def run_together(
    arms: dict[str, TreeDecoder], text: list[int], prompt: int, new_tokens: int
) -> dict[str, dict[str, float]]:
    """Decode one text with every arm, one round each in turn; seconds are of its own rounds."""
    runs = {}
    for name, decoder in arms.items():
        decoder.target.follow(text)
        runs[name] = decoder.stream(text[:prompt], max_new_tokens=new_tokens)
    for _ in in_turn({name: run.rounds() for name, run in runs.items()}, rotation=0):
        pass
    return {
        name: {
            "tokens": run.stats.new_tokens - 1,
            "seconds": run.stats.decode_s,
            "rounds": run.stats.rounds,
            "nodes": run.stats.drafted_tokens,
        }
        for name, run in runs.items()
    }


def run_set(
    writer: TreeDecoder, name: str, prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """Decode a set with all arms, prompt by prompt; the first prompt also warms up.

    writer  plain decoding with an ordinary target
    """
    loaded = writer.target.loaded
    texts = [ids + writer.generate(ids, max_new_tokens=new_tokens).token_ids for ids in prompts]
    target = GivenTextTarget(make_target(loaded))
    arms = {"plain": TreeDecoder(target, policy="plain")}
    for table in TABLES:
        vocab = loaded.architecture.vocab
        drafter = SimulatedDrafter(Truth(texts), published(table, name), vocab=vocab)
        arms |= {f"{table} {policy}": arm for policy, arm in open_arms(drafter, loaded).items()}
    # The warm-up compiles kernels and meets new shapes.
    length = len(prompts[0])
    run_together(arms, texts[0][: length + WARM_UP_TOKENS], length, WARM_UP_TOKENS)
    rows: dict[str, Rows] = defaultdict(list)
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for arm, row in run_together(arms, text, len(prompt), new_tokens).items():
            rows[arm].append(row)
        print(f"  {index + 1}/{len(prompts)}", flush=True)
    return {
        f"replay {table}": compared(
            {"plain": rows["plain"]} | {policy: rows[f"{table} {policy}"] for policy in POLICIES}
        )
        for table in TABLES
    }


def compared(rows: dict[str, Rows]) -> dict[str, Any]:
    """Figures of all policies at one table's acceptance, and `bastion` over the others."""
    figures = {name: figures_of(row) for name, row in rows.items()}
    best = max(FIXED, key=lambda name: figures[name]["tokens_per_s"])
    pairs = {name: [(one["tokens"], one["seconds"]) for one in row] for name, row in rows.items()}
    against = {"best_fixed": best} | {name: name for name in ("plain", "chain", *PAPER)}
    return {
        "best_fixed": best,
        "bastion_over": {
            label: pooled_ratio(pairs["bastion"], pairs[name]) for label, name in against.items()
        },
        "arms": figures,
        "rows": rows,
    }


def figures_of(rows: Rows) -> dict[str, float]:
    total = {key: sum(row[key] for row in rows) for key in rows[0]}
    return {
        "tokens_per_s": total["tokens"] / total["seconds"],
        "tokens_per_verification": total["tokens"] / total["rounds"],
        "nodes_per_verification": total["nodes"] / total["rounds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts-per-set", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    options = parser.parse_args()
    ensure_demo_model(say=print)
    writer = TreeDecoder.from_pretrained(DEMO_NAME, dtype="bfloat16", policy="plain")
    result = {"environment": environment(), "dtype": str(torch.bfloat16), "target": DEMO_NAME}
    sets: dict[str, dict[str, Any]] = {}
    for name in options.sets:
        lines = read_prompts(name, options.prompts_per_set)
        prompts = [writer.encode(line["prompt"], chat=True) for line in lines]
        sets[name] = run_set(writer, name, prompts, options.new_tokens)
        for label, one in sets[name].items():
            over = {key: f"{value['ratio']:.3f}" for key, value in one["bastion_over"].items()}
            print(f"{name}, {label}: best {one['best_fixed']}, bastion over {over}")
    result |= {"acceptance": "simulated", "new_tokens": options.new_tokens, "sets": sets}
    store("controller_replay", result)


if __name__ == "__main__":
    main()
