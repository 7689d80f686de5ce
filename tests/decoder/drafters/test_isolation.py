"""Drafters that break: the text is the target's own, and the fault is told once, by name."""

import logging

import numpy as np
import pytest
import torch

from costmodel.errors import DrafterError
from decoder.drafters.ensemble import EnsembleDrafter
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.tree.draft_tree import Candidates, CandidateTree, Lattice, chain
from lab.drafters.conditional import PairLattice
from tests.decoder.models import LatticeDrafter, WholeDrafter, greedy, random_model, target_of

PROMPT, VOCAB, TOKENS = [5, 17, 3, 88, 5, 17], 97, 16


def lattice(tokens, chances):
    """A lattice whose arrays were not looked at when it was made."""
    made = Lattice(np.zeros((1, 1), np.int64), np.ones((1, 1)))
    object.__setattr__(made, "tokens", tokens)
    object.__setattr__(made, "probabilities", chances)
    return made


def tree(parents, tokens=(1, 2, 3)):
    return CandidateTree(np.array(tokens), np.array(parents), np.full(len(tokens), 0.5))


DRAFTS = {
    "none": None,
    "other shapes": lattice(np.zeros((3, 2), np.int64), np.ones((3, 1))),
    "fractions": lattice(np.full((3, 2), 1.5), np.ones((3, 2))),
    "texts": lattice(np.full((3, 2), "a"), np.ones((3, 2))),
    "a parent behind": tree([0, 3, 1]),
    "too few parents": tree([0, 1]),
    "no rows": tree([[0], [1], [2]]),
    "edges of other shapes": PairLattice(np.ones((3, 2), np.int64), np.ones(2), np.ones((2, 2, 3))),
}


class Fails(LatticeDrafter):
    """Gives a draft, or raises in one of its methods from its third round on."""

    name = "fails"

    def __init__(self, where, draft=None):
        super().__init__(VOCAB)
        self.where, self._bad, self.rounds = where, draft, 0

    def start(self, prompt, features, logits=None):
        self._fail("start", 0)
        return super().start(prompt, features, logits)

    def draft(self, context, request):
        self._fail("draft")
        if self.where == "gives" and self.rounds > 2:
            return self._bad
        return super().draft(context, request)

    def observe(self, emitted, features):
        self.rounds += 1
        self._fail("observe")

    def read_logits(self, logits):
        self._fail("read_logits")

    def _fail(self, where, least=3):
        if self.where == where and self.rounds >= least:
            raise RuntimeError(f"broken {where}\nand more")


@pytest.fixture(scope="module")
def model():
    return random_model("llama-gqa")


@pytest.fixture(scope="module")
def truth(model):
    return greedy(model, PROMPT, TOKENS)


def check(model, truth, drafter, caplog, reason):
    decoder = TreeDecoder(target_of(model), drafter=drafter, policy="fixed:6")
    with caplog.at_level(logging.WARNING, logger="decoder.drafters.isolation"):
        results = [decoder.generate(PROMPT, max_new_tokens=TOKENS) for _ in range(2)]
    for result in results:
        assert result.token_ids == truth
        assert result.stats.finish == "length"
        (warning,) = result.stats.warnings
        assert "the drafter fails fails in" in warning and reason in warning
        assert "goes on without drafts" in warning
    assert len(caplog.records) == 1
    return results


@pytest.mark.parametrize("where", ["start", "draft", "observe", "read_logits"])
def test_one_that_raises(model, truth, caplog, where):
    first, _ = check(model, truth, Fails(where), caplog, f"{where}: RuntimeError: broken {where}")
    assert (first.stats.drafted_rounds > 0) == (where != "start")


@pytest.mark.parametrize("draft", DRAFTS)
def test_one_that_gives_something_else(model, truth, caplog, draft):
    check(model, truth, Fails("gives", DRAFTS[draft]), caplog, "draft: ")


class Line(Candidates):
    """A kind that the core has never seen: the tokens that come next, for sure."""

    def __init__(self, tokens):
        self.tokens = np.array(tokens, dtype=np.int64)

    def checked(self):
        return self

    def sound(self, vocab=None):
        return self

    def best_first(self, nodes, depth_factors=None):
        return chain(self, nodes)

    def greedy(self, depth):
        return self.tokens[:depth], np.ones(len(self.tokens[:depth]))


@pytest.mark.parametrize("policy", ["chain", "fixed:4"])
@pytest.mark.parametrize("joined", [False, True])
def test_a_kind_of_candidates_of_ones_own(model, truth, policy, joined):
    class Knows(LatticeDrafter):
        def draft(self, context, request):
            return Line(truth[len(context) - len(PROMPT) :][: request.depth])

    drafter = EnsembleDrafter(NgramDrafter(), Knows(VOCAB)) if joined else Knows(VOCAB)
    decoder = TreeDecoder(target_of(model), drafter=drafter, policy=policy)
    result = decoder.generate(PROMPT, max_new_tokens=TOKENS)
    assert result.token_ids == truth and result.stats.warnings == []
    assert result.stats.accepted_tokens >= TOKENS // 2


class Writes(LatticeDrafter):
    name = "fails"

    def draft(self, context, request):
        context[:] = 7
        return super().draft(context, request)


class WritesAtTheStart(Writes):
    def start(self, prompt, features, logits=None):
        prompt[0] = 7
        return super().start(prompt, features, logits)


@pytest.mark.parametrize("kind", [Writes, WritesAtTheStart])
def test_one_that_writes_into_the_text(model, truth, caplog, kind):
    check(model, truth, kind(VOCAB), caplog, "read-only")


@pytest.mark.parametrize("whole", [None, torch.zeros(1, 5), torch.zeros(4, 98), "a"])
def test_sampled_trees_without_a_whole_distribution(model, whole):
    class NotWhole(WholeDrafter):
        name = "fails"

        def draft(self, context, request):
            drafted = super().draft(context, request)
            return Lattice(drafted.tokens, drafted.probabilities, whole)

    rule = {"policy": "fixed:6", "acceptance": "recursive"}
    decoder = TreeDecoder(target_of(model), drafter=NotWhole(VOCAB), **rule)
    result = decoder.generate(PROMPT, max_new_tokens=TOKENS, temperature=1.0, seed=4)
    assert len(result.token_ids) == TOKENS
    assert "whole must be a tensor" in result.stats.warnings[0]


@pytest.mark.parametrize(("field", "value"), [
    ("max_depth", "8"), ("max_depth", -1), ("feature_layers", 3), ("draws", "often"), ("name", ""),
    ("name", None),
])  # fmt: skip
def test_attributes_that_are_none(model, field, value):
    drafter = LatticeDrafter(VOCAB)
    setattr(drafter, field, value)
    with pytest.raises(DrafterError, match=f"not usable: its {field} is"):
        TreeDecoder(target_of(model), drafter=drafter, policy="fixed:4")


def test_one_that_fails_where_its_draft_is_timed(model, tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    monkeypatch.setattr("decoder.profiling.probe.BUDGET_S", 0.0)
    for drafter in (Fails("start"), Writes(VOCAB)):
        with pytest.raises(DrafterError, match="the drafter fails fails where its draft is timed"):
            TreeDecoder(target_of(model), drafter=drafter, policy="bastion")
