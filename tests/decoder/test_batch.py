"""Several ragged prompts in one call: each gives what it gives alone, with one node budget."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from decoder.policies.base import Limits, TreeRequest
from decoder.policies.bastion import Bastion, parse_policy
from decoder.tree.draft_tree import EMPTY, best_first
from tests.decoder.models import OracleDrafter, StairCost, decoder_of, greedy, random_model
from tests.decoder.policies.test_policies import lattice

POLICIES = ("plain", "fixed:9", "bastion", "chain")
random = np.random.default_rng(4)
EIGHT = [[int(t) for t in random.integers(0, 97, size)] for size in (3, 40, 1, 17, 8, 25, 2, 12)]
TOKENS = 26


def decoder_with(model, policy, drafter="ngram"):
    decoder = decoder_of(model, "plain", drafter)
    decoder.policy = parse_policy(policy, lambda fit=None: StairCost(), max_nodes=40)
    return decoder


@pytest.mark.parametrize("policy", POLICIES)
def test_eight_ragged_prompts_give_what_each_gives_alone(policy):
    model = random_model("qwen3")
    truths = [greedy(model, prompt, TOKENS) for prompt in EIGHT]
    texts = [[*p, *t] for p, t in zip(EIGHT, truths, strict=True)]
    drafter = OracleDrafter(texts, 97, rank=int(policy == "fixed:9"))
    results = decoder_with(model, policy, drafter).generate_batch(EIGHT, max_new_tokens=TOKENS)
    assert [result.token_ids for result in results] == truths
    rounds = {result.stats.rounds for result in results}
    assert (rounds == {TOKENS - 1}) == (policy == "plain")
    assert all(result.stats.accepted_tokens > 0 for result in results) == (policy != "plain")


@pytest.mark.parametrize("bad", [[], [5, 97], [1] * 500])
def test_the_prompt_that_is_wrong_is_named(bad):
    decoder = decoder_with(random_model("llama-gqa"), "fixed:9")
    with pytest.raises(InputError, match="prompt 3 of 4: "):
        decoder.generate_batch([[1], [2, 3], bad, [4]], max_new_tokens=20)
    assert len(decoder.generate_batch([[1], [2, 3]], max_new_tokens=5)) == 2


class CountingCost(StairCost):
    """Stairs of the rows of the whole forward; checks what it is asked."""

    def __init__(self, step_s, every):
        self.step_s, self.every = step_s, every

    def cycle_s(self, nodes, context, batch=1):
        rows = batch * (np.asarray(nodes, dtype=np.float64) + 1)
        assert np.allclose(rows, np.round(rows))
        return 1.0 + self.step_s * np.floor(np.round(rows) / self.every) + 0.01 * rows + 0.05


requests = st.lists(
    st.builds(
        lattice, first=st.floats(0.05, 0.6), fading=st.floats(0.4, 1.0), depth=st.integers(1, 3),
        width=st.integers(1, 3),
    ),
    min_size=2,
    max_size=3,
)  # fmt: skip


@settings(max_examples=60)
@given(
    lattices=requests, most=st.integers(1, 6), step_s=st.floats(0.0, 0.8), every=st.integers(1, 9)
)
def test_one_budget_for_the_batch_is_the_best_of_all_splits(lattices, most, step_s, every):
    cost = CountingCost(step_s, every)
    given = [TreeRequest(one, 100 + i, Limits(most, 8)) for i, one in enumerate(lattices)]
    trees = Bastion(cost, most).choose_together(given)
    batch = len(lattices)
    context = float(np.mean([100 + i for i in range(batch)]))

    def speed(chosen):
        """Tokens a second of a round: every text commits its bonus and what is accepted."""
        committed = sum(1.0 + tree.scores.sum() for tree in chosen)
        nodes = sum(tree.nodes for tree in chosen) / batch
        return committed / float(cost.cycle_s(np.array([nodes]), context, batch)[0] - 0.05)

    sizes = range(1, most + 1)
    choices = [[EMPTY, *(best_first(one, n) for n in sizes)] for one in lattices]
    best = max(speed(split) for split in product(*choices))
    assert speed(trees) == pytest.approx(best, rel=1e-12)
    assert all(tree.nodes <= most for tree in trees)
