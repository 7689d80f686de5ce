"""The choice of draft lengths: against all choices, and against fixed lengths on drawn texts."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from integrations.draft_lengths.costs import StepCosts
from integrations.draft_lengths.policy import LEAST_GAIN, DraftPolicy, RunningSequence
from tests.integrations.made_engine_profile import DRAFTER, make_engine_profile

ALLOWED = (0, 1, 2, 3, 5, 8)


def policy_with(draft_s: float = 0.0002, shortens: bool = True, **options) -> DraftPolicy:
    costs = StepCosts(make_engine_profile(draft_s=draft_s, **options), DRAFTER)
    return DraftPolicy(costs, ALLOWED, shortens=shortens)


def teach(policy: DraftPolicy, name: str, rate: float, steps: int = 200) -> None:
    """Let a sequence's drafts be right at one rate at every position."""
    random = np.random.default_rng(ord(name))
    for _ in range(steps):
        draft = list(range(policy.longest))
        text = [token if random.random() < rate else -5 for token in draft]
        policy.acceptance.observe_text(name, draft, text)


@pytest.mark.parametrize("drafted", [(3, 3, 2), (0, 3, 1), (2, 0, 0)])
@pytest.mark.parametrize("rates", [(0.9, 0.5, 0.2), (0.6, 0.6, 0.6), (0.05, 0.05, 0.05)])
def test_verified_lengths_are_the_best_of_all(drafted, rates):
    policy = policy_with()
    names = ["a", "b", "c"]
    for name, rate in zip(names, rates, strict=True):
        teach(policy, name, rate)
    pairs = zip(names, drafted, strict=True)
    sequences = [RunningSequence(name=n, context=1000, draft=[0] * count) for n, count in pairs]
    chosen = policy.verified(sequences)
    survival = [policy.acceptance.survival(name) for name in names]
    seconds = policy.costs.verify_s(3, 1000, 3 * policy.longest)
    plain_s = seconds[0] + policy.costs.draft_s(3, 1000, policy.longest)[0]

    def worth(lengths):
        gain = sum(sum(survival[row][:length]) for row, length in enumerate(lengths))
        return gain - 3 / plain_s * (seconds[sum(lengths)] - seconds[0])

    every = {lengths: worth(lengths) for lengths in product(*(range(n + 1) for n in drafted))}
    best = max(every.values())
    if best > LEAST_GAIN * 3:
        assert worth(chosen) == pytest.approx(best)
    else:
        assert sum(chosen) == 0


class DrawnEngine:
    """Steps of a batch whose drafts are right at given rates; seconds as in the profile."""

    def __init__(
        self, policy: DraftPolicy, rates, batch: int, available: float = 1.0, context: int = 1000
    ) -> None:
        self.policy, self.rates, self.batch = policy, np.asarray(rates), batch
        self.available, self.context = available, context
        self.verify_s = policy.costs.verify_s(batch, context, batch * policy.longest)
        self.draft_s = policy.costs.draft_s(batch, context, policy.longest)

    def run(self, steps: int, fixed: int | None = None) -> float:
        """Tokens a second, with a fixed draft length or with the policy, on the same draws."""
        random = np.random.default_rng(1)
        names = [str(index) for index in range(self.batch)]
        tokens = seconds = 0.0
        drafted = [0] * self.batch
        for _ in range(steps):
            sequences = [
                RunningSequence(name=name, context=self.context, draft=[0] * count)
                for name, count in zip(names, drafted, strict=True)
            ]
            if fixed is None:
                lengths = drafted
                if self.policy.shortens:
                    lengths = self.policy.verified(sequences)
                length = self.policy.draft_length(sequences)
            else:
                lengths, length = drafted, fixed
            step_tokens = 0
            for name, count, verified in zip(names, drafted, lengths, strict=True):
                right = random.random(len(self.rates)) < self.rates
                accepted = int(np.cumprod(right[:verified]).sum())
                step_tokens += accepted + 1
                if fixed is None:
                    draft = list(range(count))
                    text = [token if right[token] else -5 for token in draft]
                    self.policy.acceptance.observe_text(name, draft, text[: accepted + 1] or [7])
            step_s = float(self.verify_s[sum(lengths)] + self.draft_s[length])
            if fixed is None:
                self.policy.observe_step(self.batch, self.context, step_tokens, step_s)
            tokens, seconds = tokens + step_tokens, seconds + step_s
            ready = random.random(self.batch) < self.available
            drafted = [length if one else 0 for one in ready]
        return tokens / seconds


@cache
def fixed_speeds(draft_s: float, rates: tuple[float, ...], batch: int) -> dict[int, float]:
    engine = DrawnEngine(policy_with(draft_s, a_token_s=1e-5), rates, batch)
    return {length: engine.run(1500, length) for length in ALLOWED}


@pytest.mark.parametrize("shortens", [True, False])
@pytest.mark.parametrize(("batch", "rates", "draft_s"), [
    (1, [0.9] * 8, 0.0002), (4, [0.9] * 8, 0.006), (4, [0.5] * 8, 0.0002), (1, [0.5] * 8, 0.006),
    (1, [0.7, 0.4, 0.2] + [0.1] * 5, 0.0002), (4, [0.0] * 8, 0.006),
])  # fmt: skip
def test_close_to_the_best_fixed_length(shortens, batch, rates, draft_s):
    engine = DrawnEngine(policy_with(draft_s, shortens, a_token_s=1e-5), rates, batch)
    fixed = fixed_speeds(draft_s, tuple(rates), batch)
    engine.run(300)  # what is learnt first is not counted
    own = engine.run(1500)
    assert own >= 0.97 * max(fixed.values())
    assert own >= 0.98 * fixed[0]


def test_better_than_fixed_lengths_where_only_some_have_drafts():
    engine = DrawnEngine(policy_with(), [0.8] * 8, batch=4, available=0.4)
    best = max(engine.run(1500, length) for length in ALLOWED)
    engine.run(300)
    assert engine.run(1500) >= 0.98 * best
    policy = policy_with(0.004, True, a_token_s=1e-4)
    engine = DrawnEngine(policy, [0.0] * 8, batch=1)
    engine.run(2000)
    assert policy._available[1] > 0.95


@pytest.mark.parametrize("rate", [0.5, 0.6])
def test_contexts_in_turn_do_not_mislead_it(rate):
    """Steps of short texts give more tokens a second than those of the long ones after them."""
    policy = policy_with(0.003, a_token_s=1e-4)
    engines = [DrawnEngine(policy, [rate] * 8, batch=8, context=c) for c in (64, 2048)]
    for engine in engines * 4:  # what is learnt first is not counted
        engine.run(60)
    own = np.array([[engine.run(60) for engine in engines] for _ in range(6)]).mean(axis=0)
    best = [max(engine.run(60, length) for length in ALLOWED) for engine in engines]
    assert np.all(own >= 0.99 * np.array(best))


@pytest.mark.parametrize("shortens", [True, False])
def test_drafts_that_become_good_are_found_again(shortens):
    policy = policy_with(0.004, shortens, a_token_s=1e-4)
    engine = DrawnEngine(policy, [0.0] * 8, batch=1)
    engine.run(2000)
    engine.rates = np.full(8, 0.95)
    engine.run(3000)
    best = max(engine.run(2000, length) for length in ALLOWED)
    assert engine.run(2000) >= 0.95 * best
