"""The SpecBlock drafter against a reference of single rows, its trees and its checkpoints."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from costmodel.errors import InputError
from decoder.drafters import caches
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from lab.papers.specblock import drafter as specblock
from lab.papers.specblock import tree as trees
from lab.papers.specblock.drafter import Blocks, SpecBlockDrafter
from lab.papers.specblock.model import save_specblock
from lab.papers.specblock.tree import REPOSITORY, BlockGrowth, BlockTree
from tests.decoder.draft_models import EAGLE3, VOCAB, draft_target, rounds
from tests.decoder.models import as_paths, greedy, request, shaped
from tests.lab.papers.specblock import specblock_models as made
from tests.lab.papers.specblock.specblock_models import LENGTH, Reference, specblock_folder

PROMPT = [5, 17, 3, 88, 41]
ACCEPTED = [3, 0, 0, 1]  # 0: a plain round, or one where nothing was accepted
PLAIN = 2  # a round of these in which nothing is drafted
COMPARED = (1, 4)  # behind accepted tokens, and behind the plain round
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
            tree = session.draft(context, request(99, 64))
            if round_ in COMPARED:
                reference = Reference(config, tensors, target, context)
                expected = made.reference_tree(reference, growth)
                assert as_paths(tree) == pytest.approx(expected, abs=1e-5)
            again = session.draft(context, request(99, 64))
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
            found = as_paths(session.draft(context, request(99, 64)))
            assert found == pytest.approx(expected, abs=1e-6)

    def test_drawn_trees_are_drawn_from_q(self, tmp_path):
        """Children come from the block's next position, and behind its end from a new block."""
        short = {"diffspec_draft_token_num": 2, "rank_head": False}
        _, session, context, reference = drafting(tmp_path, **short)
        #         1  2  3  4  5  6  7  8
        parents = [0, 0, 1, 1, 2, 3, 5, 6]
        tree = session.draw(context, shaped(parents), 0.8, torch.Generator().manual_seed(3))
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


@pytest.mark.slow
def test_prompts_together_are_what_they_are_alone(tmp_path):
    target = draft_target(dtype=torch.float64)
    drafter = SpecBlockDrafter(target, specblock_folder(tmp_path / "draft")[0])
    decoder = TreeDecoder(target, drafter=drafter, policy="fixed:60")
    prompts = [PROMPT[:length] for length in (1, 4, 5, 2)]
    together = decoder.generate_batch(prompts, max_new_tokens=20)
    for prompt, result in zip(prompts, together, strict=True):
        assert result.token_ids == greedy(target.model, prompt, 20)


class Tables:
    """Random distributions and buckets of every block, in the place of a drafter.

    A row is its block's path of start tokens and its position.
    """

    def __init__(self, seed, length, width):
        self.seed, self.length, self.width = seed, length, width
        self.places = range(length)

    def drawn(self, path):
        random = np.random.default_rng([self.seed, *path])
        tokens = np.stack([random.permutation(self.width + 5)[: self.width] for _ in self.places])
        q = -np.sort(-random.dirichlet(np.ones(self.width), self.length), axis=1)
        return tokens, q, random.integers(0, 4, self.length)

    def first_block(self):
        return [((), place) for place in self.places], ()

    def next_block(self, rows, above, place, token):
        start = (*rows[place][0], place, token)
        return [(start, k) for k in self.places], ()

    def read(self, row):
        return None, int(self.drawn(row[0])[2][row[1]])

    def best(self, row, count, temperature):
        tokens, q, _ = self.drawn(row[0])
        return list(zip(tokens[row[1]][:count].tolist(), q[row[1]][:count].tolist(), strict=True))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 4),
    depth=st.integers(1, 12),
    width=st.integers(1, 12),
    growth=st.builds(
        BlockGrowth,
        branching=st.sampled_from([trees.CONCENTRATED, trees.FALLBACK, (3, 3, 3, 3), (0, 1, 2, 3)]),
        adaptive=st.booleans(), blocks=st.integers(1, 3), beam=st.integers(1, 5),
        nodes=st.integers(1, 60),
    ),
)  # fmt: skip
def test_trees_of_random_tables(seed, length, depth, width, growth):
    tables = Tables(seed, length, growth.widest)
    tree, paths = BlockTree(growth, depth, width), [()]
    for _ in range(growth.blocks):
        drawn = [tables.drawn(path) for path in paths]
        tree.attach(*(np.stack(part) for part in zip(*drawn, strict=True)))
        s = tree.starts
        starts = zip(s.blocks, s.positions.tolist(), s.tokens.tolist(), strict=True)
        paths = [(*paths[block], position, token) for block, position, token in starts]
        if not paths:
            break
    expected = made.reference_tree(tables, growth, depth, width)
    assert as_paths(tree.candidates()) == pytest.approx(expected)


