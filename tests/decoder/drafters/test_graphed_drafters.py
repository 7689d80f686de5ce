"""Drafters whose forwards are captured: the candidates of eager ones, few captures."""

import logging

import numpy as np
import pytest
import torch

from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.engine import TreeDecoder
from decoder.model.runtime.graphs import GraphRuntime
from decoder.tree.draft_tree import Lattice
from decoder.tree.growth import TopPaths
from lab.drafters.conditional import PairLattice
from tests.decoder import draft_models as made
from tests.decoder.draft_models import ACCEPTED, PROMPT, VOCAB, WINDOWED, draft_target, rounds
from tests.decoder.models import greedy, random_model, request, shaped, target_of
from tests.decoder.replay import ReplayCapture

REQUEST = request(4, 8, TopPaths(width=4, frontier=3, max_depth=4))


def captured(target, **capture):
    """The same target with a graph runtime of the CPU's stand-in."""
    stand_in = ReplayCapture(**capture)
    target.runtime = GraphRuntime(target._step, target._eager, stand_in)
    return stand_in


CASES = {
    "dflash": {}, "dflash-window": WINDOWED,
    "dflash-window-both-ways": WINDOWED | {"is_causal": False},
    "dflash-causal": {"is_causal": True}, "dflash-shifted": {"sample_from_anchor": True},
    "dflash2": {"final_logit_softcapping": 4.0}, "domino": {}, "dspark": {},
    "dspark-gated": {"markov_head_type": "gated", "target_layer_ids": [-1, 2, 4]},
    "dspark-rnn": {"markov_head_type": "rnn"}, "eagle3": {},
    "eagle3-mapped": {"draft_vocab_size": 31}, "autoregressive": {},
}  # fmt: skip


def build(case, target, folder):
    kind = case.partition("-")[0]
    if kind == "autoregressive":
        return CausalLMDrafter(target_of(random_model("llama-gqa", seed=4)), target=target)
    return made.published(kind, target, folder / "draft", **CASES[case])


def pair(tmp_path, case, **capture):
    """Target and drafter eagerly, the same captured, and the stand-in that counts."""
    plain, graphs = (draft_target(dtype=torch.float64) for _ in range(2))
    stand_in = captured(graphs, **capture)
    eager, graphed = build(case, plain, tmp_path), build(case, graphs, tmp_path)
    if case == "autoregressive":
        own = graphed.model
        own.runtime = GraphRuntime(own._step, own._eager, stand_in)
    return (plain, eager), (graphs, graphed), stand_in


def assert_same(found, expected, atol=1e-5):
    """Equal tokens, and probabilities to `atol`."""
    assert type(found) is type(expected)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    if isinstance(found, PairLattice):
        np.testing.assert_allclose(found.first, expected.first, atol=atol)
        np.testing.assert_allclose(found.edges, expected.edges, atol=atol)
        return
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=atol)
    if not isinstance(found, Lattice):
        np.testing.assert_array_equal(found.parents, expected.parents)


def own_captures(drafter, target):
    """Recordings that the drafter's own forwards have made so far."""
    forwards = vars(drafter).get("forwards")
    if forwards is None:
        return len(drafter.model.runtime._captured[drafter.model.cache])
    kinds = [kind for kind in vars(forwards).values() if hasattr(kind, "_buckets")]
    return sum(len(kind._buckets.get(forwards.caches._cache, {})) for kind in kinds)


