"""The replay drafter: its frequencies against its stated probabilities, and its lookups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from costmodel.acceptance import (
    AcceptanceProcess,
    constant,
    process_of,
    published,
    published_rows,
    recorded,
)
from costmodel.errors import InputError
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.tree.draft_tree import best_first
from decoder.tree.growth import TopPaths
from lab.bench.simulated import SimulatedDrafter, Truth
from tests.decoder.models import decoder_of, greedy, random_model

VOCAB = 1000
FADING_RATES = tuple(0.9 * 0.93**depth for depth in range(6))


def given_process(rank1=FADING_RATES, **options):
    return AcceptanceProcess(label="a test", kind="given", rank1=rank1, **options)


def request(depth=15, width=40):
    return DraftRequest(depth=depth, width=width, growth=TopPaths())


def text_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def session_of(text, process, *, prompt=5, seed=0):
    drafter = SimulatedDrafter(Truth([text]), process, vocab=VOCAB, seed=seed)
    return drafter.start(text[:prompt], None)


def independent_blocks(process, count, width=40, seed=0):
    """(block, true tokens) of blocks that share no position."""
    gamma = process.gamma
    text = text_of(5 + count * gamma, seed)
    session = session_of(text, process)
    for start in range(5, len(text), gamma):
        yield session.draft(text[:start], request(gamma, width)), text[start : start + gamma]


def ranks_by_hand(confidence, tail, width):
    """The definition in the module's text, rank by rank."""
    left, hazard, result = 1.0, confidence, []
    for rank in range(1, width + 1):
        if rank > 1:
            rising = hazard / (1.0 - hazard) if hazard < 1.0 else np.inf
            hazard = min(rising, tail / rank)
        result.append(left * hazard)
        left *= 1.0 - hazard
    return result


class TestCalibration:
    @pytest.mark.parametrize("concentration", [0.3, 4.0, np.inf])
    def test_ranks_come_true_as_often_as_stated(self, concentration):
        """Chi-square over ranks 1 .. 12 and what lies behind them, at every depth."""
        process = given_process(concentration=concentration, tail=0.6)
        hits, stated, rounds = np.zeros((6, 12)), np.zeros((6, 12)), 4000
        for block, truth in independent_blocks(process, rounds, width=12):
            hits += block.tokens == truth[:, None]
            stated += block.probabilities
        hits = np.column_stack([hits, rounds - hits.sum(axis=1)])
        stated = np.column_stack([stated, rounds - stated.sum(axis=1)])
        chi_square = ((hits - stated) ** 2 / stated).sum()
        degrees = 6 * 12
        assert abs(chi_square - degrees) < 4.0 * np.sqrt(2.0 * degrees)

    def test_a_stated_confidence_is_the_frequency(self):
        """Among first tokens said to be right with about p, p of them are."""
        said, right = [], []
        for block, truth in independent_blocks(given_process(concentration=1.0), 3000):
            said.extend(block.probabilities[:, 0])
            right.extend(block.tokens[:, 0] == truth)
        said, right = np.array(said), np.array(right)
        assert said.std() > 0.25  # it is surer at some positions than at others
        for low in np.arange(0.0, 1.0, 0.1):
            inside = (said >= low) & (said < low + 0.1)
            noise = 4.0 * np.sqrt(0.25 / max(inside.sum(), 1))
            assert abs(right[inside].mean() - said[inside].mean()) < noise or not inside.any()

    def test_each_depth_has_its_own_rate(self):
        rates = np.mean(
            [
                block.tokens[:, 0] == truth
                for block, truth in independent_blocks(given_process(), 4000)
            ],
            axis=0,
        )
        assert rates == pytest.approx(FADING_RATES, abs=0.03)

    @given(
        rate=st.floats(0.02, 1.0),
        concentration=st.one_of(st.floats(0.05, 20.0), st.just(np.inf)),
        tail=st.floats(0.0, 2.0),
    )
    @example(rate=0.05035655382776352, concentration=0.125, tail=0.0)
    @settings(max_examples=60, deadline=None)
    def test_confidences_and_ranks_are_those_defined(self, rate, concentration, tail):
        process = given_process((rate,), concentration=concentration, tail=tail)
        confidences = process.confidences()
        assert confidences.mean() == pytest.approx(rate, abs=1e-9)
        assert np.all((confidences >= 0.0) & (confidences <= 1.0))
        table = process.rank_table(9)
        block = session_of(text_of(40), process).draft(text_of(40)[:20], request(1, 9))
        by_hand = ranks_by_hand(block.probabilities[0, 0], tail, 9)
        assert block.probabilities[0] == pytest.approx(by_hand, abs=1e-12)
        at = int(np.argmin(np.abs(confidences[0] - block.probabilities[0, 0])))
        assert table[0, at] == pytest.approx(by_hand, abs=1e-9)


