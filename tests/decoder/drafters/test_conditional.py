"""Pairs and levels of conditional scores against sums over the vocabulary, path by path."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decoder.drafters.conditional import Slots, grow_levels, level_tree

ROWS, VOCAB, K, WIDTH = 4, 23, 6, 3
HEAD = SimpleNamespace(ids_on_device=lambda places: places + 100)


def slots_of(seed, temperature, count=K):
    logits = 2.0 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))
    return logits, Slots.of(logits, count, torch.tensor([temperature]), HEAD)


def chances(logits, candidates, added, temperature):
    """Probabilities of the candidates: their share of the whole softmax, divided by the sum."""
    scores = [math.exp(float(logits[c]) / temperature) for c in candidates]
    share = sum(scores) / sum(math.exp(float(x) / temperature) for x in logits)
    moved = [
        math.exp((float(logits[c]) + a) / temperature)
        for c, a in zip(candidates, added, strict=True)
    ]
    return [share * one / sum(moved) for one in moved]


@pytest.mark.parametrize("frontier", [1, WIDTH, 50])
def test_levels(frontier):
    """The state is a sum over the path; every level's nodes are the best children there are."""
    logits, slots = slots_of(2, 1.0)
    places, table = slots.places.tolist(), torch.randn(ROWS, 200, K)

    def step(row, states, tokens):
        states = states + tokens[:, None]
        return states, table[row][states[:, 0] % 200]

    packed = grow_levels(
        slots, step, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([7]), frontier
    )
    tree = level_tree(packed, ROWS)
    level, at = [((), 0.0, 0)], 0  # tokens, logarithm of the score, row
    for row in range(ROWS):
        children, best = [], None
        for tokens, score, above in level:
            added = table[row][(7 + sum(tokens)) % 200].tolist()
            q = chances(logits[row], places[row], added, 1.0)
            made = [
                ((*tokens, p + 100), score + math.log(x), above, x)
                for p, x in zip(places[row], q, strict=True)
            ]
            best = best or max(made, key=lambda child: child[3])
            children += made
        children.sort(key=lambda child: (child is not best, -child[1]))
        nodes = slice(at, at + K)
        assert tree.tokens[nodes].tolist() == [child[0][-1] for child in children[:K]]
        assert tree.parents[nodes].tolist() == [child[2] for child in children[:K]]
        np.testing.assert_allclose(
            tree.probabilities[nodes], [child[3] for child in children[:K]], rtol=1e-4
        )
        level = [
            (t, score, at + 1 + i) for i, (t, score, _, _) in enumerate(children[:frontier][:K])
        ]
        at += K
    assert at == len(tree.tokens)
