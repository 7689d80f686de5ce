"""The autoregressive drafter against its model run anew on every path, without a cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.causal_lm import CATCH_UP_ROWS, CausalLMDrafter
from decoder.drafters.ensemble import EnsembleDrafter
from decoder.drafters.ngram import NgramDrafter
from decoder.drafters.vocabulary import check_vocabulary
from decoder.model.loading import load_model
from decoder.tree.growth import SINGLE_PATH, TopPaths, grow
from tests.decoder.models import plain_logits, random_model, request, target_of
from tests.tiny_folder import write_all, write_weights

VOCAB = 97
GROWTHS = {
    "top paths": TopPaths(width=3, frontier=3, max_depth=4),
    "single path": replace(SINGLE_PATH, max_depth=6),
}


class PlainSource:
    """Children from the model's plain forward over the whole text and path, path by path."""

    def __init__(self, model, text, temperature=1.0):
        self.model, self.text, self.temperature = model, list(text), temperature
        self.paths = []

    def __call__(self, frontier, width):
        if not frontier.depth:
            return self.answer([()], width)
        grown = zip(frontier.above, frontier.tokens, strict=True)
        return self.answer([(*self.paths[above], int(token)) for above, token in grown], width)

    def answer(self, paths, width):
        self.paths = paths
        # By torch's attention: transformers' eager one rounds to float32.
        texts = [[*self.text, *path] for path in paths]
        rows = [plain_logits(self.model, text, "sdpa")[-1].numpy() for text in texts]
        scaled = np.array(rows) / self.temperature
        odds = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        q = odds / odds.sum(axis=1, keepdims=True)
        tokens = np.argsort(-q, axis=1)[:, :width]
        return tokens, np.take_along_axis(q, tokens, axis=1)


def drafter_of(model, **options):
    return CausalLMDrafter(target_of(model), **options)


def assert_same_tree(found, expected, rtol=1e-6):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.parents, expected.parents)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, rtol=rtol)


def accept_some(candidates, rng):
    """Tokens of a random path from the root, of any length."""
    row, path = 0, []
    while rng.random() < 0.8:
        below = np.flatnonzero(candidates.parents == row)
        if len(below) == 0:
            break
        row = int(rng.choice(below)) + 1
        path.append(int(candidates.tokens[row - 1]))
    return path


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("family", ["llama-gqa", "gpt-neox", "qwen3"])
def test_candidates_are_those_of_the_plain_model(family, growth):
    """Rounds with accepted paths of any length, plain rounds, and drafts made twice."""
    model, rule, rng = random_model(family), GROWTHS[growth], np.random.default_rng(7)
    rtol = 1e-9 if family == "gpt-neox" else 1e-6  # the other families' norms are in float32
    text = [int(token) for token in rng.integers(0, VOCAB, 12)]
    session = drafter_of(model).start(np.array(text), None)
    text.append(3)
    for turn in range(12):
        path = []
        if turn % 4 != 3:
            for _ in range(1 + turn % 2):
                found = session.draft(np.array(text), request(8, 16, rule, 0.8))
            assert_same_tree(found, grow(PlainSource(model, text, 0.8), rule, 8), rtol)
            assert len(found.tokens) > 0
            path = accept_some(found, rng)
        emitted = [*path, int(rng.integers(0, VOCAB))]
        session.observe(emitted, None)
        text += emitted


@pytest.mark.parametrize("plain_rounds", [CATCH_UP_ROWS - 2, CATCH_UP_ROWS + 5])
def test_many_plain_rounds_are_caught_up(plain_rounds):
    """Also beyond the room that the cache had at first."""
    model, rng = random_model("llama-gqa"), np.random.default_rng(3)
    rule = GROWTHS["top paths"]
    text = [int(token) for token in rng.integers(0, VOCAB, 230)]
    session = drafter_of(model).start(np.array(text), None)
    text.append(3)
    for rounds in (0, plain_rounds, plain_rounds):
        for token in rng.integers(0, VOCAB, rounds):
            session.observe([int(token)], None)
            text.append(int(token))
        found = session.draft(np.array(text), request(8, 16, rule))
        assert_same_tree(found, grow(PlainSource(model, text), rule, 8))
        session.observe([9], None)
        text.append(9)


class TestVocabularies:
    @pytest.fixture
    def load(self, tmp_path):
        def loading(name, write, **changed):
            folder = str(write(tmp_path / name, **changed))
            place = {"dtype": torch.float32, "device": torch.device("cpu")}
            return load_model(folder, weights="pretrained", **place)

        return loading

    def test_the_same_tokenizer_fits(self, load):
        check_vocabulary(load("a", write_all), load("b", write_all))

    def test_another_tokenizer_is_refused_by_name(self, load):
        def write(folder):
            path = write_all(folder) / "tokenizer.json"
            path.write_text(path.read_text().replace('"A":', '"AA":'))
            return folder

        with pytest.raises(InputError, match="tokenizer mismatch") as caught:
            check_vocabulary(load("other", write), load("b", write_all))
        assert "'A'" in caught.value.problem
        assert "other" in caught.value.problem

    def test_sizes_decide_where_there_is_no_tokenizer(self, load):
        check_vocabulary(load("a", write_weights), load("b", write_all))
        larger = load("c", write_weights, vocab_size=261)
        with pytest.raises(InputError, match="261 tokens and the target b one of 260"):
            check_vocabulary(larger, load("d/b", write_all))


def test_it_drafts_deeper_only_where_a_growth_rule_has_a_larger_depth_of_its_own():
    free = drafter_of(random_model("qwen3"))
    both = EnsembleDrafter(NgramDrafter(max_depth=3), free)
    for growth, deepest in (
        (TopPaths(), 8),
        (SINGLE_PATH, 8),
        (replace(SINGLE_PATH, max_depth=12), 12),
    ):
        found = [drafter.deepest(growth) for drafter in (free, both, NgramDrafter(4))]
        assert found == [deepest, deepest, 4]