class TestBlocks:
    @given(rate=st.floats(0.1, 0.99), tail=st.floats(0.0, 2.0), width=st.integers(1, 60))
    @settings(max_examples=60, deadline=None)
    def test_they_are_lattices(self, rate, tail, width):
        text = text_of(200)
        session = session_of(text, given_process((rate,) * 5, tail=tail))
        for start in (5, 60, 130):
            block = session.draft(text[:start], request(5, width))
            wider = session.draft(text[:start], request(3, width + 7))
            assert block.tokens.shape == (5, width)
            assert np.all(np.diff(block.probabilities, axis=1) <= 1e-12)
            assert np.all(block.probabilities.sum(axis=1) <= 1.0 + 1e-12)
            assert np.all((block.tokens >= 0) & (block.tokens < VOCAB))
            assert all(len(set(row)) == width for row in block.tokens.tolist())
            np.testing.assert_array_equal(wider.tokens[:, :width], block.tokens[:3])
            np.testing.assert_array_equal(wider.probabilities[:, :width], block.probabilities[:3])

    def test_a_tiny_vocabulary_leaves_room_for_a_truth_outside(self):
        text = np.array([0, 1, 0, 1, 1, 0, 0, 1])
        drafter = SimulatedDrafter(Truth([text]), given_process(), vocab=2)
        session = drafter.start(text[:1], None)
        assert session.draft(text[:2], request(3, 50)).tokens.shape == (3, 1)

    def test_the_same_position_has_the_same_luck_from_any_start(self):
        text = text_of(300)
        session = session_of(text, given_process((0.7,) * 8))
        for start in range(10, 250, 7):
            early = session.draft(text[:start], request(8))
            late = session.draft(text[: start + 3], request(8))
            np.testing.assert_array_equal(early.tokens[3:], late.tokens[:5])
            np.testing.assert_array_equal(early.probabilities[3:], late.probabilities[:5])

    def test_draws_depend_on_seed_and_prompt_only(self):
        text, process = text_of(300), given_process()
        first = session_of(text, process).draft(text[:100], request())
        again = session_of(text, process)
        again.draft(text[:40], request())
        again.observe(text[40:44].tolist(), None)
        np.testing.assert_array_equal(again.draft(text[:100], request()).tokens, first.tokens)
        for other in (session_of(text, process, seed=-3), session_of(text, process, prompt=6)):
            assert np.any(other.draft(text[:100], request()).tokens != first.tokens)


class TestTruth:
    """An always right process, so that drafted first tokens are the known text."""

    SURE = given_process((1.0,) * 4)

    def first_tokens(self, session, context):
        return session.draft(np.asarray(context), request(4, 3)).tokens[:, 0].tolist()

    def session(self, texts, prompt):
        drafter = SimulatedDrafter(Truth(texts), self.SURE, vocab=VOCAB)
        return drafter.start(np.asarray(prompt), None)

    def test_each_prompt_finds_its_own_text(self):
        texts = [[1, 2, 10, 11, 12, 13, 14], [1, 3, 20, 21, 22, 23, 24]]
        assert self.first_tokens(self.session(texts, [1, 2]), [1, 2, 10]) == [11, 12, 13, 14]
        assert self.first_tokens(self.session(texts, [1, 3]), [1, 3, 20]) == [21, 22, 23, 24]

    def test_behind_the_end_nothing_is_known(self):
        session = self.session([[1, 2, 3, 4, 5, 6]], [1, 2])
        assert self.first_tokens(session, [1, 2, 3, 4])[:2] == [5, 6]
        assert len(self.first_tokens(session, [1, 2, 3, 4, 5, 6])) == 4
        assert len(self.first_tokens(session, [1, 2, 3, 4, 5, 6, 7, 8])) == 4

    def test_an_unknown_prompt_is_drafted_with_tokens_that_mean_nothing(self):
        text = text_of(600, seed=1)
        drafter = SimulatedDrafter(Truth([text_of(600)]), given_process(), vocab=VOCAB)
        session = drafter.start(text[:5], None)
        hits = [
            np.mean(session.draft(text[:at], request(6, 1)).tokens[:, 0] == text[at : at + 6])
            for at in range(5, 590, 6)
        ]
        assert np.mean(hits) < 0.02

    def test_a_text_that_leaves_the_truth_goes_on_with_another(self):
        texts = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 30, 31, 32, 33]]
        session = self.session(texts[:1], [1, 2])
        assert self.first_tokens(session, [1, 2, 3]) == [4, 5, 6, 7]
        lost = self.first_tokens(session, [1, 2, 3, 9])
        assert lost != [30, 31, 32, 33]
        session = self.session(texts, [1, 2])
        assert self.first_tokens(session, [1, 2, 3, 9]) == [30, 31, 32, 33]
        assert self.first_tokens(session, [1, 2, 3, 4]) == [5, 6, 7, 8]


