"""Rounds that follow from drafts at every position are those of decoding."""

import pytest
import torch

from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.engine import TreeDecoder
from lab.studies.block_drafters import Counts, draft_along
from tests.decoder.draft_models import dflash_folder, draft_target


@pytest.mark.parametrize("prompt", [[5, 17, 3, 88, 41], [9]])
def test_rounds_are_those_of_decoding(tmp_path, prompt):
    target = draft_target(dtype=torch.float64)
    with torch.no_grad():
        target.model.lm_head.weight[:3] *= 8  # likelier tokens, which drafts can meet
    drafter = DFlashDrafter(target, dflash_folder(tmp_path / "draft")[0])
    for policy in ("chain", "fixed:7", "fixed:31"):
        decoder = TreeDecoder(target, drafter=drafter, policy=policy)
        result = decoder.generate(prompt, max_new_tokens=40)
        counts = Counts()
        draft_along(target, drafter, prompt, result.token_ids, counts)
        assert counts.texts[policy] == [(39, result.stats.rounds)]
    assert counts.texts["fixed:255"][0][1] < counts.texts["fixed:1"][0][1] < 39
