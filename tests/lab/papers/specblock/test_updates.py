"""`FOLDER@adapt=HOW`: what is updated, how, and that nobody else notices."""

import pytest

from costmodel.errors import InputError
from decoder.drafters.factory import load_drafter
from lab.papers.specblock.updates.specblock import split_updater, updatable
from tests.decoder.draft_models import dflash_folder, draft_target

PROMPT = [5, 17, 3, 88, 41]


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
