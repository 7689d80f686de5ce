"""SpecBlock's bandit against algorithm 1, written down line by line, and made-up streams."""

import numpy as np
import pytest

from costmodel.errors import InputError
from lab.papers.specblock.updates.bandit import (
    AlwaysUpdate,
    Bandit,
    BanditSettings,
    Query,
    declines,
)


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
            tokens=int(random.integers(20, 60)),
            verifications=int(random.integers(8, 20)),
            seconds=float(random.uniform(0.5, 1.5) * np.exp(-0.05 * drift[i])),
        )
        for i in range(queries)
    ]


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

    def test_the_streams_reach_every_part(self):
        """Else the comparison would say little."""
        told = [
            step
            for name in SETTINGS
            for seed in range(12)
            for step in run(stream(seed), [0.1] * 600, SETTINGS[name], seed)
        ]
        for action in ("heads", "full"):
            assert sum(step[0] == action and step[1] for step in told) > 20
        assert sum(step[3] for step in told) > 20
        assert sum(step[0] == "skip" for step in told) > 1000
        assert any(step[4] > 0 for step in told) and any(step[5] < 0 for step in told)


ALWAYS = {"first_epsilon": 1.0, "last_epsilon": 1.0, "cold_start_events": 10**6}


class TestPieces:
    def test_nothing_happens_in_the_warm_up(self):
        bandit = Bandit(BanditSettings(**ALWAYS), np.random.default_rng(0))
        decisions = [bandit.after(query()) for _ in range(10)]
        assert all(not (d.train or d.window) and d.action == "skip" for d in decisions)
        assert bandit.after(query()).action != "skip"

    def test_epsilon_falls_from_030_to_010_over_eight_events(self):
        """Every explored query is an event, as its buffer holds one; no gain, so no other."""
        settings = BanditSettings(buffer_queries=1, blocked_queries=0)
        bandit = Bandit(settings, np.random.default_rng(0))
        seen = {bandit.events: bandit.epsilon}
        for _ in range(400):
            bandit.after(query())
            seen.setdefault(bandit.events, bandit.epsilon)
        wanted = [0.3 - 0.2 * event / 7 for event in range(8)]
        assert [seen[event] for event in range(8)] == pytest.approx(wanted)
        assert seen[8] == 0.0 and max(seen) == 8

    def test_how_often_it_explores(self):
        """Before any event 30 % of the queries, half of them each way."""
        settings = BanditSettings(buffer_queries=10**9)
        bandit = Bandit(settings, np.random.default_rng(1))
        for _ in range(settings.warmup_queries):
            bandit.after(query())
        decisions = [bandit.after(query(tokens=20)) for _ in range(4000)]
        explored = [d.action for d in decisions if d.explored]
        assert len(explored) / 4000 == pytest.approx(0.30, abs=4 * (0.21 / 4000) ** 0.5)
        half = 4 * (0.25 / len(explored)) ** 0.5
        assert explored.count("heads") / len(explored) == pytest.approx(0.5, abs=half)
        assert all(d.action == "skip" for d in decisions if not d.explored)

    def test_two_queries_are_blocked_after_an_update(self):
        settings = BanditSettings(**ALWAYS, actions=("full",), buffer_queries=1)
        bandit = Bandit(settings, np.random.default_rng(0))
        trained = [bandit.after(query()).train for _ in range(10 + 9)]
        assert trained == [False] * 10 + [True, False, False] * 3

    def test_a_buffer_fills_while_it_is_blocked(self):
        settings = BanditSettings(**ALWAYS, actions=("full",), buffer_queries=2)
        bandit = Bandit(settings, np.random.default_rng(0))
        trained = [bandit.after(query()).train for _ in range(10 + 8)]
        assert trained == [False] * 10 + [False, True, False, False, True, False, False, True]

    def test_the_value_by_hand(self):
        """Warm-up 20 tokens/s; then 4 queries of 20 in 0.5 s and an update of 0.5 s: 32."""
        settings = BanditSettings(**ALWAYS, actions=("full",), buffer_queries=1, interval_queries=4)
        bandit = Bandit(settings, np.random.default_rng(0))
        for _ in range(10):
            bandit.after(query())
        assert bandit.after(query(signal=8.0)).train
        bandit.charge(0.5)
        for signal in (1.0, 0.0, 0.0, 0.0):
            assert bandit.values == {"full": 0.0}
            bandit.after(query(signal=signal, seconds=0.5))
        assert bandit.values["full"] == pytest.approx(0.1 * (32.0 - 20.0) / 8.0)

    @pytest.mark.parametrize(("signal", "booked"), [(4.99, False), (5.0, True)])
    def test_a_weak_signal_is_not_booked(self, signal, booked):
        settings = BanditSettings(**ALWAYS, actions=("full",), buffer_queries=1, interval_queries=2)
        bandit = Bandit(settings, np.random.default_rng(0))
        for seconds in [1.0] * 10 + [1.0, 0.5, 0.5]:
            bandit.after(query(signal=signal, seconds=seconds))
        assert (bandit.values["full"] > 0) == booked

    def test_the_better_action_is_taken_and_none_where_both_lose(self):
        settings = BanditSettings(cold_start_events=0)
        bandit = Bandit(settings, np.random.default_rng(0))
        for _ in range(10):
            bandit.after(query())
        for heads, full, action in [
            (0.2, 0.1, "heads"),
            (0.1, 0.2, "full"),
            (-0.1, 0.01, "full"),
            (0.1, 0.1, "heads"),
            (-0.1, 0.0, "skip"),
            (-0.1, -0.2, "skip"),
        ]:
            bandit.values.update(heads=heads, full=full)
            assert bandit.after(query()).action == action
            assert bandit.after(query(signal=0.0)).action == "skip"

    def test_a_decline_over_three_windows_rolls_back_and_forgets(self):
        settings = BanditSettings(interval_queries=2)
        bandit = Bandit(settings, np.random.default_rng(0))
        for _ in range(10):
            bandit.after(query())
        bandit.values.update(heads=0.3, full=0.1)
        found = []
        for tokens in (30, 40, 40, 35, 30, 25, 50, 20):
            first, second = bandit.after(query(tokens=tokens)), bandit.after(query(tokens=tokens))
            assert not (first.window or first.good or first.rollback)
            assert second.window
            found.append((second.good, second.rollback))
        # 40, 35, 30 is a decline over three; 25 is then the first window of a new count.
        falls = [False, False, False, False, True, False, False, False]
        goods = [True, True, True, False, False, True, True, False]
        assert found == list(zip(goods, falls, strict=True))
        assert bandit.events == 0 and bandit.values == {"heads": 0.0, "full": 0.0}

    @pytest.mark.parametrize(
        ("lengths", "falls"),
        [
            ([3.0, 2.0, 1.0], True),
            ([9.0, 3.0, 2.0, 1.0], True),
            ([3.0, 2.0], False),
            ([3.0, 2.0, 2.0], False),
            ([1.0, 3.0, 2.0], False),
            ([3.0, 2.0, 2.5], False),
        ],
    )
    def test_what_a_decline_is(self, lengths, falls):
        assert declines(lengths, 3) == falls

    def test_texts_of_one_token_count_no_time(self):
        """Nothing was decoded after the prefill, so there is neither a rate nor a length."""
        settings = BanditSettings(**ALWAYS, interval_queries=2, buffer_queries=1)
        bandit = Bandit(settings, np.random.default_rng(0))
        for _ in range(40):
            decision = bandit.after(query(tokens=0, verifications=0, seconds=0.0))
            assert not (decision.good or decision.rollback)

    @pytest.mark.parametrize(
        "changed",
        [
            {"warmup_queries": 0},
            {"interval_queries": 0},
            {"buffer_queries": 0},
            {"declining_windows": 1},
            {"actions": ()},
        ],
    )
    def test_settings_that_make_no_sense(self, changed):
        with pytest.raises(InputError, match="a bandit needs"):
            BanditSettings(**changed)


class TestAlwaysUpdate:
    @pytest.mark.parametrize("every", [1, 8])
    def test_the_whole_drafter_every_so_many_queries(self, every):
        updater = AlwaysUpdate(every)
        decisions = [updater.after(query(signal=0.0)) for _ in range(24)]
        assert [d.train for d in decisions] == ([False] * (every - 1) + [True]) * (24 // every)
        assert all(d.action == "full" and not d.rollback for d in decisions)

    def test_an_impossible_rhythm(self):
        with pytest.raises(InputError, match="1 query or more"):
            AlwaysUpdate(0)
