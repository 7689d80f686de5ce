"""SpecBlock's training: its rows against single rows, its losses against loops, its ablations."""

import math

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.blocks import Rotary
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import SpecBlockConfig, SpecBlockModel, save_specblock
from lab.papers.specblock.training import objective as training
from lab.papers.specblock.training.objective import (
    Scored,
    SpecBlockSettings,
    draft_losses,
    rank_labels,
    valid_prefix,
)
from lab.papers.specblock.training.recipe import (
    copy_from,
    eagle_layers,
    feature_scale,
    first_model,
    frequent_tokens,
)
from lab.papers.specblock.training.rows import Passage, run_blocks
from lab.training.corpus import TrainingText
from lab.training.features import Example
from tests.decoder.draft_models import (
    HIDDEN,
    LAYERS,
    VOCAB,
    draft_target,
    plain_states,
    random_tensors,
)
from tests.decoder.models import random_model, target_of
from tests.lab.papers.specblock.specblock_models import (
    LENGTH,
    SPECBLOCK,
    TOKENS,
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

    def test_starts_behind_the_text_are_not_supervised(self):
        """Near the end of a text, what would be predicted behind it counts for nothing."""
        target = draft_target(runtime="eager")
        objective = specblock_objective(target.loaded, settings(), seeded())
        text = some_text(12)
        [first, second] = objective._rounds(
            example_of(target, text, 8), torch.tensor([7, 9]), torch.tensor([[4, 4]])
        )
        # Row 7 proposes tokens 9, 10, 11 and one behind the end; row 9 token 11 alone.
        assert first.inside.tolist() == [[True, True, True, False], [True] + [False] * 3]
        assert not second.inside.any()
        assert (first.ids[~first.inside] == -1).all()


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

    def test_what_is_masked_may_be_infinite(self):
        logits = torch.zeros(1, 2, 11)
        logits[0, 1, 0] = -math.inf
        wanted = torch.full((1, 2, 11), 1 / 11)
        scored = Scored(logits, None, wanted, torch.tensor([[3, 4]]), torch.ones(1, 2).bool())
        mask = torch.tensor([[True, False]])
        assert draft_losses(scored, mask).tolist() == pytest.approx([math.log(11), 0.0])


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

    def test_the_head_is_trained_only_where_it_is_its_own(self):
        target, lent = self.objective()
        example = example_of(target, some_text(), 4)
        assert "lm_head.weight" not in self.gradients(lent, example, 0)[0]
        _, own = self.objective(own_head=True)
        assert self.gradients(own, example, 0)[0]["lm_head.weight"].abs().sum() > 0
        assert own.model.config.own_head

    def test_the_mask_is_an_option(self):
        """Without it every position of the text counts, and only the loss differs."""
        target, masked = self.objective()
        _, whole = self.objective(without=frozenset({"no-mask"}))
        example = example_of(target, some_text(), 4)
        anchors, cuts = torch.tensor([3, 6]), torch.tensor([[2, 4]])
        for one, other in zip(
            masked._rounds(example, anchors, cuts),
            whole._rounds(example, anchors, cuts),
            strict=True,
        ):
            torch.testing.assert_close(one.logits, other.logits, atol=0, rtol=0)
            assert whole._mask(other).all()
            assert masked._mask(one)[:, 0].all() and not masked._mask(one).all()

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

    def test_cuts_and_anchors_are_uniform(self, monkeypatch):
        """Chi-square of what is drawn; anchors are distinct and within the continuation."""
        target, objective = self.objective(anchors=5)
        example = example_of(target, some_text(24), 10)
        cuts, anchors = [], []

        class Seen(Exception):
            pass

        def watched(model, rotary, passage, drawn_anchors, drawn_cuts, singles):
            anchors.append(drawn_anchors.tolist())
            cuts.extend(drawn_cuts.flatten().tolist())
            raise Seen

        monkeypatch.setattr(training, "run_blocks", watched)
        generator = seeded(4)
        for _ in range(600):
            with pytest.raises(Seen):
                objective.loss(example, generator, 0)
        # Rows 9 to 21: the bonus tokens are 10 to 22, and token 23 can still be proposed.
        assert all(len(set(drawn)) == 5 for drawn in anchors)
        places = np.bincount([a for drawn in anchors for a in drawn], minlength=24)
        assert np.flatnonzero(places).tolist() == list(range(9, 22))
        found = np.bincount(cuts, minlength=LENGTH + 1)[1:]
        assert len(found) == LENGTH
        assert ((found - 750) ** 2 / 750).sum() < 16.3  # the 0.1 % point of 3 degrees
        expected = 3000 / 13
        assert ((places[9:22] - expected) ** 2 / expected).sum() < 32.9  # of 12 degrees

    def test_a_text_without_anything_to_draft(self):
        target, objective = self.objective()
        with pytest.raises(InputError, match="fewer than two tokens behind its prompt"):
            objective.loss(example_of(target, some_text(9), 8), seeded(), 0)
        assert objective.validate([example_of(target, some_text(9), 8)]) == {}

    def test_other_precision_and_inference_tensors(self):
        """Features may come in bfloat16, and from a forward in inference mode."""
        target, objective = self.objective()
        example = example_of(target, some_text(), 4)
        with torch.inference_mode():
            kept = Example(example.tokens, 4, example.features.bfloat16(), example.final.bfloat16())
        expected = objective.loss(example, seeded(2), 0)[0]
        with torch.autocast("cpu", torch.bfloat16):
            found = objective.loss(kept, seeded(2), 0)[0]
        found.backward()
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=0.05)


