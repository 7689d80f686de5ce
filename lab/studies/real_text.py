"""Texts of trees on real prompts: those of greedy decoding.

    python -m lab.studies.real_text [--prompts-per-set 10] [--new-tokens 128]

`exact` (float32) compares token ids with transformers' greedy `generate`, for a fixed and an
adaptive budget, with the n-gram drafter and with one that replays the right text at published
acceptance, so that long paths are accepted too. A difference is listed with the gap of the top two
logits; a gap of 1e-3 or more is a failure. `bfloat16` compares trees with this decoder's own plain
decoding, from which no text may differ.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model.demo_model import DEMO_NAME, ensure_demo_model
from lab.bench.simulated import SimulatedDrafter, Truth, published
from lab.studies.common import environment, greedy, read_prompts, store

EXACT_SETS = ("gsm8k", "humaneval", "mt_bench", "math500", "alpaca")
EXACT_POLICIES = ("fixed:16", "bastion")
NEAR_TIE = 1e-3  # gap of the top two logits below which rounding may decide


def compared(new_tokens: int, per_set: int, dtype: str) -> dict[str, Any]:
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
                difference = first_difference(model, ids, expected, result.token_ids)
                differences.append({"prompt": index, "arm": name} | difference)
        print(f"  exact {index + 1}/{len(prompts)}, {len(differences)} differences", flush=True)
    result = {"sets": list(EXACT_SETS), "dtype": dtype, "prompts": len(prompts)}
    allowed = NEAR_TIE if dtype == "float32" else 0.0
    result |= {"runtime": plain.target.runtime.kind, "largest_gap_allowed": allowed}
    return result | {"arms": totals, "differences": differences}


@torch.inference_mode()
def first_difference(
    model: Any, prompt: list[int], expected: list[int], got: list[int]
) -> dict[str, Any]:
    """The position of the first differing token, and the gap of the top two logits there."""
    pairs = enumerate(zip(expected, got, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))
    text = torch.tensor([prompt + expected[:at]])
    top = model(text, logits_to_keep=1).logits[0, -1].topk(2).values
    return {"position": at, "gap": float(top[0] - top[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts-per-set", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--parts", nargs="+", default=["exact", "bfloat16"])
    options = parser.parse_args()
    dtypes = {"exact": "float32", "bfloat16": "bfloat16"}
    for name in options.parts:
        header = {"environment": environment(), "new_tokens": options.new_tokens}
        result = compared(options.new_tokens, options.prompts_per_set, dtypes[name])
        store(f"real_text_{name}", header | result)
        allowed = result["largest_gap_allowed"]
        wrong = [one for one in result["differences"] if one["gap"] >= allowed]
        if wrong:
            raise SystemExit(f"not exact, and not by a near-tie: {wrong}")


if __name__ == "__main__":
    main()
