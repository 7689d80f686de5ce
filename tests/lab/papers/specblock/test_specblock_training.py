"""SpecBlock's training: its rows against single rows, its losses against loops, its ablations."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from decoder.drafters.blocks import Rotary
from lab.commands.train_drafter import with_settings
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.figures import lines, measure
from lab.papers.specblock.model import SpecBlockConfig, SpecBlockModel, save_specblock
from lab.papers.specblock.training.objective import (
    Passage,
    Scored,
    SpecBlockSettings,
    draft_losses,
    rank_labels,
    run_blocks,
    valid_prefix,
)
from lab.papers.specblock.training.recipe import RUN
from lab.training.corpus import Collecting
from lab.training.loop import learning_rate, train
from profiler.commands.options import NamedValue
from tests.decoder.draft_models import draft_target, mapping, random_tensors
from tests.lab.papers.specblock import specblock_models as made
from tests.lab.papers.specblock.specblock_models import QWEN, example_of, seeded, some_text


@pytest.mark.parametrize("part", ["whole", "layer_shift", "prefix_broadcast"])
def test_three_blocks_from_several_anchors(part):
    """Each is what rows run one after another give behind the text up to its anchor."""
    config = made.SPECBLOCK | {part: False}
    tensors = random_tensors(made.specblock_shapes(config)) | mapping(config)
    target, text = draft_target(runtime="eager"), some_text()
    parsed = SpecBlockConfig.parse(config)
    model = SpecBlockModel(parsed)
    model.load_state_dict(tensors, strict=False)
    example = example_of(target, text, 4)
    embeddings = target.embed(example.tokens)
    anchors, cuts = torch.tensor([3, 4, 9, 11]), torch.tensor([[1, 4, 2], [3, 2, 4]])
    chained = [0, 1, 3]
    with torch.inference_mode():
        first, *rounds = run_blocks(
            model, Rotary(parsed.shape, target.device),
            Passage(example.tokens, example.features, embeddings), anchors, cuts,
            torch.tensor(chained),
        )  # fmt: skip
    blocks = {anchor: [(h, a)] for anchor, h, a in zip(
        anchors.tolist(), first.hidden, first.after, strict=True)}  # fmt: skip
    for drafted in rounds:
        for place, hidden, after in zip(chained, drafted.hidden, drafted.after, strict=True):
            blocks[int(anchors[place])].append((hidden, after))
    assert [len(own) for own in blocks.values()] == [3, 3, 1, 3]
    for anchor, own in blocks.items():
        reference = made.Reference(config, tensors, target, np.array(text[: anchor + 2]))
        (rows, above), at = reference.first_block(), anchor + 1
        for block, (hidden, after) in enumerate(own):
            assert after == at
            expected = torch.stack([reference.hidden[row] for row in rows]).float()
            torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=2e-4)
            if block + 1 < len(own):
                place = int(cuts[block, chained.index(anchors.tolist().index(anchor))]) - 1
                at += place + 1
                rows, above = reference.next_block(rows, above, place, text[at])


def test_losses_as_loops():
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


RELEASED = {
    "architectures": ["LlamaForCausalLMSpecBlockShift"], "diffspec_draft_token_num": 4,
    "num_ttt_blocks": 3, "rank_classes": 4,
}  # fmt: skip


class TestObjective:
    def objective(self, **changed):
        target = draft_target(runtime="eager")
        return target, made.specblock_objective(target.loaded, made.settings(**changed), seeded(1))

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
        assert late.keys() - early.keys() == {"rank_head.0.weight", "rank_head.2.weight"}
        for name, gradient in early.items():
            torch.testing.assert_close(late[name], gradient, atol=0, rtol=0)
            assert gradient.abs().sum() > 0
        assert len(early) == len(list(objective.model.parameters())) - 2 - 1  # the frozen head

    def test_from_scratch_as_published(self):
        """Layers and head are random and trained, and the config is the authors'."""
        target, objective = self.objective(from_scratch=True, rank_from_step=0, blocks=3)
        model, layer = objective.model, target.model.model.layers[-1]
        gradients, _ = self.gradients(objective, example_of(target, some_text(), 4), 0)
        assert set(gradients) == set(dict(model.named_parameters()))
        assert not torch.equal(model.layers[-1].mlp.up_proj.weight, layer.mlp.up_proj.weight)
        assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        published = model.config.published
        assert {name: published[name] for name in RELEASED} == RELEASED
        assert set(published) >= set(QWEN) - {"head_dim", "rope_scaling", "rope_theta"}

    @pytest.mark.parametrize(("name", "absent"), [
        ("no-shift", "shift_proj.0.weight"),
        ("no-rank-head", "rank_head.0.weight"),
        ("no-broadcast", None),
        ("no-mask", None),
    ])  # fmt: skip
    def test_ablations_train_and_are_named(self, tmp_path, name, absent):
        target, objective = self.objective(without=frozenset({name}), rank_from_step=0)
        gradients, figures = self.gradients(objective, example_of(target, some_text(), 4), 5)
        assert absent not in gradients
        assert ("rank_loss" in figures) == (name != "no-rank-head")
        save_specblock(tmp_path / "draft", objective.model)
        assert SpecBlockDrafter(target, tmp_path / "draft").name == f"specblock:{name}"


def test_a_drafters_tables_count_every_token_behind_a_prompt(tmp_path):
    target = draft_target(runtime="eager")
    drafter = SpecBlockDrafter(target, made.specblock_folder(tmp_path / "draft")[0])
    example = example_of(target, some_text(), 4)
    measured, trees = measure(target.loaded, drafter, [example])
    assert measured.anchors == measured.reached[0, 0] == 24 - 2 - 3
    assert measured.ranks.sum() == measured.reached.sum()
    assert trees.reached[0] == trees.drafts == 2  # one in 16 tokens
    assert [line.count(" | ") for line in lines(measured, trees)] == [4] * 4 + [8] + [4] * 2


class Slope:
    """An objective of one weight, whose gradient is always 1."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1, bias=False)

    def loss(self, example, generator, step):
        return self.model.weight.sum(), {}

    def validate(self, examples):
        return {}


WORDS = ("epochs=20", "batch=96", "learning_rate=5e-5", "warmup=0.015", "betas=[0.9,0.999]",
         "vocabulary=32000", "from_scratch=true", "blocks=3", "rank_from_step=2000",
         "anchors=9999", "answer_tokens=8192")  # fmt: skip


def test_every_published_value_can_be_set(monkeypatch, tmp_path):
    """As words of `--set`; 20 epochs of 100 texts are 21 steps of 96."""
    given = [NamedValue().convert(word, None, None) for word in WORDS]
    parts = Collecting(), SpecBlockSettings(), replace(RUN, autocast=False)
    collecting, sizes, run = with_settings(given, *parts)
    assert (sizes.vocabulary, sizes.from_scratch, sizes.rank_from_step) == (32000, True, 2000)
    assert (sizes.blocks, run.clip, collecting.answer_tokens) == (3, 0.5, 8192)
    made, adam = [], torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *a, **k: made.append(adam(*a, **k)) or made[-1]
    )
    history = train(Slope(), [None] * 100, [], run, tmp_path)
    assert history[-1]["step"] == 21
    assert made[0].defaults["betas"] == (0.9, 0.999) and made[0].defaults["lr"] == 5e-5
    long = replace(run, steps=2000)
    rates = [learning_rate(step, long) / 5e-5 for step in (0, 14, 29, 30, 1015, 1999)]
    assert rates == pytest.approx([1 / 30, 15 / 30, 1, 1, 0.55, 0.1], abs=1e-3)
