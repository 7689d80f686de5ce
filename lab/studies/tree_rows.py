"""Rows of random draft trees against transformers' decoding of each row's path, one by one.

Tiny models of each mechanism verify chains, stars, combs and random trees behind texts that pass
their windows and that are committed tree by tree.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache

from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.model.target import Step, Target
from decoder.tree.draft_tree import DraftTree, visibility
from lab.studies.common import environment, store
from lab.studies.families import VOCAB, tiny_model

MECHANISMS = {
    "gated delta rule": "qwen3_5_text",
    "delta rule of channels and latents": "kimi_linear",
    "convolutions": "lfm2",
    "mamba2 beside attention": "falcon_h1",
    "windows and sinks": "gpt_oss",
    "chunks": "llama4_text",
    "soft caps": "gemma2",
    "latents": "deepseek_v3",
    "an indexer's keys": "deepseek_v32",
}
SHAPES = ("chain", "star", "comb", "random")
GROUPS, TREES = 3, 8  # each prompt is followed by groups, one tree of each committed


def tree_of(shape: str, nodes: int, random: np.random.Generator) -> DraftTree:
    """A draft tree; each node of the chain in a comb has a sibling."""
    rows = np.arange(nodes)
    parents = {
        "chain": rows,
        "star": 0 * rows,
        "comb": np.maximum(rows - rows % 2 - 1, 0),
        "random": np.array([random.integers(max(0, row - 3), row + 1) for row in rows], dtype=int),
    }[shape]
    depths = visibility(parents).sum(1)[1:] - 1
    return DraftTree(random.integers(1, VOCAB, nodes), parents, depths, np.full(nodes, 0.5))


def paths_of(tree: DraftTree) -> list[list[int]]:
    """The rows from the root to each row."""
    return [np.flatnonzero(seen).tolist() for seen in visibility(tree.parents)]


@torch.inference_mode()
def read(model: Any, cache: DynamicCache, ids: Any) -> Any:
    """transformers' logits [batch, vocab] behind tokens [batch, rows] read into its cache."""
    ids = torch.as_tensor(ids)
    places = torch.arange(ids.shape[1]).expand(ids.shape) + cache.get_seq_length()
    return model(ids, position_ids=places, past_key_values=cache, use_cache=True).logits[:, -1]


def decoded(model: Any, prompt: Sequence[int], tails: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [tails, vocab] behind each tail, read token by token behind the prompt.

    A tail with which others begin is read as part of one of them.
    """
    ordered = sorted(map(list, tails))
    ends = [one for one, after in zip(ordered, [*ordered[1:], []], strict=True)
            if after[: len(one)] != one]  # fmt: skip
    cache, longest = DynamicCache(config=model.config), max(map(len, ends))
    read(model, cache, [prompt] * len(ends))
    padded = np.array([[*end, *[1] * (longest - len(end))] for end in ends])
    steps = [read(model, cache, padded[:, i : i + 1]) for i in range(longest)]
    return torch.stack([steps[len(tail) - 1][bisect_left(ends, list(tail))] for tail in tails])


def off(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The largest difference of each row, in spreads of its logits."""
    return (ours - theirs).abs().amax(-1) / theirs.std(-1)


def fuzz(kind: str, dtype: torch.dtype, prompts: int) -> dict[str, Any]:
    """The worst row of many trees, and the number of rows whose first token differs."""
    model, random = tiny_model(kind).to(dtype), np.random.default_rng(0)
    for name, weights in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weights)
    target, errors, differing = make_target(borrow_model(model), owned=False), [], 0
    for _ in range(prompts):
        prompt = random.integers(1, VOCAB, int(random.integers(20, 50))).tolist()
        target.reserve(128)
        target.prefill(torch.tensor(prompt))
        committed: list[int] = []
        for _ in range(GROUPS):
            ours, tails, path = _verified(target, random)
            theirs = decoded(model, prompt, [[*committed, *tail] for tail in tails])
            errors.append(off(ours, theirs))
            differing += int((ours.argmax(-1) != theirs.argmax(-1)).sum())
            target.commit(path)
            committed += tails[-1]
    every, trees = torch.cat(errors), prompts * GROUPS * TREES
    return {
        "kind": kind, "dtype": str(dtype)[6:], "trees": trees, "rows": len(every),
        "worst": float(every.max()), "median": float(every.median()), "other_argmaxes": differing,
    }  # fmt: skip


def _verified(
    target: Target, random: np.random.Generator
) -> tuple[torch.Tensor, list[list[int]], list[int]]:
    """The logits of a group's rows, the tokens of their paths, and the path to the last row."""
    logits, tails = [], []
    for number in range(TREES):
        target.commit([])  # drops the tree before
        shape = SHAPES[-1 if number == TREES - 1 else int(random.integers(len(SHAPES)))]
        tree, root = tree_of(shape, int(random.integers(1, 25)), random), number + 1
        logits.append(target.verify([Step(root, tree)])[0].clone())
        paths, tokens = paths_of(tree), tree.row_tokens(root)
        tails += [tokens[path].tolist() for path in paths]
    return torch.cat(logits), tails, paths[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=42, help="of each kind and dtype")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    trees = []
    for dtype in (torch.float64, torch.float32):
        for mechanism, kind in MECHANISMS.items():
            trees.append({"mechanism": mechanism} | fuzz(kind, dtype, arguments.prompts))
            print(trees[-1], flush=True)
    store("tree_rows", {"environment": environment(), "trees": trees})


if __name__ == "__main__":
    main()
