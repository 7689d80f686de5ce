"""The SpecBlock drafter against a reference of single rows, and its checkpoints."""

import numpy as np
import pytest
import torch

from decoder.drafters import caches
from decoder.engine import TreeDecoder
from decoder.profiling.startup import ProfileChoice
from decoder.tree.draft_tree import DraftTree
from lab.papers.specblock import drafter as specblock
from lab.papers.specblock.drafter import Blocks, SpecBlockDrafter
from lab.papers.specblock.tree import REPOSITORY, BlockGrowth
from tests.decoder.draft_models import VOCAB, draft_target, rounds
from tests.decoder.models import as_paths, greedy
from tests.lab.papers.specblock import specblock_models as made
from tests.lab.papers.specblock.specblock_models import LENGTH, Reference, asked, specblock_folder
from tests.tiny_folder import isolate

PROMPT = [5, 17, 3, 88, 41]
ACCEPTED = [3, 0, 0, 1]  # 0: a plain round, or one where nothing was accepted
PLAIN = 2  # a round of these in which nothing is drafted
VARIANTS = {
    "llama": ({}, BlockGrowth()),
    "qwen": ({"like": made.QWEN}, BlockGrowth()),
    "repository": ({}, REPOSITORY),
    "three-blocks": ({"num_hidden_layers": 3, "diffspec_draft_token_num": 3, "feature_layers":
                     [1, 3, 5]}, BlockGrowth(blocks=3, branching=(1, 2, 3, 0), beam=2)),
    "all-tokens": ({"draft_vocab_size": VOCAB}, BlockGrowth()),
    "no-shift": ({"layer_shift": False}, BlockGrowth()),
    "no-broadcast": ({"prefix_broadcast": False}, BlockGrowth()),
}  # fmt: skip


def drafting(tmp_path, prompt=PROMPT, accepted=(2,), growth=None, dtype=torch.float64, **changed):
    """A session in the middle of a text, with the reference of the same place."""
    target = draft_target(dtype=dtype)
    folder, config, tensors = specblock_folder(tmp_path / "draft", **changed)
    drafter = SpecBlockDrafter(target, folder, growth)
    *_, (session, context) = rounds(target, drafter, prompt, accepted)
    return drafter, session, context, Reference(config, tensors, target, context)


