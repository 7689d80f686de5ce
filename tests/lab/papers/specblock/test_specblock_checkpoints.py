"""SpecBlock checkpoints: what is saved and loaded, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from costmodel.errors import InputError
from decoder.drafters.factory import load_drafter
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import save_specblock
from lab.papers.specblock.tree import PUBLISHED, REPOSITORY
from tests.decoder.draft_models import EAGLE3, draft_target
from tests.lab.papers.specblock.specblock_models import QWEN, SPECBLOCK, specblock_folder


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
        for like in (SPECBLOCK, QWEN):
            folder = specblock_folder(tmp_path / "draft", like=like)[0]
            drafter = load_drafter(str(folder), draft_target("llama"))
            assert isinstance(drafter, SpecBlockDrafter) and drafter.name == "specblock"
            assert drafter.feature_layers == (2, 3, 3) and drafter.max_depth == 8
        assert not SpecBlockDrafter.recognises(EAGLE3)
        named = specblock_folder(tmp_path / "named", tree="repository", branching=[1, 2, 3, 4])[0]
        growths = [drafter.growth, SpecBlockDrafter(draft_target(), named).growth]
        assert growths == [PUBLISHED, replace(REPOSITORY, branching=(1, 2, 3, 4))]
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