class Pacer(Drafter, DraftSession):
    """A drafter that only counts how often it is run."""

    name = architecture_hash = "pacer"
    max_depth, feature_layers = 2, (1,)

    def __init__(self):
        self.calls = []

    def start(self, prompt, features, logits=None):
        self.calls.append(("start", features))
        return self

    def draft(self, context, request):
        self.calls.append(("draft", len(context)))

    def observe(self, emitted, features):
        self.calls.append(("observe", features))


def test_a_pacing_drafter_runs_beside_it():
    pacer, text = Pacer(), text_of(50)
    drafter = SimulatedDrafter(Truth([text]), given_process(), vocab=VOCAB, companion=pacer)
    assert (drafter.architecture_hash, drafter.feature_layers) == ("pacer", (1,))
    session = drafter.start(text[:5], "prompt features")
    paced = session.draft(text[:9], request())
    session.observe([1], "features")
    assert pacer.calls == [("start", "prompt features"), ("draft", 9), ("observe", "features")]
    alone = session_of(text, given_process()).draft(text[:9], request())
    np.testing.assert_array_equal(paced.tokens, alone.tokens)


class TestProcess:
    def test_the_name_says_that_acceptance_is_simulated(self):
        drafter = SimulatedDrafter(Truth(), published("ddtree", "gsm8k"), vocab=VOCAB)
        assert drafter.name == (
            "replay of simulated acceptance: ddtree table 1, qwen3-8b, gsm8k, T = 0"
        )

    @given(st.floats(1.05, 15.9))
    @settings(deadline=None)
    def test_a_constant_rate_gives_the_chain_length(self, length):
        rate = constant(length).rank1[0]
        assert sum(rate**depth for depth in range(16)) == pytest.approx(length, abs=1e-9)

    def test_recorded_rates_by_hand(self):
        """Of 4 drafted rounds 3 accept depth 1, 2 of these depth 2, of 2 that drafted it 1."""
        process = recorded([0, 1, 2, 3, 0], [3, 3, 2, 3, 0], label="a run", gamma=5)
        assert process.rank1 == pytest.approx([3 / 4, 2 / 3, 1.0, 1.0, 1.0])
        assert (process.kind, process.gamma) == ("recorded", 5)

    def test_recorded_rates_stay_above_zero(self):
        assert recorded([0, 0], [2, 2], label="a run").rank1 == (0.25, 0.25)

    def test_a_recorded_run_has_its_own_rates_back(self):
        accepted = []
        for block, truth in independent_blocks(given_process(), 4000):
            right = block.tokens[:, 0] == truth
            accepted.append(int(np.cumprod(right).sum()))
        process = recorded(accepted, [6] * len(accepted), label="a run")
        assert process.rank1 == pytest.approx(FADING_RATES, abs=0.03)

    @pytest.mark.parametrize(
        "options",
        [
            {"rank1": ()},
            {"rank1": (0.5, 0.0)},
            {"rank1": (1.1,)},
            {"concentration": 0.0},
            {"tail": 2.5},
            {"tail": -0.1},
        ],
    )
    def test_impossible_processes(self, options):
        with pytest.raises(InputError):
            given_process(**options)

    def test_impossible_requests(self):
        with pytest.raises(InputError, match="cannot commit"):
            constant(17.0)
        with pytest.raises(InputError, match="no acceptance to record"):
            recorded([0, 0], [0, 0], label="plain")
        with pytest.raises(InputError, match="as many or more"):
            recorded([2], [1], label="broken")
        with pytest.raises(InputError, match="vocabulary of 2"):
            SimulatedDrafter(Truth(), given_process(), vocab=1)


