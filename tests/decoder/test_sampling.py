"""Picking a token: against transformers' own warpers, and by frequency."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from costmodel.errors import InputError
from decoder.acceptance.sampling import Picker, Sampling, target_distribution


def transformers_distribution(logits, sampling):
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None].float())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
def test_same_distribution_as_transformers(temperature, top_p, top_k):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3)) * 3
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    ours = target_distribution(logits, sampling)
    torch.testing.assert_close(ours, transformers_distribution(logits, sampling))


def test_zero_temperature_is_the_argmax():
    pick = Picker(Sampling(), torch.device("cpu"))
    assert pick(torch.tensor([0.1, 2.0, -1.0])) == 1


def test_draws_follow_the_distribution():
    pick = Picker(Sampling(temperature=1.0, seed=5), torch.device("cpu"))
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    counts = torch.bincount(torch.tensor([pick(logits) for _ in range(4000)]), minlength=3)
    expected = torch.tensor([0.5, 0.3, 0.2]) * 4000
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 13.8  # 0.999 quantile at 2 degrees of freedom


def test_same_seed_same_draws():
    logits = torch.zeros(50)
    first = Picker(Sampling(temperature=1.0, seed=9), torch.device("cpu"))
    second = Picker(Sampling(temperature=1.0, seed=9), torch.device("cpu"))
    assert [first(logits) for _ in range(20)] == [second(logits) for _ in range(20)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.1}, "top-p"),
        ({"top_k": -1}, "top-k"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        Sampling(**options)