class TestAgainstTheReference:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_several_rounds(self, tmp_path, variant):
        (changed, growth), llama = VARIANTS[variant], variant == "llama"
        target = draft_target("llama" if llama else "qwen3", dtype=torch.float64)
        prompt = [9] if llama else PROMPT
        folder, config, tensors = specblock_folder(tmp_path / "draft", **changed)
        drafter = SpecBlockDrafter(target, folder, growth)
        for round_, (session, context) in enumerate(rounds(target, drafter, prompt, ACCEPTED)):
            if round_ == PLAIN:
                continue
            tree = session.draft(context, asked())
            reference = Reference(config, tensors, target, context)
            expected = made.reference_tree(reference, growth)
            assert as_paths(tree) == pytest.approx(expected, abs=1e-5)
            again = session.draft(context, asked())
            np.testing.assert_array_equal(again.tokens, tree.tokens)
            np.testing.assert_array_equal(again.probabilities, tree.probabilities)

    @pytest.mark.parametrize("place", range(LENGTH))
    def test_a_block_chained_from_any_position_is_one_started_there(self, tmp_path, place):
        """Alone or in a batch, and with a third block behind it; in float32, buckets too."""
        drafter, _, context, reference = drafting(tmp_path, dtype=torch.float32)
        rows, above = reference.first_block()
        tokens = [7, 44]
        expected = [reference.next_block(rows, above, place, token) for token in tokens]
        third = reference.next_block(*expected[1], 1, 23)
        blocks = first_blocks(drafter, context)
        batch = [place, LENGTH - 1, place]
        numbers = blocks.more(np.array(batch), np.array([tokens[0], 5, tokens[1]]))
        together = blocks.logits.unflatten(0, (3, LENGTH))
        for drafted, (wanted, _) in zip((together[0], together[2]), expected, strict=True):
            assert_rows(reference, wanted, drafted)
        buckets = blocks.ranks.argmax(-1).view(3, LENGTH)[0].tolist()
        assert buckets == [reference.read(row)[1] for row in expected[0][0]]
        blocks.more(numbers[2:3, 1], np.array([23]))
        assert_rows(reference, third[0], blocks.logits)
        alone = first_blocks(drafter, context)
        alone.more(np.array([place]), np.array(tokens[:1]))
        torch.testing.assert_close(alone.logits, together[0], atol=1e-5, rtol=1e-5)

    def test_prompts_in_chunks_and_many_plain_rounds(self, tmp_path, monkeypatch):
        """Prompts go in by chunks, features wait for long, and then go in by chunks too."""
        monkeypatch.setattr(specblock, "CHUNK_ROWS", 12)
        monkeypatch.setattr(caches, "WAITING_ROWS", 4)
        prompt = np.random.default_rng(0).integers(VOCAB, size=12).tolist()
        _, session, context, reference = drafting(tmp_path, prompt, [0] * 13)
        expected = made.reference_tree(reference, BlockGrowth())
        for _ in range(2):
            assert as_paths(session.draft(context, asked())) == pytest.approx(expected, abs=1e-6)

    def test_drawn_trees_are_drawn_from_q(self, tmp_path):
        """Children come from the block's next position, and behind its end from a new block."""
        short = {"diffspec_draft_token_num": 2, "rank_head": False}
        _, session, context, reference = drafting(tmp_path, **short)
        #         1  2  3  4  5  6  7  8
        parents = [0, 0, 1, 1, 2, 3, 5, 6]
        depths = np.array([1, 1, 2, 2, 2, 3, 3, 4])
        shape = DraftTree(np.zeros(8, np.int64), np.array(parents), depths, np.ones(8))
        tree = session.draw(context, shape, 0.8, torch.Generator().manual_seed(3))
        np.testing.assert_array_equal(tree.parents, parents)
        rows, above = reference.first_block()
        tokens = {row: int(tree.tokens[row - 1]) for row in (3, 5)}
        below = {row: reference.next_block(rows, above, 1, tokens[row]) for row in tokens}
        given = {0: rows[0], 1: rows[1], 2: rows[1], 3: below[3][0][0], 5: below[5][0][0]}
        given[6] = below[3][0][1]
        for row, source in given.items():
            q = (reference.read(source)[0] / 0.8).softmax(0)
            expected = torch.zeros(VOCAB).double()
            expected[reference.tokens] = q
            drawn = tree.q[tree.sources[row]].double()
            torch.testing.assert_close(drawn, expected, atol=1e-6, rtol=1e-5)
        for row in {0, 1, 3}:
            tokens = tree.tokens[np.array(parents) == row].tolist()
            assert len(set(tokens)) == len(tokens)


def assert_rows(reference, rows, logits):
    """Logits [K, draft_vocab] are those of the reference's rows."""
    expected = torch.stack([reference.read(row)[0] for row in rows])
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)


def first_blocks(drafter, context):
    """The first block's forward behind this context."""
    target = drafter.target
    target.reserve(64)
    target.prefill(torch.from_numpy(context[:-1]))
    conditions = drafter.model.condition(target.features())
    session = drafter.start(context[:-1], target.features())
    with torch.inference_mode():
        blocks = Blocks(drafter, session._cache, conditions[-1:], drafter.embed(context[-1:]))
        blocks.first()
    return blocks


def decoder_with(folder, family, policy, growth=None, **options):
    target = draft_target(family, torch.float64)
    drafter = SpecBlockDrafter(target, folder, growth)
    choice = ProfileChoice(calibrate=False)
    return TreeDecoder(target, drafter=drafter, policy=policy, profile=choice, **options)


@pytest.mark.slow
class TestWholeGenerations:
    @pytest.fixture(autouse=True)
    def home(self, monkeypatch, tmp_path):
        """A data directory of one's own, and peaks that are known at once."""
        isolate(monkeypatch, tmp_path)

    def test_prompts_together_are_what_they_are_alone(self, tmp_path):
        folder = specblock_folder(tmp_path / "draft")[0]
        decoder = decoder_with(folder, "qwen3", "fixed:60")
        prompts = [PROMPT[:length] for length in (1, 4, 5, 2)]
        together = decoder.generate_batch(prompts, max_new_tokens=20)
        for prompt, result in zip(prompts, together, strict=True):
            assert result.token_ids == greedy(decoder.target.model, prompt, 20)