class TestCheckpoints:
    def test_saving_gives_the_same_files(self, tmp_path):
        """In the released names, with the counts of texts that ours have too."""
        folder, config, tensors = specblock_folder(tmp_path / "released")
        save_specblock(tmp_path / "saved", SpecBlockDrafter(draft_target(), folder).model)
        assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert set(saved) == {*tensors, "examples"}
        for name, tensor in tensors.items():
            torch.testing.assert_close(saved[name], tensor, atol=0, rtol=0)

    def test_both_released_kinds_are_told_from_eagle3(self, tmp_path):
        """Their configs have all fields of an EAGLE-3 drafter's."""
        for like in (made.SPECBLOCK, made.QWEN):
            folder = specblock_folder(tmp_path / "draft", like=like)[0]
            drafter = load_drafter(str(folder), draft_target("llama"))
            assert isinstance(drafter, SpecBlockDrafter) and drafter.name == "specblock"
            assert drafter.feature_layers == (2, 3, 3) and drafter.max_depth == 8
        assert not SpecBlockDrafter.recognises(EAGLE3)
        named = specblock_folder(tmp_path / "named", tree="repository", branching=[1, 2, 3, 4])[0]
        growths = [drafter.growth, SpecBlockDrafter(draft_target(), named).growth]
        assert growths == [trees.PUBLISHED, replace(REPOSITORY, branching=(1, 2, 3, 4))]
        (folder / "config.json").write_text(json.dumps({"architectures": ["SpecBlockDraftModel"]}))
        with pytest.raises(InputError, match="is of SpecBlockDraftModel, not of"):
            load_drafter(str(folder), draft_target())


BAD_CONFIGS = {
    "another target's vocabulary": ({"vocab_size": 98}, "vocabulary is 98, the target's is 97"),
    "heads of odd width": ({"hidden_size": 36}, "'hidden_size' must be an even multiple of 4"),
    "other buckets": ({"rank_classes": 5}, "rank_classes = 5, which is not supported"),
    "too many draft ids": ({"draft_vocab_size": 98}, "'draft_vocab_size' must be at most"),
    "features that are not there": ({"feature_layers": [1, 3, 6]}, "reads hidden state 6"),
    "a wild branching": ({"branching": [1, 2, 3, 999]}, "at most 64"),
    "no positions": ({"diffspec_draft_token_num": 0}, "must be a whole number of at least 1"),
    "a part that is a word": ({"layer_shift": "yes"}, "'layer_shift' must be true or false"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
}


class TestBadInput:
    @pytest.mark.parametrize("case", BAD_CONFIGS)
    def test_configs(self, tmp_path, case):
        changed, message = BAD_CONFIGS[case]
        folder = specblock_folder(tmp_path / "draft", **changed)[0]
        with pytest.raises(InputError, match=message):
            SpecBlockDrafter(draft_target(), folder)

    @pytest.mark.parametrize(("name", "change", "message"), [
        ("d2t", lambda t: t + 97, "do not name the same 41 tokens of the vocabulary of 97"),
        ("d2t", lambda t: t * 0, "do not name the same 41 tokens of the vocabulary of 97"),
        ("t2d", lambda t: ~t, "do not name the same 41 tokens of the vocabulary of 97"),
        ("d2t", lambda t: t.float(), "must hold torch.int64 and is torch.float32"),
    ])  # fmt: skip
    def test_damaged_numbers(self, tmp_path, name, change, message):
        folder, _, tensors = specblock_folder(tmp_path / "draft")
        save_file(tensors | {name: change(tensors[name])}, folder / "model.safetensors")
        with pytest.raises(InputError, match=message):
            SpecBlockDrafter(draft_target(), folder)
