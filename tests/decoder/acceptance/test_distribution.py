"""At T > 0 the output's distribution is the target's: chi-square over whole outputs.

The first three tokens of 2,500 texts are compared with the exact probabilities of all V^3
continuations, computed by enumeration, for every acceptance rule. A wrong rule (keep the
best-scored of several draws) must be caught by fewer texts.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.acceptance.drawn import draw_from_lattice, sibling_ranks
from decoder.acceptance.sampling import Sampling, target_distribution
from decoder.engine import TreeDecoder
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from lab.tiny_models import tiny_model
from tests.decoder.enumeration import chi_square_p
from tests.decoder.models import WholeDrafter, decoder_of, plain_logits

pytestmark = pytest.mark.slow  # some seconds a test

VOCAB = 5
LENGTH = 3
SAMPLES = 2500
BATCH = 250
PROMPT = [1, 3, 0]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    return model


def exact_probabilities(model, sampling):
    """[V, V, V] probability of every continuation, one forward each, no cache."""
    exact = np.zeros((VOCAB,) * LENGTH)
    for path in itertools.product(range(VOCAB), repeat=LENGTH):
        logits = plain_logits(model, PROMPT + list(path[:-1]))
        chance = 1.0
        for step, token in enumerate(path):
            row = target_distribution(logits[len(PROMPT) - 1 + step], sampling)
            chance *= float(row[token])
        exact[path] = chance
    assert abs(exact.sum() - 1.0) < 1e-5
    return exact


def observed_counts(decoder: TreeDecoder, samples: int, **sampling):
    """How often each text came, with a seed of its own each; decoded in batches, for speed.

    One token more than is counted is asked for, so that the first trees may be 2 deep.
    """
    counts = np.zeros((VOCAB,) * LENGTH)
    for seed in range(0, samples, BATCH):
        results = decoder.generate_batch(
            [PROMPT] * BATCH, max_new_tokens=LENGTH + 1, seed=seed, **sampling
        )
        for result in results:
            counts[tuple(result.token_ids[:LENGTH])] += 1
    return counts


def drawing_decoder(model, policy, rule):
    drafter = WholeDrafter(VOCAB, depth=2, width=4)
    return decoder_of(model, policy, drafter, acceptance=rule)


def p_value(counts, exact):
    return chi_square_p(counts, exact * counts.sum())


HOT, COOL = {"temperature": 1.3}, {"temperature": 0.7, "top_p": 0.9, "top_k": 4}


@pytest.mark.parametrize(("rule", "policy", "sampling"), [
    ("recursive", "fixed:6", HOT),
    ("recursive", "chain", COOL),
    ("traversal", "fixed:6", COOL),
    ("traversal", "chain", HOT),
    ("auto", "fixed:6", HOT),  # by traversal, once its entropy is known
    (None, "fixed:6", HOT),  # the policy's: a walk, scored by q at temperature 1
    (None, "chain", COOL),
])  # fmt: skip
def test_sampled_trees_follow_the_target(model, policy, rule, sampling):
    exact = exact_probabilities(model, Sampling(**sampling))
    assert (exact.min() == 0.0) == ("top_p" in sampling)  # which leaves some out
    decoder = drawing_decoder(model, policy, rule)
    assert p_value(observed_counts(decoder, SAMPLES, **sampling), exact) > 0.001


def test_models_with_states_keep_their_distribution():
    """Whose states go back to the accepted rows; other mechanisms are judged by their logits."""
    model = tiny_model("qwen3_5_text").float()
    model.resize_token_embeddings(VOCAB)
    target = make_target(borrow_model(model), owned=False)
    drafter = WholeDrafter(VOCAB, depth=2, width=4)
    decoder = TreeDecoder(target, policy="fixed:6", drafter=drafter, acceptance="recursive")
    exact = exact_probabilities(model, Sampling(**HOT))
    assert p_value(observed_counts(decoder, SAMPLES // 2, **HOT), exact) > 0.001


def test_the_best_of_all_draws_is_caught(model, monkeypatch):
    def best_of_all(shape, whole, generator):
        tree = draw_from_lattice(shape, whole, generator)
        order = np.argsort(-whole.numpy(), axis=1, kind="stable")
        ranked = order[tree.depths - 1, sibling_ranks(tree.parents)]
        return replace(tree, tokens=ranked.astype(np.int64))

    monkeypatch.setattr("decoder.acceptance.rules.draw_from_lattice", best_of_all)
    decoder = drawing_decoder(model, "fixed:2", "recursive")
    exact = exact_probabilities(model, Sampling(**HOT))
    assert p_value(observed_counts(decoder, 1000, **HOT), exact) < 1e-6
