"""`FOLDER@adapt=HOW`: what is updated, how, and that nobody else notices."""

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.updates.bandit import Query
from lab.papers.specblock.updates.specblock import split_updater, updatable, updated
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

    def test_other_drafters_cannot_be_updated(self, tmp_path):
        target = draft_target()
        for name in (str(dflash_folder(tmp_path / "dflash")[0]), "ngram"):
            with pytest.raises(InputError, match="only a SpecBlock drafter can be updated"):
                updatable(load_drafter(name, target), name)


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
