"""Packed weights on real prompts: texts against their own plain ones, bfloat16 against eager.

    python -m lab.studies.packed_texts [--prompts 10] [--new-tokens 64] [--passages 20]

Nothing is timed, so that a busy machine serves too. `texts` compares the texts of every tree policy
with plain texts of the same weights: int8 weights in float32, where a difference by more than a
near-tie is an error; int8 weights in bfloat16, where rounding decides more often; and bfloat16
weights beside them. A difference is listed with the gap of the top two logits. `logits` compares
bfloat16 logits of prompts and of draft trees behind them, packed and eager, in steps of the last
place of the larger one. `perplexity` is that of bfloat16 and int8 weights on wikitext2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from decoder.engine import TreeDecoder
from decoder.model.demo_model import DEMO_NAME
from decoder.model.loading import load_model
from decoder.model.target import Step, Target, make_target
from lab.studies.common import environment, read_prompts, store
from lab.studies.packed_steps import CPU, MOST_TOKENS, perplexity, tree_of

SETS = ("gsm8k", "humaneval", "mt_bench")
POLICIES = ("bastion", "fixed:16", "chain", "beam:3x5", "static-tree:4x2", "dynatree")
SIGNIFICANT_BITS = 8  # of a bfloat16
TREE_ROWS = 16
NEAR_TIE = 1e-3  # gap of the top two logits in float32 below which rounding may decide


def texts_part(
    plain: TreeDecoder, policies: Sequence[str], prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """The differences of each tree policy's texts from the plain texts of the same target."""
    expected = [plain.generate(ids, max_new_tokens=new_tokens).token_ids for ids in prompts]
    result: dict[str, Any] = {}
    for policy in policies:
        trees = TreeDecoder(plain.target, policy=policy)
        done = [trees.generate(ids, max_new_tokens=new_tokens) for ids in prompts]
        differences = [
            {"prompt": number} | first_difference(plain.target, ids, text, one.token_ids)
            for number, (ids, text, one) in enumerate(zip(prompts, expected, done, strict=True))
            if one.token_ids != text
        ]
        result[policy] = {
            "equal": len(prompts) - len(differences),
            "tokens": sum(one.stats.new_tokens for one in done),
            "accepted_tokens": sum(one.stats.accepted_tokens for one in done),
            "differences": differences,
        }
        print(f"{plain.target.dtype} {policy}: {result[policy]}", flush=True)
    return {"prompts": len(prompts), "new_tokens": new_tokens, "policies": result}


def first_difference(
    target: Target, ids: list[int], expected: list[int], got: list[int]
) -> dict[str, Any]:
    """The position of the first differing token, and the gap of the top two logits there."""
    pairs = enumerate(zip(expected, got, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))
    text = ids + expected[:at]
    target.reserve(len(text))
    top = target.prefill(torch.tensor(text)).float().flatten().topk(2).values
    return {"position": at, "gap": float(top[0] - top[1])}


def logits_of(target: Target, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits behind each prompt, and of a draft tree there."""
    parts = []
    for ids in prompts:
        target.reserve(len(ids) + TREE_ROWS)
        parts.append(target.prefill(torch.tensor(ids)).float().reshape(1, -1).clone())
        parts.append(target.verify([Step(ids[0], tree_of(TREE_ROWS))])[0].float().clone())
    return parts


def logits_part(packed: Target, eager: Target, prompts: list[list[int]]) -> dict[str, Any]:
    """The distances of packed from eager logits."""
    ours, theirs = (torch.cat(logits_of(target, prompts)) for target in (packed, eager))
    larger = torch.maximum(ours.abs(), theirs.abs()).clamp_min(torch.finfo(torch.float32).tiny)
    place = torch.exp2(larger.log2().floor() - (SIGNIFICANT_BITS - 1))
    steps = (ours - theirs).abs() / place
    result = {
        "prompts": len(prompts),
        "rows": len(ours),
        "equal_share": float((steps == 0).double().mean()),
        "within_one_step_share": float((steps <= 1).double().mean()),
        "most_steps": float(steps.max()),
        "largest_difference": float((ours - theirs).abs().max()),
        "equal_greedy_tokens": int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
    }
    print(f"bfloat16 logits: {result}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--passages", type=int, default=20)
    options = parser.parse_args()
    int8, exact = (
        TreeDecoder.from_pretrained(DEMO_NAME, dtype=dtype, quantization="int8", policy="plain")
        for dtype in ("bfloat16", "float32")
    )
    each = -(-options.prompts // len(SETS))
    texts = [prompt["prompt"] for name in SETS for prompt in read_prompts(name, each)]
    prompts = [int8.encode(text, chat=True) for text in texts[: options.prompts]]
    passages = [
        np.array(int8.encode(text["prompt"])[:MOST_TOKENS])
        for text in read_prompts("wikitext2", options.passages)
    ]
    packed, eager = (
        make_target(load_model(DEMO_NAME, dtype=torch.bfloat16, device=CPU), runtime=runtime)
        for runtime in ("packed", "eager")
    )
    result = {
        "environment": environment("cpu"),
        "target": DEMO_NAME,
        "logits": logits_part(packed, eager, prompts),
        "perplexity": {
            "passages": len(passages),
            "bfloat16": perplexity(packed, passages),
            "int8": perplexity(int8.target, passages),
        },
        "texts": {
            "int8, bfloat16": texts_part(int8, POLICIES, prompts, options.new_tokens),
            "int8, float32": texts_part(exact, POLICIES, prompts, options.new_tokens),
            "bfloat16": texts_part(
                TreeDecoder(packed, policy="plain"), POLICIES[:2], prompts, options.new_tokens
            ),
        },
    }
    print(result["perplexity"])
    store("packed_texts", result)
    wrong = [
        (policy, one)
        for policy, texts in result["texts"]["int8, float32"]["policies"].items()
        for one in texts["differences"]
        if one["gap"] >= NEAR_TIE
    ]
    if wrong:
        raise SystemExit(f"int8 texts differ from their plain ones: {wrong}")


if __name__ == "__main__":
    main()
