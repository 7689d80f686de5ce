"""Exactness on real text, and speed where drafts do not help.

    python -m lab.studies.real_text [--prompts-per-set 10] [--new-tokens 128]

Two parts:
`exact` (float32, two more sets) compares token ids with transformers' greedy `generate`, for a
fixed and an adaptive budget, with the n-gram drafter and with one that replays the right text
at published acceptance, so that long paths are accepted too. A difference is listed with the
gap of the top two logits; a gap of 1e-3 or more is a failure.
`no_loss` decodes continuations of encyclopaedia text plainly, with trees from the n-gram
drafter, and with trees from a drafter that is always wrong and always sure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from costmodel.acceptance import published
from decoder.drafters.base import DraftRequest
from decoder.drafters.ngram import NgramDrafter, NgramSession
from decoder.engine import TreeDecoder
from decoder.model.demo_model import DEMO_NAME, ensure_demo_model
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree
from lab.bench.analysis.ratios import rate_ratios
from lab.bench.simulated import SimulatedDrafter, Truth
from lab.studies.common import environment, pooled_ratio, read_prompts, store

SETS = ("gsm8k", "humaneval", "mt_bench")
EXACT_SETS = (*SETS, "math500", "alpaca")
EXACT_POLICIES = ("fixed:16", "bastion")
NEAR_TIE = 1e-3  # gap of the top two logits below which rounding may decide
Arm = Callable[[list[int]], list[int]]


class WrongDrafter(NgramDrafter):
    """The n-gram drafter with every token replaced by its neighbour: confident and always wrong."""

    name = architecture_hash = "wrong"

    def start(
        self,
        prompt: NDArray[np.int64],
        features: torch.Tensor | None,
        logits: torch.Tensor | None = None,
    ) -> WrongSession:
        return WrongSession(self)


class WrongSession(NgramSession):
    """Learns nothing from outcomes, so that only the controller can react."""

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> CandidateTree:
        drafted = super().draft(context, request)
        return CandidateTree(drafted.tokens ^ 1, drafted.parents, drafted.probabilities)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        return


def transformers_arm(model: Any, new_tokens: int, **options: Any) -> Arm:
    def run(ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new_tokens,
            **options,
        )
        return output[0, len(ids) :].tolist()

    return run


def tree_arm(decoder: TreeDecoder, new_tokens: int, record: list[Any]) -> Arm:
    def run(ids: list[int]) -> list[int]:
        result = decoder.generate(ids, max_new_tokens=new_tokens)
        record.append(result.stats)
        return result.token_ids

    return run


def timed_rounds(
    arms: dict[str, Arm], prompts: list[list[int]]
) -> tuple[list[dict[str, Any]], dict[str, list[list[int]]]]:
    """Every prompt with every arm in turn, the order rotated by one for each prompt."""
    names = list(arms)
    rows, outputs = [], {name: [] for name in names}
    for index, ids in enumerate(prompts):
        row: dict[str, Any] = {"prompt_tokens": len(ids)}
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start_s = perf_counter()
            tokens = arms[name](ids)
            row[name] = {"tokens": len(tokens), "seconds": perf_counter() - start_s}
            outputs[name].append(tokens)
        rows.append(row)
        rates = ", ".join(f"{n} {row[n]['tokens'] / row[n]['seconds']:.1f}" for n in names)
        print(f"  {index + 1}/{len(prompts)}: {rates} tokens/s", flush=True)
    return rows, outputs


def pooled_rate(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name]["tokens"] for row in rows) / sum(row[name]["seconds"] for row in rows)


def ratio(rows: list[dict[str, Any]], name: str, base: str) -> dict[str, Any]:
    """Pooled ratio of rates with a bootstrap interval over prompts, and per-prompt ratios."""
    arm, other = (
        [(row[key]["tokens"], row[key]["seconds"]) for row in rows] for key in (name, base)
    )
    by_prompt = rate_ratios(np.hstack([arm, other])).tolist()
    pooled = pooled_ratio(arm, other)
    return {
        "pooled": pooled["ratio"],
        "interval_95": pooled["interval_95"],
        "median": median(by_prompt),
        "worst": min(by_prompt),
    }


def exact_part(prompts: list[list[int]], new_tokens: int, folder: str) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference, truth = transformers_arm(model, new_tokens), Truth()
    stats: dict[str, list[Any]] = {}
    shared = TreeDecoder.from_pretrained(DEMO_NAME, dtype="float32", policy="plain")
    arms = exact_arms(shared.target, truth, new_tokens, stats)
    differences: list[dict[str, Any]] = []
    for index, ids in enumerate(prompts):
        expected = reference(ids)
        truth.add(ids + expected)
        before = len(differences)
        for name, arm in arms.items():
            got = arm(ids)
            if got != expected:
                difference = first_difference(model, ids, expected, got)
                differences.append({"prompt": index, "arm": name} | difference)
        print(f"  exact {index + 1}/{len(prompts)}: {differences[before:] or 'same'}", flush=True)
    return {
        "sets": list(EXACT_SETS),
        "dtype": "float32",
        "runtime": shared.target.runtime.kind,
        "prompts": len(prompts),
        "arms": {
            name: {
                "tokens": sum(s.new_tokens for s in done),
                "accepted_tokens": sum(s.accepted_tokens for s in done),
                "drafted_tokens": sum(s.drafted_tokens for s in done),
                "rounds": sum(s.rounds for s in done),
            }
            for name, done in stats.items()
        },
        "largest_gap_allowed": NEAR_TIE,
        "differences": differences,
    }


def exact_arms(
    target: Target, truth: Truth, new_tokens: int, stats: dict[str, list[Any]]
) -> dict[str, Arm]:
    """An arm for each policy and drafter, all on one target; `stats` collects their statistics."""
    process = published("bastion", "gsm8k")
    vocab = target.architecture.vocab
    arms = {}
    for policy in EXACT_POLICIES:
        for drafter in (NgramDrafter(), SimulatedDrafter(truth, process, vocab=vocab)):
            decoder = TreeDecoder(target, policy=policy, drafter=drafter)
            name = f"{policy}, {drafter.name}"
            arms[name] = tree_arm(decoder, new_tokens, stats.setdefault(name, []))
    return arms


def first_difference(
    model: Any, ids: list[int], expected: list[int], got: list[int]
) -> dict[str, Any]:
    """Position of the first differing token, and the gap of the model's top two logits there."""
    pairs = enumerate(zip(expected, got, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))
    with torch.inference_mode():
        logits = model(torch.tensor([ids + expected[:at]]), logits_to_keep=1).logits[0, -1]
    top = logits.topk(2).values
    return {"position": at, "gap": float(top[0] - top[1])}


