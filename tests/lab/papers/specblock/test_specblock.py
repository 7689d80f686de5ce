"""The SpecBlock drafter against a reference of single rows, and its checkpoints."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from costmodel.errors import InputError
from decoder.drafters import caches
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from decoder.profiling.probe import steady_draft
from decoder.profiling.startup import ProfileChoice
from decoder.tree.draft_tree import DraftTree
from lab.papers.specblock import drafter as specblock
from lab.papers.specblock.drafter import Blocks, SpecBlockDrafter
from lab.papers.specblock.tree import BlockGrowth
from tests.decoder.draft_models import VOCAB, draft_target, rounds
from tests.decoder.models import greedy
from tests.lab.papers.specblock.specblock_models import (
    LENGTH,
    SPECBLOCK,
    Reference,
    asked,
    nodes_of,
    reference_tree,
    specblock_folder,
)
from tests.tiny_folder import isolate

PROMPT = [5, 17, 3, 88, 41]
ACCEPTED = [3, 0, 0, 1]  # 0: a plain round, or one where nothing was accepted
PLAIN = 2  # a round of these in which nothing is drafted
BRANCHING = tuple(SPECBLOCK["branching"])
VARIANTS = {
    "published": {},
    "fallback": {"branching": [2, 4, 6, 4]},
    "all-tokens": {"draft_vocab_size": VOCAB},
    "three-layers-of-three": {"num_hidden_layers": 3, "block_length": 3},
    "normed-heads": {"qk_norm": True, "head_dim": 16, "num_attention_heads": 2},
    "own-head": {"own_head": True},
    "no-shift": {"layer_shift": False},
    "no-broadcast": {"prefix_broadcast": False},
}


def drafting(tmp_path, prompt=PROMPT, accepted=(2,), growth=None, **changed):
    """A session in the middle of a text, with the reference of the same place."""
    target = draft_target(dtype=torch.float64)
    folder, config, tensors = specblock_folder(tmp_path / "draft", **changed)
    drafter = SpecBlockDrafter(target, folder, growth)
    *_, (session, context) = rounds(target, drafter, prompt, accepted)
    return drafter, session, context, Reference(config, tensors, target, context)


class TestAgainstTheReference:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_several_rounds(self, tmp_path, variant):
        changed, prompt = VARIANTS[variant], PROMPT if variant != "published" else [9]
        target = draft_target(dtype=torch.float64)
        folder, config, tensors = specblock_folder(tmp_path / "draft", **changed)
        drafter = SpecBlockDrafter(target, folder)
        for round_, (session, context) in enumerate(rounds(target, drafter, prompt, ACCEPTED)):
            if round_ == PLAIN:
                continue
            tree = session.draft(context, asked())
            reference = Reference(config, tensors, target, context)
            expected = reference_tree(reference, branching=config["branching"])
            assert nodes_of(tree) == pytest.approx(expected, abs=1e-6)
            again = session.draft(context, asked())
            np.testing.assert_array_equal(again.tokens, tree.tokens)
            np.testing.assert_array_equal(again.probabilities, tree.probabilities)

    def test_every_position_of_the_first_block(self, tmp_path):
        """K positions of one forward are those of rows run one after another."""
        drafter, _, context, reference = drafting(tmp_path)
        blocks = first_blocks(drafter, context)
        rows, _ = reference.first_block()
        for logits, ranks, row in zip(blocks.logits, blocks.ranks, rows, strict=True):
            expected, bucket = reference.read(row)
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            assert int(ranks.argmax()) == bucket

    def test_the_shift_and_the_broadcast_are_seen_in_the_output(self, tmp_path):
        """A reference that lacks either is told apart from the second position on."""
        drafter, _, context, whole = drafting(tmp_path)
        blocks = first_blocks(drafter, context)
        for part in ("layer_shift", "prefix_broadcast"):
            lacking = Reference(
                SPECBLOCK | {part: False},
                {
                    n: t
                    for n, t in whole.stored.items()
                    if part != "layer_shift" or "shift" not in n
                },
                drafter.target,
                context,
            )
            rows, _ = lacking.first_block()
            apart = (blocks.logits[1] - lacking.read(rows[1])[0]).abs().max()
            assert apart > 1e-2

    @pytest.mark.parametrize("place", range(LENGTH))
    def test_a_block_chained_from_any_position_is_one_started_there(self, tmp_path, place):
        """Alone or in a batch, and with a third block behind it."""
        drafter, _, context, reference = drafting(tmp_path)
        rows, above = reference.first_block()
        tokens = [7, 44]
        expected = [reference.next_block(rows, above, place, token) for token in tokens]
        third = reference.next_block(*expected[1], 1, 23)
        blocks = first_blocks(drafter, context)
        batch = [place, LENGTH - 1, place]
        numbers = blocks.more(np.array(batch), np.array([tokens[0], 5, tokens[1]]))
        together = blocks.logits.unflatten(0, (3, LENGTH))
        for drafted, (made, _) in zip((together[0], together[2]), expected, strict=True):
            for logits, row in zip(drafted, made, strict=True):
                torch.testing.assert_close(logits, reference.read(row)[0], atol=1e-5, rtol=1e-5)
        blocks.more(numbers[2:3, 1], np.array([23]))
        for logits, row in zip(blocks.logits, third[0], strict=True):
            torch.testing.assert_close(logits, reference.read(row)[0], atol=1e-5, rtol=1e-5)
        alone = first_blocks(drafter, context)
        alone.more(np.array([place]), np.array(tokens[:1]))
        torch.testing.assert_close(alone.logits, together[0], atol=1e-5, rtol=1e-5)

    def test_request_and_growth(self, tmp_path):
        growth = BlockGrowth(branching=(3, 2, 5, 1), blocks=3, starts=2, nodes=23)
        drafter, session, context, reference = drafting(tmp_path, growth=growth)
        assert drafter.max_depth == 12
        for limits in ({"depth": 2}, {"depth": 5}, {"width": 1}, {"temperature": 0.6}, {}):
            expected = reference_tree(
                reference, branching=growth.branching, blocks=3, starts=2, nodes=23, **limits
            )
            tree = session.draft(context, asked(**limits))
            assert nodes_of(tree) == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("untrained", [False, True])
    def test_without_a_rank_head_the_tree_is_uniform(self, tmp_path, untrained):
        """Also where one is there that was not trained yet."""
        target = draft_target(dtype=torch.float64)
        changed = {} if untrained else {"rank_head": False}
        folder, config, tensors = specblock_folder(tmp_path / "draft", **changed)
        tensors["examples"] = torch.tensor([9, 0])
        save_file(tensors, folder / "model.safetensors")
        drafter = SpecBlockDrafter(target, folder)
        assert drafter.name == "specblock:no-rank-head"
        *_, (session, context) = rounds(target, drafter, PROMPT, [1])
        tree = session.draft(context, asked())
        assert len(tree.tokens) == 60 and max(map(len, nodes_of(tree))) > LENGTH
        reference = Reference(config, tensors, target, context)
        expected = reference_tree(reference, branching=(3, 3, 3, 3), uncertain=(0, 1, 2, 3))
        assert nodes_of(tree) == pytest.approx(expected, abs=1e-6)

    def test_prompts_in_chunks_and_many_plain_rounds(self, tmp_path, monkeypatch):
        """Prompts go in by chunks, features wait for long, and then go in by chunks too."""
        monkeypatch.setattr(specblock, "CHUNK_ROWS", 5)
        monkeypatch.setattr(caches, "WAITING_ROWS", 4)
        prompt = np.random.default_rng(0).integers(VOCAB, size=12).tolist()
        _, session, context, reference = drafting(tmp_path, prompt, [0] * 13)
        expected = reference_tree(reference, branching=BRANCHING)
        for _ in range(2):
            assert nodes_of(session.draft(context, asked())) == pytest.approx(expected, abs=1e-6)

    def test_drawn_trees_are_drawn_from_q(self, tmp_path):
        """Children come from the block's next position, and behind its end from a new block."""
        _, session, context, reference = drafting(tmp_path, block_length=2, rank_head=False)
        #         1  2  3  4  5  6  7  8
        parents = [0, 0, 1, 1, 2, 3, 5, 6]
        depths = np.array([1, 1, 2, 2, 2, 3, 3, 4])
        shape = DraftTree(np.zeros(8, np.int64), np.array(parents), depths, np.ones(8))
        tree = session.draw(context, shape, 0.8, torch.Generator().manual_seed(3))
        np.testing.assert_array_equal(tree.parents, parents)
        rows, above = reference.first_block()
        below = {
            row: reference.next_block(rows, above, 1, int(tree.tokens[row - 1])) for row in (3, 5)
        }
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

    @pytest.mark.parametrize("seed", [1, 2, 3])
    @pytest.mark.parametrize("branching", [[2, 4, 3, 5], [1, 2, 0, 3]])
    def test_the_rank_head_bounds_the_children_of_drawn_trees(self, tmp_path, seed, branching):
        """Six children of the root, of its first and of its second child, and of one below."""
        _, session, context, reference = drafting(
            tmp_path, block_length=2, seed=seed, branching=branching
        )
        parents = [0] * 6 + [1] * 6 + [2] * 6 + [7] * 6
        depths = np.array([1] * 6 + [2] * 12 + [3] * 6)
        shape = DraftTree(np.zeros(24, np.int64), np.array(parents), depths, np.ones(24))
        tree = session.draw(context, shape, 0.8, torch.Generator().manual_seed(3))
        rows, above = reference.first_block()
        first, second = (branching[reference.read(row)[1]] for row in rows)
        counts = [min(first, 6), min(second, 6) if first > 0 else 0]
        assert np.count_nonzero(tree.depths == 1) == counts[0]
        assert np.count_nonzero(tree.depths == 2) == counts[1] * min(counts[0], 2)
        expected = 0
        if counts[0] and counts[1]:
            token = int(tree.tokens[tree.children(1)[0] - 1])
            below, _ = reference.next_block(rows, above, 1, token)
            expected = min(branching[reference.read(below[0])[1]], 6)
        assert np.count_nonzero(tree.depths == 3) == expected

    def test_an_unobserved_round_is_noticed(self, tmp_path):
        _, session, context, _ = drafting(tmp_path)
        with pytest.raises(InputError, match="features of 8 tokens and the context has 10"):
            session.draft(np.append(context, 3), asked())
        with pytest.raises(InputError, match="needs the target's features"):
            session.observe([3], None)


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


