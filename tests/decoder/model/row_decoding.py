"""Draft trees of given shapes, and transformers' decoding of each row's path, one by one."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from decoder.tree.draft_tree import DraftTree, visibility
from tests.decoder.models import SIZES, shaped


def tree_of(shape: str, nodes: int, random: np.random.Generator) -> DraftTree:
    """A draft tree; each node of the chain in a comb has a sibling."""
    rows = np.arange(nodes)
    parents = {
        "chain": rows,
        "star": 0 * rows,
        "comb": np.maximum(rows - rows % 2 - 1, 0),
        "random": np.array([random.integers(max(0, row - 3), row + 1) for row in rows], dtype=int),
    }[shape]
    return shaped(parents, random.integers(1, SIZES["vocab_size"], nodes), np.full(nodes, 0.5))


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