def no_loss_part(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    trees = TreeDecoder.from_pretrained(DEMO_NAME, dtype="bfloat16", policy="bastion")
    plain = TreeDecoder(trees.target, policy="plain")
    wrong = TreeDecoder(trees.target, policy="bastion", drafter=WrongDrafter())
    stats: dict[str, list[Any]] = {name: [] for name in ("plain", "trees", "wrong")}
    decoders = {"plain": plain, "trees": trees, "wrong": wrong}
    arms = {name: tree_arm(decoder, new_tokens, stats[name]) for name, decoder in decoders.items()}
    for arm in arms.values():
        arm(prompts[0][:32])
    rows, _ = timed_rounds(arms, prompts)
    return {
        "tokens_per_s": {name: pooled_rate(rows, name) for name in arms},
        "trees_over_plain": ratio(rows, "trees", "plain"),
        "wrong_over_plain": ratio(rows, "wrong", "plain"),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts-per-set", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--parts", nargs="+", default=["no_loss", "exact"])
    options = parser.parse_args()
    folder = str(ensure_demo_model(say=print))
    tokenizer = TreeDecoder.from_pretrained(DEMO_NAME, policy="plain")
    chats = {
        name: [
            tokenizer.encode(p["prompt"], chat=True)
            for p in read_prompts(name, options.prompts_per_set)
        ]
        for name in EXACT_SETS
    }
    articles = [
        tokenizer.encode(p["prompt"])[:256]
        for p in read_prompts("wikitext2", options.prompts_per_set)
    ]
    parts = {
        "no_loss": lambda: no_loss_part(articles, options.new_tokens),
        "exact": lambda: exact_part(
            [ids for name in EXACT_SETS for ids in chats[name]], options.new_tokens, folder
        ),
    }
    for name in options.parts:
        header = {"environment": environment(), "new_tokens": options.new_tokens}
        result = parts[name]()
        store(f"real_text_{name}", header | result)
        wrong = [one for one in result.get("differences", []) if one["gap"] >= NEAR_TIE]
        if wrong:
            raise SystemExit(f"not exact, and not by a near-tie: {wrong}")


if __name__ == "__main__":
    main()