POLICIES = ["fixed:60", "fixed:7", "chain", "bastion", "plain", "beam:3x6", "static-tree:5x2"]


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

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("family", ["qwen3", "llama"])
    def test_greedy_output_is_that_of_plain_decoding(self, tmp_path, family, policy):
        decoder = decoder_with(specblock_folder(tmp_path / "draft")[0], family, policy)
        for prompt in (PROMPT, [9]):
            result = decoder.generate(prompt, max_new_tokens=30)
            assert result.token_ids == greedy(decoder.target.model, prompt, 30)

    def test_accepted_rows_that_lie_apart(self, tmp_path):
        """With all tokens as siblings every round accepts at least one."""
        folder = specblock_folder(tmp_path / "draft", draft_vocab_size=VOCAB)[0]
        wide = BlockGrowth(branching=(VOCAB,) * 4, uncertain=(0, 1, 2, 3), starts=97, nodes=9000)
        decoder = decoder_with(folder, "qwen3", "fixed:500", wide)
        result = decoder.generate(PROMPT, max_new_tokens=24)
        assert result.token_ids == greedy(decoder.target.model, PROMPT, 24)
        assert result.stats.accepted_tokens >= 11

    def test_prompts_together_are_what_they_are_alone(self, tmp_path):
        folder = specblock_folder(tmp_path / "draft")[0]
        decoder = decoder_with(folder, "qwen3", "fixed:60")
        prompts = [PROMPT[:length] for length in (1, 4, 5, 2)]
        together = decoder.generate_batch(prompts, max_new_tokens=20)
        for prompt, result in zip(prompts, together, strict=True):
            assert result.token_ids == greedy(decoder.target.model, prompt, 20)

    @pytest.mark.parametrize("rule", ["walk", "recursive", "traversal"])
    def test_sampling_is_repeatable_under_every_rule(self, tmp_path, rule):
        folder = specblock_folder(tmp_path / "draft")[0]
        decoder = decoder_with(folder, "qwen3", "fixed:40", acceptance=rule)
        texts = [
            decoder.generate(PROMPT, max_new_tokens=20, temperature=1.0, seed=seed).token_ids
            for seed in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]

    def test_timing_drafts_the_same_each_time(self, tmp_path):
        target = draft_target()
        drafter = load_drafter(str(specblock_folder(tmp_path / "draft")[0]), target)
        draft = steady_draft(drafter, target, 40)
        np.testing.assert_array_equal(draft().probabilities, draft().probabilities)
