"""Which rule is used when."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.acceptance.rules import (
    ENTROPY_THRESHOLD,
    AcceptanceRule,
)
from decoder.acceptance.sampling import Sampling
from decoder.drafters.ngram import NgramDrafter
from decoder.tree.draft_tree import EMPTY
from tests.decoder.models import decoder_of, random_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["recursive", "traversal"])
def test_a_drafter_without_them_cannot_serve_the_sampled_rules(name):
    with pytest.raises(InputError, match=f"{name} acceptance needs .* ngram drafter has none"):
        decoder_of(random_model("llama-gqa"), "fixed:4", NgramDrafter(), acceptance=name)


def test_unknown_rules_are_refused():
    with pytest.raises(InputError, match="'argmax' is not an acceptance rule"):
        decoder_of(random_model("llama-gqa"), "fixed:4", acceptance="argmax")


def row(entropy):
    """Logits of a uniform distribution over exp(entropy) tokens."""
    logits = torch.full((1000,), float("-inf"))
    logits[: round(np.exp(entropy))] = 0.0
    return logits


def test_auto_follows_the_entropy_of_past_rounds():
    rule = AcceptanceRule("auto", Sampling(temperature=1.0), CPU)
    assert rule.name == "walk"  # nothing is known yet
    rule.accept(EMPTY, row(3.0)[None])
    assert rule.name == "traversal"
    for _ in range(400):
        rule.accept(EMPTY, row(0.0)[None])
    assert rule.name == "walk"
    for _ in range(400):
        rule.accept(EMPTY, row(np.log(2))[None])
    assert np.log(2) > ENTROPY_THRESHOLD
    assert rule.name == "traversal"


def test_the_threshold_is_where_the_stored_simulation_crosses():
    stored = Path(__file__).parents[3] / "lab" / "studies" / "results" / "acceptance_rules.json"
    crossings = [case["traversal_nats"] for case in json.loads(stored.read_text())["crossings"]]
    assert min(crossings) <= ENTROPY_THRESHOLD <= max(crossings)