class TestPublished:
    # Typed from the papers' tables: chain and tree.
    LINES = (
        ("bastion", "math500", "qwen3-8b", 0, 8.25, 10.53),
        ("bastion", "alpaca", "qwen3-4b", 1, 2.76, 4.70),
        ("bastion", "gsm8k", "qwen3-4b", 0, 6.50, 9.07),
        ("ddtree", "mt_bench", "qwen3-8b", 0, 4.28, 6.58),
        ("ddtree", "humaneval", "qwen3-coder-30b-a3b", 1, 7.60, 10.42),
        ("ddtree", "swe_bench_lite", "qwen3-4b", 0, 3.66, 5.99),
    )

    @pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line[0]}-{line[1]}")
    def test_both_lengths_come_out_of_simulated_rounds(self, line):
        """The trees' realised lengths, not their predicted ones, over 1,500 rounds."""
        table, dataset, target, temperature, chain, tree = line
        process = published(table, dataset, target=target, temperature=temperature)
        nodes = 256 if table == "bastion" else 512
        chains, trees = [], []
        for block, truth in independent_blocks(process, 1500, width=300, seed=7):
            chains.append(1 + np.cumprod(block.tokens[:, 0] == truth).sum())
            grown, row, length = best_first(block, nodes), 0, 0
            while length < len(truth) and (row := grown.child(row, int(truth[length]))) > 0:
                length += 1
            trees.append(1 + length)
        assert np.mean(chains) == pytest.approx(chain, abs=4 * np.std(chains) / np.sqrt(1500))
        assert np.mean(trees) == pytest.approx(tree, abs=4 * np.std(trees) / np.sqrt(1500))

    def test_every_line_has_its_chain(self):
        rows = published_rows()
        assert len(rows) == 2 * 8 * 2 + 3 * 10 * 2
        for row in rows:
            process = process_of(row)
            assert process.chain_length == pytest.approx(row.chain, abs=1e-6)
            assert process.kind == "published"
            assert row.tree > row.chain

    @pytest.mark.parametrize("target", ["qwen3-4b", "qwen3-8b"])
    def test_predicted_and_accepted_lengths_correlate_as_reported(self, target):
        """BASTION appendix H.1: Pearson 0.79-0.82 on MATH500."""
        process = published("bastion", "math500", target=target)
        said, accepted = [], []
        for block, truth in independent_blocks(process, 6000, width=1):
            said.append(np.cumprod(block.probabilities[:, 0]).sum())
            accepted.append(np.cumprod(block.tokens[:, 0] == truth).sum())
        assert 0.77 < np.corrcoef(said, accepted)[0, 1] < 0.83

    def test_an_unknown_line(self):
        with pytest.raises(InputError, match="no published acceptance of bastion qwen3-8b gsm8 "):
            published("bastion", "gsm8")


@pytest.mark.parametrize("policy", ["bastion", "bastion:paper", "fixed:20", "chain"])
def test_decoding_with_it_gives_the_plain_text(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    model = random_model("llama-gqa")
    prompts = [[1, 5, 9, 5], [2, 7]]
    expected = [greedy(model, prompt, 40) for prompt in prompts]
    texts = [prompt + plain for prompt, plain in zip(prompts, expected, strict=True)]
    # One text's truth breaks off, and one has a wrong token, half way through.
    texts[0] = texts[0][:24]
    texts[1][20] = (texts[1][20] + 1) % 97
    drafter = SimulatedDrafter(Truth(texts), constant(5.0), vocab=97)
    decoder = decoder_of(model, policy, drafter, max_nodes=32)
    for prompt, plain in zip(prompts, expected, strict=True):
        result = decoder.generate(prompt, max_new_tokens=40)
        assert result.token_ids == plain
        assert result.stats.accepted_tokens > 5
