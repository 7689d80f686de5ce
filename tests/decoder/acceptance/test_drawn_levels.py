"""Trees drawn level by level from the autoregressive drafter."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from decoder.acceptance.nodes import VisitedRows
from decoder.acceptance.rules import recursive_rejection, traversal
from decoder.acceptance.sampling import Sampling, SeededChoices
from decoder.drafters.causal_lm import CausalLMDrafter
from tests.decoder import models
from tests.decoder.enumeration import chi_square_p
from tests.decoder.models import decoder_of, paths_of, plain_logits, random_model

PROMPT = [5, 17, 3, 88, 5, 17, 3, 41]


def shape(*parents):
    """A topology whose tokens are all wrong."""
    return models.shaped(parents, [96] * len(parents), np.linspace(0.9, 0.1, len(parents)))


CHAIN = shape(0, 1, 2, 3)
BUSHY = shape(0, 1, 0, 2, 1, 3, 0, 4, 4)  # not in level order, as best-first trees are not


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def session_of(model, prompt, **options):
    return CausalLMDrafter(models.target_of(model), **options).start(np.array(prompt), None)


@pytest.mark.parametrize("topology", [CHAIN, BUSHY, shape(0), shape(0, 0, 0)])
def test_children_are_drawn_from_the_plain_models_distribution(topology):
    model = random_model("gpt-neox", scale=2.0)
    session, text = session_of(model, PROMPT), [*PROMPT, 9]
    for seed in range(3):
        tree = session.draw(np.array(text), topology, 0.7, seeded(seed))
        np.testing.assert_array_equal(tree.parents, topology.parents)
        np.testing.assert_array_equal(tree.depths, topology.depths)
        np.testing.assert_array_equal(tree.scores, topology.scores)
        assert tree.q.dtype == torch.float32
        for row, path in enumerate(paths_of(tree)):
            below = np.array(tree.child_rows()[row], dtype=np.int64)
            if len(below) == 0:
                assert tree.sources[row] == -1
                continue
            assert len(set(tree.tokens[below - 1])) == len(below), "without replacement"
            logits = plain_logits(model, [*text, *path])[-1]
            q, expected = tree.q[tree.sources[row]], (logits / 0.7).softmax(-1).float()
            torch.testing.assert_close(q, expected, rtol=1e-5, atol=0)
    again = session.draw(np.array(text), topology, 0.7, seeded(2))
    np.testing.assert_array_equal(again.tokens, tree.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [recursive_rejection, traversal])
def test_two_tokens_of_speculative_sampling_have_the_targets_distribution(rule):
    """Drawn, verified and continued by plain draws to two tokens, against p(a) p(b | a)."""
    small, large = (random_model("llama-gqa", vocab_size=5, scale=8.0, seed=s) for s in (1, 2))
    text = [0, 3, 1]

    def p(ids):
        return plain_logits(large, ids)[-1].softmax(-1)

    pairs = itertools.product(range(5), repeat=2)
    expected = {(a, b): float(p(text)[a] * p([*text, a])[b]) for a, b in pairs}
    session, generator = session_of(small, text[:-1]), seeded(5)
    choices = SeededChoices(Sampling(temperature=1.0, seed=6), torch.device("cpu"))
    paths = [path for n in range(3) for path in itertools.product(range(5), repeat=n)]
    known = {path: plain_logits(large, [*text, *path])[-1] for path in paths}
    counts, rounds = Counter(), 800
    for _ in range(rounds):
        tree = session.draw(np.array(text), shape(0, 0, 1), 1.0, generator)
        logits = torch.stack([known[path] for path in paths_of(tree)])
        rows = VisitedRows(tree, logits, choices, whole_paths=rule is traversal)
        outcome = rule(tree, rows, choices)
        emitted = (*outcome.tokens, outcome.bonus)[:2]
        if len(emitted) == 1:
            emitted = (*emitted, choices(known[emitted]))
        counts[emitted] += 1
    assert set(counts) <= set(expected)
    observed = [counts[outcome] for outcome in expected]
    assert chi_square_p(observed, np.array(list(expected.values())) * rounds) > 1e-3


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
@pytest.mark.parametrize("policy", ["chain", "fixed:6"])
def test_a_seed_gives_the_same_sampled_text_again(rule, policy):
    model = random_model("llama-gqa", scale=2.0)
    drafter = CausalLMDrafter(models.target_of(random_model("llama-gqa", scale=2.0)))  # a twin
    options = {"max_new_tokens": 25, "temperature": 0.8, "seed": 3}
    decoders = [decoder_of(model, policy, drafter, acceptance=rule) for _ in range(2)]
    results = [decoder.generate(PROMPT, **options) for decoder in decoders]
    assert results[0].token_ids == results[1].token_ids
    assert len(results[0].token_ids) == 25
    assert results[0].stats.accepted_tokens > 0