class TestStart:
    def test_the_target_s_last_layers(self):
        target = draft_target(runtime="eager")
        model = first_model(target.loaded, settings(layers=2), seeded())
        theirs = target.model.model.layers[-2:]
        for ours, source in zip(model.layers, theirs, strict=True):
            for name, tensor in source.state_dict().items():
                torch.testing.assert_close(ours.state_dict()[name], tensor, atol=0, rtol=0)
        rows = target.model.lm_head.weight[list(TOKENS)]
        torch.testing.assert_close(model.lm_head.weight.detach(), rows.detach(), atol=0, rtol=0)
        assert model.tokens.tolist() == list(TOKENS)
        assert not model.ranked

    def test_other_names_and_shapes_are_left_alone(self):
        """GPT-NeoX names everything but a layer's norms in its own way."""
        target = target_of(random_model("gpt-neox", dtype=torch.float32), "eager")
        model = first_model(target.loaded, SpecBlockSettings(), seeded())
        copied = copy_from(target.model, model)
        assert {name.split(".", 2)[2] for name in copied} == {
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
        }
        assert model.config.draft_vocab == VOCAB

    def test_features_begin_in_their_own_size(self):
        """The layers that are copied add to the target's states of that size."""
        target = draft_target(runtime="eager")
        tokens = torch.tensor(TOKENS)
        picks = torch.randint(len(tokens), (64,), generator=seeded(3))
        states = plain_states(target, tokens[picks].tolist())[5]
        size = float(states.pow(2).mean(-1).sqrt().median())
        assert feature_scale(target.loaded, 5, tokens, seeded(3)) == pytest.approx(size, rel=1e-4)
        model = first_model(target.loaded, settings(), seeded())
        found = model.condition_norm(model.condition(states.repeat(1, 3)))
        rows = found.detach().pow(2).mean(-1).sqrt()
        assert 0.5 * size < float(rows.min()) <= float(rows.max()) < 2 * size

    def test_the_shift_begins_as_none(self):
        model = first_model(draft_target(runtime="eager").loaded, settings(), seeded())
        rows = torch.randn(3, 2 * HIDDEN)
        torch.testing.assert_close(model.layers[1].shift(rows), rows[:, :HIDDEN])

    def test_frequent_tokens(self):
        """By how often continuations hold them, not prompts; ties and the rest by id."""
        texts = [TrainingText((9, 9, 9, 4, 4, 7), 3), TrainingText((1, 7, 7, 5), 1)]
        assert frequent_tokens(texts, 2, 12) == (4, 7)
        assert frequent_tokens(texts, 5, 12) == (0, 1, 4, 5, 7)
        assert frequent_tokens(texts, 99, 12) == tuple(range(12))

    def test_layers_of_eagle3(self):
        assert eagle_layers(30) == (2, 15, 27)
        assert eagle_layers(LAYERS) == (2, 3, 3)
        assert eagle_layers(2) == (1, 1, 1)

    def test_the_same_seed_gives_the_same_weights(self):
        models = [
            first_model(draft_target(runtime="eager").loaded, settings(), seeded(s))
            for s in (5, 5, 6)
        ]
        first, same, other = (model.state_dict() for model in models)
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert not torch.equal(first["queries"], other["queries"])

    def test_bad_settings(self):
        loaded = draft_target(runtime="eager").loaded
        with pytest.raises(InputError, match="no ablation 'no-tree'"):
            first_model(loaded, settings(without=frozenset({"no-tree"})), seeded())
        with pytest.raises(InputError, match="needs 10 tokens or more, got 3"):
            first_model(loaded, SpecBlockSettings(tokens=(1, 2, 3)), seeded())
