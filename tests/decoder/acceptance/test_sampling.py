"""Picking a token: against transformers' own warpers, and by frequency."""

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decoder.acceptance.rules import AcceptanceRule
from decoder.acceptance.sampling import BY_ITSELF, Sampling, SeededChoices, target_distribution
from decoder.model.runtime.eager import NO_TOKEN, greedy_tokens


def transformers_distribution(logits, sampling):
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None].float())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
def test_same_distribution_as_transformers(temperature, top_p, top_k):
    generator = torch.Generator().manual_seed(3)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    for logits in 3.0 * torch.randn(9, 300, generator=generator):
        ours = target_distribution(logits, sampling)
        torch.testing.assert_close(ours, transformers_distribution(logits, sampling))


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}, {"top_k": 290}])
def test_draws_are_those_of_multinomial(cut, monkeypatch):
    """The same generator, asked once, without the questions that multinomial asks the device."""
    monkeypatch.setattr("decoder.acceptance.sampling.CANDIDATES", 30)
    sampling = Sampling(temperature=0.8, seed=3, **cut)
    pick, whole = (SeededChoices(sampling, torch.device("cpu")) for _ in range(2))
    generator, itself = torch.Generator().manual_seed(3), 0
    for seed in range(50):
        logits = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * 2.0
        if "top_k" in cut:
            logits = (2 * logits).round() / 2  # with ties, so that more are kept
        expected = torch.multinomial(target_distribution(logits, sampling), 1, generator=generator)
        assert pick(logits) == int(expected)
        drawn = whole.of_tree(np.zeros(1, np.int64), logits[None])
        itself += int(drawn[0, 0]) == BY_ITSELF
        assert whole.visit(drawn.numpy(), 0, logits[None]) == int(expected)
    assert 0 < itself < 50


NOT_NUMBERS = [[1.0, torch.nan, 2.0], [torch.nan] * 3, [0.0, torch.inf, 1.0], [-torch.inf] * 3]


@pytest.mark.parametrize("values", NOT_NUMBERS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_logits_that_are_no_numbers_have_no_token(values, options):
    rule = AcceptanceRule("walk", Sampling(**options), torch.device("cpu"))
    assert rule.pick(torch.tensor(values)) == NO_TOKEN
    if options:
        drawn = rule.choices.of_tree(np.array([0, 1]), torch.tensor([[1.0, 3.0, 2.0], values]))
        assert drawn[0, 0] >= 0 and drawn[0, 1] == NO_TOKEN
    assert greedy_tokens(torch.tensor([values, [1.0, 3.0, 2.0]])).tolist() == [NO_TOKEN, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_greedy_choices_are_torchs_in_ties_too(dtype):
    pick = AcceptanceRule("walk", Sampling(), torch.device("cpu")).pick
    rows = torch.randint(0, 5, (50, 97), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert [pick(row) for row in rows] == rows.argmax(-1).tolist()


@pytest.mark.parametrize("weights", [[torch.nan, 1.0], [torch.inf, 1.0], [torch.nan] * 2])
def test_weights_that_are_no_numbers_have_no_token(weights):
    pick = SeededChoices(Sampling(temperature=1.0), torch.device("cpu"))
    assert pick.one_of(torch.tensor(weights, dtype=torch.float64)) == NO_TOKEN
