"""Exactness on real text, and speed where drafts do not help.

    python -m lab.studies.real_text [--prompts-per-set 10] [--new-tokens 128]

`exact` (float32) compares token ids with transformers' greedy `generate`, for a fixed and an
adaptive budget, with the n-gram drafter and with one that replays the right text at published
acceptance, so that long paths are accepted too. A difference is listed with the gap of the top two
logits; a gap of 1e-3 or more is a failure. `bfloat16` compares trees with this decoder's own plain
decoding, from which no text may differ. `no_loss` decodes continuations of encyclopaedia text
plainly, with trees from the n-gram drafter, and with trees from one that is always wrong and sure.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from decoder.drafters.base import DraftRequest
from decoder.drafters.ngram import NgramDrafter, NgramSession
from decoder.engine import TreeDecoder
from decoder.model.demo_model import DEMO_NAME, ensure_demo_model
from decoder.tree.draft_tree import CandidateTree
from lab.bench.simulated import SimulatedDrafter, Truth, published
from lab.studies.common import (
    environment,
    first_difference,
    greedy,
    pooled_ratio,
    read_prompts,
    store,
)

EXACT_SETS = ("gsm8k", "humaneval", "mt_bench", "math500", "alpaca")
EXACT_POLICIES = ("fixed:16", "bastion")
NEAR_TIE = 1e-3  # gap of the top two logits below which rounding may decide


class WrongDrafter(NgramDrafter):
    """The n-gram drafter with every token replaced by its neighbour: confident and always wrong."""

    name = architecture_hash = "wrong"

    def start(self, *_: object) -> WrongSession:
        return WrongSession(self)


class WrongSession(NgramSession):
    """Learns nothing from outcomes, so that only the controller can react."""

    def draft(self, context: NDArray[Any], request: DraftRequest) -> CandidateTree:
        drafted = super().draft(context, request)
        return CandidateTree(drafted.tokens ^ 1, drafted.parents, drafted.probabilities)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        return


def exact_part(new_tokens: int, per_set: int, dtype: str = "float32") -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(str(ensure_demo_model()), dtype=dtype).eval()
    plain = TreeDecoder.from_pretrained(DEMO_NAME, dtype=dtype, policy="plain")
    prompts = [
        plain.encode(line["prompt"], chat=True)
        for name in EXACT_SETS
        for line in read_prompts(name, per_set)
    ]
    truth, vocab = Truth(), plain.target.architecture.vocab
    replaying = SimulatedDrafter(truth, published("bastion", "gsm8k"), vocab=vocab)
    decoders = {
        f"{policy}, {drafter.name}": TreeDecoder(plain.target, policy=policy, drafter=drafter)
        for policy in EXACT_POLICIES
        for drafter in (NgramDrafter(), replaying)
    }
    totals = {name: {"tokens": 0, "accepted_tokens": 0, "rounds": 0} for name in decoders}
    differences: list[dict[str, Any]] = []
    for index, ids in enumerate(prompts):
        if dtype == "float32":
            expected = greedy(model, ids, new_tokens)
        else:
            expected = list(plain.generate(ids, max_new_tokens=new_tokens).token_ids)
        truth.add(ids + expected)
        for name, decoder in decoders.items():
            result = decoder.generate(ids, max_new_tokens=new_tokens)
            totals[name]["tokens"] += result.stats.new_tokens
            totals[name]["accepted_tokens"] += result.stats.accepted_tokens
            totals[name]["rounds"] += result.stats.rounds
            if result.token_ids != expected:
                logits = partial(last_logits, model)
                difference = first_difference(logits, ids, expected, result.token_ids)
                differences.append({"prompt": index, "arm": name} | difference)
        print(f"  exact {index + 1}/{len(prompts)}, {len(differences)} differences", flush=True)
    result = {"sets": list(EXACT_SETS), "dtype": dtype, "prompts": len(prompts)}
    allowed = NEAR_TIE if dtype == "float32" else 0.0
    result |= {"runtime": plain.target.runtime.kind, "largest_gap_allowed": allowed}
    return result | {"arms": totals, "differences": differences}


@torch.inference_mode()
def last_logits(model: Any, text: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([text]), logits_to_keep=1).logits[0, -1]
    return logits


def no_loss_part(new_tokens: int, count: int) -> dict[str, Any]:
    """Every prompt with every arm in turn, the order rotated by one for each prompt."""
    trees = TreeDecoder.from_pretrained(DEMO_NAME, dtype="bfloat16", policy="bastion")
    decoders = {
        "plain": TreeDecoder(trees.target, policy="plain"),
        "trees": trees,
        "wrong": TreeDecoder(trees.target, policy="bastion", drafter=WrongDrafter()),
    }
    rows: dict[str, list[tuple[int, float]]] = {name: [] for name in decoders}
    texts = [line["prompt"] for line in read_prompts("wikitext2", count)]
    for index, text in enumerate([texts[0][:100], *texts]):  # the first one warms up
        ids, names = trees.encode(text)[:256], list(decoders)
        for name in names[index % 3 :] + names[: index % 3]:
            stats = decoders[name].generate(ids, max_new_tokens=new_tokens).stats
            if index:
                rows[name].append((stats.new_tokens, stats.prefill_s + stats.decode_s))
        print(f"  no_loss {index}/{len(texts)}", flush=True)
    ratios = {name: pooled_ratio(rows[name], rows["plain"]) for name in ("trees", "wrong")}
    return {
        f"{name}_over_plain": {"pooled": one["ratio"], "interval_95": one["interval_95"]}
        for name, one in ratios.items()
    } | {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts-per-set", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--parts", nargs="+", default=["no_loss", "exact"])
    options = parser.parse_args()
    bfloat16_part = partial(exact_part, dtype="bfloat16")
    parts = {"no_loss": no_loss_part, "exact": exact_part, "bfloat16": bfloat16_part}
    for name in options.parts:
        header = {"environment": environment(), "new_tokens": options.new_tokens}
        result = parts[name](options.new_tokens, options.prompts_per_set)
        store(f"real_text_{name}", header | result)
        allowed = result.get("largest_gap_allowed")
        wrong = [one for one in result.get("differences", []) if one["gap"] >= allowed]
        if wrong:
            raise SystemExit(f"not exact, and not by a near-tie: {wrong}")


if __name__ == "__main__":
    main()
