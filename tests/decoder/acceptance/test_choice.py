"""Which rule is used when."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.acceptance.drawn import draw_from_lattice
from decoder.acceptance.rules import ENTROPY_THRESHOLD, AcceptanceRule
from decoder.acceptance.sampling import Sampling
from decoder.drafters.ngram import NgramDrafter
from decoder.model.runtime.eager import NO_TOKEN
from decoder.policies.base import Policy
from decoder.tree.draft_tree import EMPTY, best_first
from tests.decoder.models import WholeDrafter, decoder_of, random_model, random_tree

CPU = torch.device("cpu")
LACKING = "{} acceptance needs .* ngram drafter has none"


@pytest.mark.parametrize(("name", "message"), [
    ("recursive", LACKING.format("recursive")), ("traversal", LACKING.format("traversal")),
    ("argmax", "'argmax' is not an acceptance rule"),
])  # fmt: skip
def test_rules_that_are_unknown_or_need_another_drafter(name, message):
    with pytest.raises(InputError, match=message):
        decoder_of(random_model("llama-gqa"), "fixed:4", NgramDrafter(), acceptance=name)


@pytest.mark.parametrize(("policy", "rule", "temperature"), [
    ("fixed:4", "walk", 1.0), ("chain", "walk", 0.7), ("static-tree:2x2", "walk", 0.7),
    ("dynatree", "walk", 0.7), ("package", "auto", 0.7),
])  # fmt: skip
def test_the_papers_policies_walk_and_ddtree_does_not_temper(policy, rule, temperature):
    """Whoever asks for another rule gets it, with trees drawn from the tempered q."""
    seen = []

    class Noted(WholeDrafter):
        def draft(self, context, request):
            seen.append((request.whole, request.temperature))
            return super().draft(context, request)

    model, drafter = random_model("llama-gqa"), Noted(97, depth=3, width=3)
    given = TopTwo() if policy == "package" else policy
    decoder = decoder_of(model, given, drafter)
    assert decoder.parts.acceptance == rule
    decoder.generate([1, 2, 3], max_new_tokens=6, temperature=0.7)
    assert set(seen) == {(rule == "auto", temperature)}
    seen.clear()
    decoder = decoder_of(model, given, drafter, acceptance="traversal")
    decoder.generate([1, 2, 3], max_new_tokens=6, temperature=0.7)
    assert set(seen) == {(True, 0.7)}


class TopTwo(Policy):
    name, max_nodes = "top-two", 2

    def choose(self, candidates, context, limits):
        return best_first(candidates, 2)


def test_auto_follows_the_entropy_of_past_rounds():
    """Of rows that are uniform over some tokens."""
    rule = AcceptanceRule("auto", Sampling(temperature=1.0), CPU)
    assert rule.name == "walk"  # nothing is known yet
    assert np.log(2) > ENTROPY_THRESHOLD
    for tokens, rounds, name in ((20, 1, "traversal"), (1, 400, "walk"), (2, 400, "traversal")):
        logits = torch.full((1, 1000), float("-inf"))
        logits[:, :tokens] = 0.0
        for _ in range(rounds):
            rule.accept(EMPTY, logits)
        assert rule.name == name


@pytest.mark.parametrize("name", ["recursive", "traversal", "auto"])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.8}])
def test_an_accelerator_accepts_what_visited_rows_would(name, cut, monkeypatch):
    """From one copy of all rows' numbers: no tensor is asked after it."""
    monkeypatch.setattr("decoder.acceptance.sampling.CANDIDATES", 60)
    rules = [AcceptanceRule(name, Sampling(temperature=0.8, seed=4, **cut), CPU) for _ in range(2)]
    for rule in rules:
        rule.choices._coins = torch.Generator().manual_seed(4)  # the host's, beside a device's own
    drafts, told = torch.Generator().manual_seed(9), 0
    for seed in range(40):
        logits = 2.0 * torch.randn(16, 97, generator=drafts)
        whole = (logits[1:] + torch.randn(15, 97, generator=drafts)).softmax(-1)
        tree = draw_from_lattice(random_tree(16, seed), whole, drafts)
        ahead = rules[1].ahead(tree, logits).numpy()
        alone = bool((ahead[2] == NO_TOKEN).any())  # where a row may keep more than 60 tokens
        if alone:
            rules[0].choices.uniform()  # the other one drew for nothing
        blind = replace(tree, q=tree.q if alone else tree.q.to("meta"))
        outcomes = [
            rules[0].accept(tree, logits), rules[1].accept(blind, logits if alone else None, ahead),
        ]  # fmt: skip
        assert outcomes[0] == outcomes[1]
        assert rules[0].name == rules[1].name
        told += not alone
    assert told >= 30
    for kind in ("_trials", "_accepted", "_confidence"):
        first, second = (getattr(rule.expectation, kind) for rule in rules)
        np.testing.assert_allclose(first, second, rtol=1e-6)


def test_the_threshold_is_where_the_stored_simulation_crosses():
    stored = Path(__file__).parents[3] / "lab" / "studies" / "results" / "acceptance_rules.json"
    crossings = [case["traversal_nats"] for case in json.loads(stored.read_text())["crossings"]]
    assert min(crossings) <= ENTROPY_THRESHOLD <= max(crossings)