class TestTheSameCandidates:
    @pytest.mark.slow
    @torch.inference_mode()
    @pytest.mark.parametrize("case", CASES)
    def test_over_several_rounds(self, tmp_path, case):
        """Contexts grow, some rounds are plain, and a draft can be made again."""
        prompt = PROMPT if "-" in case else [9]
        eager, graphed, capture = pair(tmp_path, case)
        walks = [rounds(target, drafter, prompt, ACCEPTED) for target, drafter in (eager, graphed)]
        for turn, ((session, context), (other, same)) in enumerate(zip(*walks, strict=True)):
            np.testing.assert_array_equal(context, same)
            expected, found = (own.draft(context, REQUEST) for own in (session, other))
            assert_same(found, expected)
            assert_same(other.draft(context, REQUEST), found)
            if turn == 5:
                known = own_captures(graphed[1], graphed[0])
        # Round 6 takes in more rows than any before: one bucket more, and no other.
        assert own_captures(graphed[1], graphed[0]) <= known + 1
        assert capture.replayed > 2 * len(ACCEPTED)
        assert graphed[0].runtime.warnings == ()

    @torch.inference_mode()
    @pytest.mark.parametrize("case", ["dflash", "eagle3", "autoregressive"])
    def test_behind_a_cache_that_was_outgrown(self, tmp_path, case):
        """Nothing is reserved for this text, so that its cache has to be left for a larger one."""
        eager, graphed, _ = pair(tmp_path, case)
        random = np.random.default_rng(3)
        tokens = random.integers(0, VOCAB, 1040 if case != "autoregressive" else 500)
        generator = torch.Generator().manual_seed(1)
        features = torch.randn(len(tokens), 96, dtype=torch.float64, generator=generator)
        start = 1000 if case != "autoregressive" else 460
        known = tokens[:start], features[:start]
        sessions = [drafter.start(*known) for _, drafter in (eager, graphed)]
        places = set()
        for at in range(start, len(tokens) - 8, 8):
            expected, found = (session.draft(tokens[: at + 1], REQUEST) for session in sessions)
            assert_same(found, expected)
            for session in sessions:
                session.observe(tokens[at + 1 : at + 9].tolist(), features[at : at + 8])
            text = getattr(sessions[1], "_forward", None) or sessions[1]._text
            places.add(text.cache.capacity)
        if case != "autoregressive":
            assert places == {1024, 2048}

    @torch.inference_mode()
    @pytest.mark.parametrize("case", ["dflash2", "domino", "eagle3", "autoregressive"])
    def test_drawn_trees_have_the_same_q(self, tmp_path, case):
        eager, graphed, _ = pair(tmp_path, case)
        shape, drawn = shaped([0, 0, 1, 1, 2, 3]), []
        for target, drafter in (eager, graphed):
            *_, (session, context) = rounds(target, drafter, PROMPT, [2])
            generator = torch.Generator().manual_seed(3)
            drawn.append(session.draw(context, shape, 0.8, generator))
        np.testing.assert_array_equal(drawn[1].tokens, drawn[0].tokens)
        torch.testing.assert_close(drawn[1].q, drawn[0].q, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dflash", "domino", "eagle3", "autoregressive"])
def test_ragged_batches_share_the_captures_of_texts_before(tmp_path, case):
    _, (target, drafter), capture = pair(tmp_path, case)
    decoder = TreeDecoder(target, policy="fixed:6", drafter=drafter)
    prompts = [PROMPT, PROMPT[:1], PROMPT[2:7] * 6]
    truths, recorded = [greedy(target.model, prompt, 8) for prompt in prompts], []
    for _ in range(3):
        results = decoder.generate_batch(prompts, max_new_tokens=8)
        assert [result.token_ids for result in results] == truths
        recorded.append(capture.recordings)
    assert recorded[1] == recorded[2] and target.runtime.warnings == ()


@torch.inference_mode()
@pytest.mark.parametrize("case", ["dflash", "eagle3"])
def test_out_of_memory_is_said_once_a_bucket(tmp_path, case, caplog):
    eager, graphed, capture = pair(tmp_path, case, fail_from=0)
    walks = [rounds(target, drafter, PROMPT, ACCEPTED) for target, drafter in (eager, graphed)]
    with caplog.at_level(logging.WARNING):
        for (session, context), (other, _) in zip(*walks, strict=True):
            expected, found = (own.draft(context, REQUEST) for own in (session, other))
            assert_same(found, expected)
    notes = graphed[0].runtime.capture.notes
    assert capture.recordings == 0
    assert len(set(notes)) == len(notes) == own_captures(graphed[1], graphed[0])
    assert all("is not captured: CUDA out of memory" in note for note in notes)
    assert set(notes) <= set(graphed[0].runtime.warnings)
    said = [record for record in caplog.records if "running eagerly" in record.message]
    assert len(said) == len(notes)
