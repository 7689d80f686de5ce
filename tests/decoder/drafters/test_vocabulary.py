"""A DFlash drafter whose head knows some of the target's tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.vocabulary import FILE, DraftHead
from tests.decoder.draft_models import VOCAB, dflash_folder, draft_target, rounds
from tests.decoder.models import request

KEPT = np.arange(1, VOCAB, 3)


@torch.inference_mode()
def test_its_candidates_are_the_whole_heads_best_among_them(tmp_path):
    target, (folder, *_) = draft_target(), dflash_folder(tmp_path)
    drafters = [DFlashDrafter(target, folder)]
    (folder / FILE).write_text(json.dumps(KEPT.tolist()))
    drafters.append(DFlashDrafter(target, folder))
    walks = [list(rounds(target, drafter, [5, 6, 7], [2]))[-1] for drafter in drafters]
    wanted = replace(request(depth=4, width=5), whole=True)
    whole, found = (session.draft(context, wanted) for session, context in walks)
    everything = whole.whole.double()
    expected = everything[:, KEPT] / everything[:, KEPT].sum(-1, keepdim=True)
    for row in range(4):
        best = expected[row].argsort(descending=True)[:5].numpy()
        assert found.tokens[row].tolist() == KEPT[best].tolist()
        np.testing.assert_allclose(found.probabilities[row], expected[row][best], rtol=1e-5)
    assert found.whole.shape == everything.shape
    np.testing.assert_allclose(found.whole[:, KEPT], expected, rtol=1e-5)
    rest = np.setdiff1d(np.arange(VOCAB), KEPT)
    assert not found.whole[:, rest].any()


@pytest.mark.parametrize(
    "content", ["[3, 2]", "[]", '{"a": 1}', "[1, 1]", "[-1, 2]", "[1.5]", "no"]
)
def test_a_damaged_list_is_refused(tmp_path, content):
    target = draft_target()
    folder, _, _ = dflash_folder(tmp_path)
    (folder / FILE).write_text(content)
    with pytest.raises(InputError, match=FILE):
        DFlashDrafter(target, folder)


def test_tokens_that_the_target_lacks_are_refused():
    with pytest.raises(InputError, match="vocabulary"):
        DraftHead(draft_target(), np.array([1, VOCAB]))
