"""`FOLDER@adapt=HOW`: what is updated, how, and that nobody else notices."""

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.updates.bandit import Query
from lab.papers.specblock.updates.specblock import UPDATERS, split_updater, updatable, updated
from tests.decoder.draft_models import dflash_folder, draft_target
from tests.decoder.models import greedy
from tests.lab.papers.specblock.specblock_models import specblock_folder

PROMPT = [5, 17, 3, 88, 41]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(first, second):
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def query(signal=20.0):
    return Query(signal=signal, tokens=30, verifications=10, seconds=1.0)


class TestNames:
    def test_the_text_behind_the_name(self):
        assert split_updater("work/drafter@adapt=bandit") == ("work/drafter", "bandit")
        assert split_updater("work/drafter") == ("work/drafter", "")
        assert split_updater("demo@block=4") == ("demo@block=4", "")

    def test_an_unknown_one_lists_the_known(self):
        with pytest.raises(InputError, match=r"'x@adapt=often': 'often' does not say") as error:
            split_updater("x@adapt=often")
        assert all(f"@adapt={name}" in (error.value.hint or "") for name in UPDATERS)

    def test_other_commands_say_where_it_belongs(self, tmp_path):
        target = draft_target()
        folder = specblock_folder(tmp_path / "draft")[0]
        for name in (f"{folder}@adapt=bandit", f"ngram+{folder}@adapt=bandit"):
            with pytest.raises(InputError, match="texts of `rooftree bench` only"):
                load_drafter(name, target)

    def test_other_drafters_cannot_be_updated(self, tmp_path):
        target = draft_target()
        for name in (str(dflash_folder(tmp_path / "dflash")[0]), "ngram"):
            with pytest.raises(InputError, match="only a SpecBlock drafter can be updated"):
                updatable(load_drafter(name, target), name)


class TestUpdaters:
    def actions(self, how, texts):
        updater = UPDATERS[how](np.random.default_rng(0))
        return [updater.after(query()) for _ in range(texts)]

    def test_always_is_every_eighth_text_and_no_bandit_every_one(self):
        trained = [decision.train for decision in self.actions("always", 17)]
        assert trained == [number % 8 == 0 for number in range(1, 18)]
        assert all(decision.train for decision in self.actions("no-bandit", 5))

    def test_bandits_warm_up_and_one_has_no_heads(self):
        for how in ("bandit", "no-heads"):
            assert {one.action for one in self.actions(how, 10)} == {"skip"}
        later = {how: {one.action for one in self.actions(how, 300)} for how in UPDATERS}
        assert later["bandit"] >= {"skip", "heads"}
        assert later["no-heads"] == {"skip", "full"}


class TestCopies:
    def test_two_arms_of_one_drafter_share_no_weight(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        drafter = SpecBlockDrafter(target, specblock_folder(tmp_path / "draft")[0])
        before = weights(drafter.model)
        head = target.head_weight().clone()
        first, second = (updated(drafter, "no-bandit", np.random.default_rng(0)) for _ in range(2))
        assert first.architecture_hash == drafter.architecture_hash
        untouched = weights(second._serving)
        for i in range(3):
            decoder = TreeDecoder(target, drafter=first, policy="fixed:20")
            result = decoder.generate([*PROMPT, i], max_new_tokens=16)
            assert result.token_ids == greedy(target.model, [*PROMPT, i], 16)
            assert first.finish(result).train
        assert not equal(weights(first._serving), before)
        assert equal(weights(drafter.model), before)
        assert equal(weights(second._serving), untouched)
        assert torch.equal(target.head_weight(), head)

    def test_a_rehearsal_leaves_nothing(self, tmp_path):
        target = draft_target()
        drafter = SpecBlockDrafter(target, specblock_folder(tmp_path / "draft")[0])
        own = updated(drafter, "no-bandit", np.random.default_rng(0))
        before = weights(own._serving), weights(own._model)
        steps = []
        real = torch.optim.Adam.step
        decoder = TreeDecoder(target, drafter=own, policy="fixed:20")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.Adam, "step", lambda *args: (steps.append(1), real(*args))[1])
            own.rehearse(decoder.generate(PROMPT, max_new_tokens=16))
        assert len(steps) == 2  # the heads, and all of it
        assert equal(weights(own._serving), before[0])
        assert equal(weights(own._model), before[1])
        assert own.updates == []
        assert own._trainer._optimisers == {}
        result = decoder.generate(PROMPT, max_new_tokens=16)
        with pytest.raises(InputError, match="no text was drafted"):
            own.rehearse(result)
            own.rehearse(result)
