"""SpecBlock's training: its rows against single rows, its losses against loops, its ablations."""

import math

import numpy as np
import pytest
import torch

from decoder.drafters.blocks import Rotary
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import SpecBlockConfig, SpecBlockModel, save_specblock
from lab.papers.specblock.training.objective import Scored, draft_losses, rank_labels, valid_prefix
from lab.papers.specblock.training.rows import Passage, run_blocks
from tests.decoder.draft_models import draft_target, random_tensors
from tests.lab.papers.specblock.specblock_models import (
    SPECBLOCK,
    Reference,
    drafted_tokens,
    example_of,
    seeded,
    settings,
    some_text,
    specblock_objective,
    specblock_shapes,
)


class TestRows:
    @pytest.mark.parametrize("part", ["whole", "layer_shift", "prefix_broadcast"])
    def test_three_blocks_from_several_anchors(self, part):
        """Each is what rows run one after another give behind the text up to its anchor."""
        config = SPECBLOCK | {part: False}
        tensors = random_tensors(specblock_shapes(config))
        tensors |= {"tokens": drafted_tokens(41), "examples": torch.tensor([1, 1])}
        target, text = draft_target(runtime="eager"), some_text()
        parsed = SpecBlockConfig.parse(config)
        model = SpecBlockModel(parsed)
        model.load_state_dict(tensors, strict=False)
        example = example_of(target, text, 4)
        embeddings = target.embed(example.tokens)
        anchors, cuts = torch.tensor([3, 4, 11]), torch.tensor([[1, 4, 2], [3, 2, 4]])
        singles = torch.tensor([2, 4, 9])
        with torch.inference_mode():
            rounds = run_blocks(
                model,
                Rotary(parsed.shape, target.device),
                Passage(example.tokens, example.features, embeddings),
                anchors,
                cuts,
                singles,
            )
        alone = rounds.pop()
        assert alone.hidden.shape[:2] == (3, 1)
        for row, after, hidden in zip(singles.tolist(), alone.after, alone.hidden, strict=True):
            reference = Reference(config, tensors, target, np.array(text[: row + 2]))
            expected = reference.hidden[reference.first_block()[0][0]].float()
            assert after == row + 1
            torch.testing.assert_close(hidden[0], expected, atol=2e-4, rtol=2e-4)
        for number, anchor in enumerate(anchors.tolist()):
            reference = Reference(config, tensors, target, np.array(text[: anchor + 2]))
            (rows, above), after = reference.first_block(), anchor + 1
            for block, drafted in enumerate(rounds):
                assert drafted.after[number] == after
                for row, hidden in zip(rows, drafted.hidden[number], strict=True):
                    expected = reference.hidden[row].float()
                    torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=2e-4)
                if block < len(cuts):
                    place = int(cuts[block, number]) - 1
                    after += place + 1
                    rows, above = reference.next_block(rows, above, place, text[after])


class TestValidPrefix:
    def test_by_hand(self):
        hits = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 0, 0]]).bool()
        inside = torch.ones_like(hits)
        inside[3, 2:] = False
        assert valid_prefix(hits, inside).int().tolist() == [
            [1, 1, 1, 1],
            [1, 1, 0, 0],
            [1, 0, 0, 0],
            [1, 1, 0, 0],
        ]

    def test_losses_as_loops(self):
        """Equations (5) and (6) and the labels, written out."""
        generator = seeded(3)
        anchors, length, vocab = 9, 4, 13
        logits = torch.randn(anchors, length, vocab, generator=generator)
        wanted = torch.randn(anchors, length, vocab, generator=generator).softmax(-1)
        ids = logits.argmax(-1)
        wrong = torch.rand(anchors, length, generator=generator) < 0.4
        ids[wrong] = torch.randint(vocab, (int(wrong.sum()),), generator=generator)
        ids[1, 1] = ids[4, 0] = -1
        inside = torch.ones(anchors, length, dtype=torch.bool)
        inside[2, 3:] = inside[5, 1:] = False
        scored = Scored(logits, None, wanted, ids, inside)
        mask = valid_prefix(scored.matches(), inside)
        p = logits.softmax(-1).tolist()
        expected, labels = [], rank_labels(scored)
        for k in range(length):
            losses = []
            for a in range(anchors):
                m = 1
                for before in range(k):
                    best = max(range(vocab), key=lambda v, a=a, j=before: p[a][j][v])
                    m *= int(best == int(ids[a, before]))
                m *= int(inside[a, k])
                assert int(mask[a, k]) == m
                own = int(ids[a, k])
                if m and own >= 0:
                    target = wanted[a, k].tolist()
                    losses.append(-sum(target[v] * math.log(p[a][k][v]) for v in range(vocab)))
                rank = 99 if own < 0 else sorted(p[a][k], reverse=True).index(p[a][k][own]) + 1
                bucket = 0 if rank == 1 else 1 if rank <= 4 else 2 if rank <= 10 else 3
                assert int(labels[a, k]) == bucket
            expected.append(sum(losses) / anchors)
        assert draft_losses(scored, mask).tolist() == pytest.approx(expected, rel=1e-5)


class TestObjective:
    def objective(self, **changed):
        target = draft_target(runtime="eager")
        return target, specblock_objective(target.loaded, settings(**changed), seeded(1))

    def gradients(self, objective, example, step):
        objective.model.zero_grad(set_to_none=True)
        loss, figures = objective.loss(example, seeded(2), step)
        loss.backward()
        named = objective.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}, figures

    def test_the_rank_head_joins_later_and_leaves_the_trunk_alone(self):
        target, objective = self.objective(rank_from_step=10)
        example = example_of(target, some_text(), 4)
        early, early_figures = self.gradients(objective, example, 9)
        assert objective.model.examples.tolist() == [1, 0] and not objective.model.ranked
        late, late_figures = self.gradients(objective, example, 10)
        assert objective.model.examples.tolist() == [2, 1] and objective.model.ranked
        assert "rank_loss" in late_figures and "rank_loss" not in early_figures
        assert {name for name in late if name not in early} == {
            *("rank.inner.weight", "rank.inner.bias", "rank.outer.weight", "rank.outer.bias")
        }
        for name, gradient in early.items():
            torch.testing.assert_close(late[name], gradient, atol=0, rtol=0)
            assert gradient.abs().sum() > 0
        assert len(early) == len(list(objective.model.parameters())) - 4 - 1

    @pytest.mark.parametrize(
        ("name", "absent"),
        [
            ("no-shift", "layers.1.shift.weight"),
            ("no-rank-head", "rank.inner.weight"),
            ("no-broadcast", None),
            ("no-mask", None),
        ],
    )
    def test_ablations_train_and_are_named(self, tmp_path, name, absent):
        target, objective = self.objective(without=frozenset({name}), rank_from_step=0)
        gradients, figures = self.gradients(objective, example_of(target, some_text(), 4), 5)
        assert absent not in gradients
        assert ("rank_loss" in figures) == (name != "no-rank-head")
        save_specblock(tmp_path / "draft", objective.model)
        assert SpecBlockDrafter(target, tmp_path / "draft").name == f"specblock:{name}"
