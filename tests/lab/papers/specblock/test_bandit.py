"""SpecBlock's bandit against algorithm 1, written down line by line, and made-up streams."""

import numpy as np
import pytest

from lab.papers.specblock.updates.bandit import AlwaysUpdate, Bandit, BanditSettings, Query


def query(signal=6.0, tokens=20, verifications=10, seconds=1.0):
    return Query(signal=signal, tokens=tokens, verifications=verifications, seconds=seconds)


def revised(v, trigger, measured, cost, baseline, settings):
    """Lines 19 and 20: the values after an interval has closed."""
    action, signal = trigger
    if signal < settings.least_signal:
        return v
    seconds = cost + sum(s for _, s in measured)
    reward = (sum(t for t, _ in measured) / seconds - baseline) / signal
    return v | {action: (1 - settings.decay) * v[action] + settings.decay * reward}


def algorithm_1(queries, charges, settings, seed):
    """What happens at each query: (action, train, good, rollback, v_heads, v_full).

    A transcription with loose variables; the numbers in brackets are its line numbers.
    charges  seconds of an update that is due at query i
    """
    random = np.random.default_rng(seed)
    first, last = settings.first_epsilon, settings.last_epsilon
    warm_tokens = warm_seconds = 0.0
    v = {"heads": 0.0, "full": 0.0}
    buffer = {"heads": [], "full": []}
    events, free_from = 0, 0
    trigger = None  # (action, signal) of the update being measured
    measured = []  # (tokens, seconds) of the queries since
    cost = 0.0
    window, lengths = [], []
    told = []
    for i, q in enumerate(queries):
        if i < settings.warmup_queries:
            warm_tokens, warm_seconds = warm_tokens + q.tokens, warm_seconds + q.seconds
            told.append(("skip", False, False, False, 0.0, 0.0))
            continue
        if trigger:
            measured.append((q.tokens, q.seconds))
        s = q.signal  # (2)
        a = None
        if s > 0 and events < settings.cold_start_events:
            steps = settings.cold_start_events - 1
            epsilon = first - (first - last) * events / steps
            if random.random() < epsilon:
                a = ("heads", "full")[random.integers(2)]
        if a is None:
            gain_heads, gain_full = s * v["heads"], s * v["full"]  # (3)
            if gain_heads <= 0 and gain_full <= 0:  # (4)
                a = "skip"
            else:
                a = "heads" if gain_heads >= gain_full else "full"  # (7)
        train = False
        if a != "skip":  # (9)
            buffer[a].append(i)  # (10)
            if len(buffer[a]) >= settings.buffer_queries and i >= free_from:  # (12)
                if trigger:
                    v = revised(v, trigger, measured, cost, warm_tokens / warm_seconds, settings)
                trigger, measured, cost = (a, s), [], charges[i]  # (13), (17)
                buffer[a] = []  # (15)
                events, free_from, train = events + 1, i + 1 + settings.blocked_queries, True
        if trigger and len(measured) == settings.interval_queries:  # (19)
            v = revised(v, trigger, measured, cost, warm_tokens / warm_seconds, settings)
            trigger = None
        good = rollback = False
        window.append(q)
        if len(window) == settings.interval_queries:
            lengths.append(sum(w.tokens for w in window) / sum(w.verifications for w in window))
            window = []
            good = len(lengths) == 1 or lengths[-1] >= lengths[-2]
            rollback = len(lengths) >= 3 and lengths[-3] > lengths[-2] > lengths[-1]  # (22)
        if rollback:  # (23)
            v = {"heads": 0.0, "full": 0.0}
            buffer = {"heads": [], "full": []}
            events, free_from, trigger, lengths, train = 0, 0, None, [], False
        told.append((a, train, good, rollback, v["heads"], v["full"]))
    return told


def run(queries, charges, settings, seed):
    """The same of the bandit itself."""
    bandit, told = Bandit(settings, np.random.default_rng(seed)), []
    for q, charge in zip(queries, charges, strict=True):
        decision = bandit.after(q)
        if decision.train:
            bandit.charge(charge)
        values = (bandit.values.get("heads", 0.0), bandit.values.get("full", 0.0))
        told.append((decision.action, decision.train, decision.good, decision.rollback, *values))
    return told


def stream(seed, queries=600):
    """Queries whose throughput wanders, with signals around s_min and some of 0."""
    random = np.random.default_rng(seed)
    drift = np.cumsum(random.normal(0, 0.6, queries))
    return [
        query(
            signal=0.0 if random.random() < 0.1 else float(random.gamma(3.0, 2.5)),
            tokens=int(random.integers(20, 60)), verifications=int(random.integers(8, 20)),
            seconds=float(random.uniform(0.5, 1.5) * np.exp(-0.05 * drift[i])),
        )
        for i in range(queries)
    ]  # fmt: skip


SETTINGS = {
    "paper": BanditSettings(),
    "short": BanditSettings(interval_queries=3, buffer_queries=1),
    "hasty": BanditSettings(interval_queries=6, buffer_queries=1, blocked_queries=0),
    "eager": BanditSettings(
        warmup_queries=2, cold_start_events=20, first_epsilon=0.9, last_epsilon=0.5, decay=0.5
    ),
}


class TestAgainstTheAlgorithm:
    @pytest.mark.parametrize("name", SETTINGS)
    @pytest.mark.parametrize("seed", range(12))
    def test_random_streams(self, name, seed):
        queries = stream(seed)
        charges = np.random.default_rng(seed + 100).uniform(0.0, 3.0, len(queries)).tolist()
        found = run(queries, charges, SETTINGS[name], seed)
        expected = algorithm_1(queries, charges, SETTINGS[name], seed)
        for i, (own, other) in enumerate(zip(found, expected, strict=True)):
            assert own[:4] == other[:4], i
            assert own[4:] == pytest.approx(other[4:], abs=1e-12), i


class TestAlwaysUpdate:
    @pytest.mark.parametrize("every", [1, 8])
    def test_the_whole_drafter_every_so_many_queries(self, every):
        updater = AlwaysUpdate(every)
        decisions = [updater.after(query(signal=0.0)) for _ in range(24)]
        assert [d.train for d in decisions] == ([False] * (every - 1) + [True]) * (24 // every)
        assert all(d.action == "full" and not d.rollback for d in decisions)
