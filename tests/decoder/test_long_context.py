"""Texts of thousands of tokens: decoded exactly, in memory that grows as the cache does."""

from functools import cache

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decoder.drafters.ngram import NgramDrafter
from decoder.model.target import PREFILL_CHUNK, Step
from decoder.tree.draft_tree import best_first
from tests.decoder import models
from tests.decoder.models import LatticeDrafter, OracleDrafter, decoder_of, random_model, request

TOKENS, NEW = 6000, 12
SIZES = {"max_position_embeddings": 8192}


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest new storage that any operation makes; views make none."""

    def __init__(self):
        super().__init__()
        self.bytes, self.shape, self.where = 0, (), ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in flat((args, kwargs)) if t.numel()}
        output = func(*args, **(kwargs or {}))
        for made in flat(output):
            storage = made.untyped_storage()
            if storage.data_ptr() not in known and storage.nbytes() > self.bytes:
                self.bytes, self.shape, self.where = storage.nbytes(), made.shape, str(func)
        return output


def flat(value):
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_mkldnn else [value]  # packed weights have no storage to look at
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in flat(part)] if isinstance(value, (list, tuple)) else []


@cache
def long_text():
    """Random tokens that repeat themselves now and then, as text does."""
    random = np.random.default_rng(3)
    parts = [random.integers(0, 97, 40) for _ in range(60)]
    text = np.concatenate([parts[i] for i in random.integers(0, len(parts), 200)])
    return [int(token) for token in text[:TOKENS]]


@pytest.mark.parametrize("family", ["qwen3", "gpt-neox"])
def test_a_prompt_of_2500_tokens_is_decoded_exactly(family):
    model, prompt = random_model(family, **SIZES), long_text()[:2500]
    with models.by_transformers(model, "sdpa"):
        truth = models.generated(model, prompt, NEW)
    for drafter in (NgramDrafter(), OracleDrafter(prompt + truth, 97, rank=1)):
        result = decoder_of(model, "fixed:24", drafter).generate(prompt, max_new_tokens=NEW)
        assert result.token_ids == truth
    assert result.stats.accepted_tokens >= 6


class TestMemory:
    """Sizes are of a model whose cache is small beside a mask of all rows over all keys."""

    NODES = 255

    def target(self, tokens):
        target = models.target_of(random_model("llama-gqa", dtype=torch.float32, **SIZES))
        target.reserve(tokens + 2 * (self.NODES + 1))
        prompt = torch.tensor(long_text()[:tokens])
        return target, prompt

    def step(self):
        lattice = LatticeDrafter(97, depth=8, width=40).draft(np.array([5]), request(8))
        tree = best_first(lattice, self.NODES)
        assert tree.nodes == self.NODES
        return Step(5, tree)

    def test_a_verification_makes_nothing_of_rows_times_context(self):
        """Its largest new tensor is the same behind 400 and behind 6,000 tokens."""
        sizes = {}
        for tokens in (400, TOKENS):
            target, prompt = self.target(tokens)
            target.prefill(prompt)
            with LargestTensor() as largest:
                target.verify([self.step()])
                target.commit([0, 1, 3])
            sizes[tokens] = largest.bytes
            # One mask of every row over every key would be one byte each at the least.
            assert largest.bytes < (self.NODES + 1) * TOKENS, (largest.shape, largest.where)
        assert sizes[400] == sizes[TOKENS]

    def test_prefill_makes_nothing_of_context_squared(self):
        """Chunks bound it, whatever the context; the last chunk sees 6,000 keys."""
        sizes = {}
        for tokens in (2 * PREFILL_CHUNK, TOKENS):
            target, prompt = self.target(tokens)
            with LargestTensor() as largest:
                target.prefill(prompt)
            sizes[tokens] = largest.bytes
        # A table of rotary factors grows with the positions, by less than keys: six times as many.
        assert sizes[TOKENS] < 3 * sizes[2 * PREFILL_CHUNK]
