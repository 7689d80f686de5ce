"""SpecBlock checkpoints: what is saved and loaded, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from costmodel.errors import InputError
from decoder.drafters.factory import load_drafter
from decoder.model.runtime.linear import plain_state
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import save_specblock
from lab.papers.specblock.tree import BlockGrowth
from tests.decoder.draft_models import HIDDEN, LLAMA3_ROPE, draft_target
from tests.lab.papers.specblock.specblock_models import specblock_folder


class TestCheckpoints:
    def test_saving_gives_the_same_files(self, tmp_path):
        for name, changed in {"lent": {}, "own": {"own_head": True}}.items():
            folder, config, tensors = specblock_folder(tmp_path / name, **changed)
            save_specblock(tmp_path / "saved", SpecBlockDrafter(draft_target(), folder).model)
            assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config
            saved = load_file(tmp_path / "saved" / "model.safetensors")
            assert set(saved) == set(tensors)
            for name, tensor in tensors.items():
                torch.testing.assert_close(saved[name], tensor, atol=0, rtol=0)

    def test_the_head_is_the_target_s_unless_there_is_one(self, tmp_path):
        target = draft_target()
        head = target.head_weight()
        folder, _, tensors = specblock_folder(tmp_path / "lent")
        lent = plain_state(SpecBlockDrafter(target, folder).model)["lm_head.weight"]
        torch.testing.assert_close(lent, head[tensors["tokens"]], atol=0, rtol=0)
        folder, _, tensors = specblock_folder(tmp_path / "own", own_head=True)
        own = plain_state(SpecBlockDrafter(target, folder).model)["lm_head.weight"]
        torch.testing.assert_close(own, tensors["lm_head.weight"], atol=0, rtol=0)

    def test_a_checkpoint_of_the_authors_is_refused_by_name(self, tmp_path):
        """Its config has an EAGLE-3 drafter's fields, and two layers."""
        config = {
            "architectures": ["LlamaForCausalLMSpecBlock"], "model_type": "llama",
            "num_hidden_layers": 2, "draft_vocab_size": 32000, "hidden_size": HIDDEN,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="in its authors' format, which is not read"):
            load_drafter(str(tmp_path), draft_target())

    def test_the_factory_knows_it(self, tmp_path):
        """Although its config has an EAGLE-3 drafter's fields."""
        drafter = load_drafter(str(specblock_folder(tmp_path / "draft")[0]), draft_target())
        assert isinstance(drafter, SpecBlockDrafter)
        assert (drafter.name, drafter.max_depth, drafter.feature_layers) == (
            "specblock",
            8,
            (1, 3, 5),
        )

    def test_names_say_what_is_missing(self, tmp_path):
        changed = {"layer_shift": False, "valid_prefix_mask": False}
        folder = specblock_folder(tmp_path / "draft", **changed)[0]
        assert SpecBlockDrafter(draft_target(), folder).name == "specblock:no-shift:no-mask"

    def test_the_hash_is_of_what_costs(self, tmp_path):
        target = draft_target()

        def hash_of(name, seed=1, growth=None, **changed):
            folder = specblock_folder(tmp_path / name, seed, **changed)[0]
            return SpecBlockDrafter(target, folder, growth).architecture_hash

        first = hash_of("first")
        assert len(first) == 12
        assert first == hash_of("weights", seed=9) == hash_of("rope", rope_scaling=LLAMA3_ROPE)
        assert first == hash_of("mask", valid_prefix_mask=False)
        different = [
            hash_of("ffn", intermediate_size=48),
            hash_of("head", draft_vocab_size=31),
            hash_of("length", block_length=3),
            hash_of("shift", layer_shift=False),
            hash_of("blocks", growth=BlockGrowth(blocks=3)),
        ]
        assert len({first, *different}) == 6


BAD_CONFIGS = {
    "another target's vocabulary": ({"vocab_size": 98}, "LM head of 98 tokens and width 32"),
    "a wider target": ({"hidden_size": 48}, "width 48, and the target's is 97 by 32"),
    "a head of its own": ({"own_head": True, "hidden_size": 48}, "hidden size is 48"),
    "too many draft ids": ({"draft_vocab_size": 98}, "'draft_vocab_size' must be at most"),
    "too few draft ids": ({"draft_vocab_size": 9}, "'draft_vocab_size' must be a whole number of"),
    "features that are not there": ({"feature_layers": [1, 3, 6]}, "reads hidden state 6"),
    "two features": ({"feature_layers": [1, 3]}, "'feature_layers' must be a list of 3"),
    "three buckets": ({"branching": [1, 2, 3]}, "'branching' must be a list of 4"),
    "a negative branching": ({"branching": [1, 2, 3, -1]}, "'branching' must be a list of 4"),
    "a wild branching": ({"branching": [1, 2, 3, 999]}, "at most 64"),
    "no positions": ({"block_length": 0}, "'block_length' must be a whole number of at least 1"),
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

    def test_a_config_of_something_else(self, tmp_path):
        for architectures in (["DFlashDraftModel"], None, 7):
            folder = specblock_folder(tmp_path / "draft", architectures=architectures)[0]
            with pytest.raises(InputError, match="is not that of a SpecBlock drafter"):
                SpecBlockDrafter(draft_target(), folder)

    def test_tensors_that_do_not_belong(self, tmp_path):
        folder, _, tensors = specblock_folder(tmp_path / "draft")
        del tensors["queries"]
        tensors["fuse.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors["more"] = torch.zeros(1)
        save_file(tensors, folder / "model.safetensors")
        found = r"1 missing \(queries\); 1 not known \(more\); 1 of a wrong shape \(fuse.weight"
        with pytest.raises(InputError, match=found):
            SpecBlockDrafter(draft_target(), folder)

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("tokens", lambda t: t + 97, "ascending ids within the vocabulary of 97"),
            ("tokens", lambda t: t.flip(0), "ascending ids within the vocabulary of 97"),
            ("tokens", lambda t: t * 0, "ascending ids within the vocabulary of 97"),
            ("tokens", lambda t: t.float(), "must hold int64 numbers and is torch.float32"),
            ("examples", lambda t: t.float(), "'examples' beside"),
        ],
    )
    def test_damaged_numbers(self, tmp_path, name, change, message):
        folder, _, tensors = specblock_folder(tmp_path / "draft")
        save_file(tensors | {name: change(tensors[name])}, folder / "model.safetensors")
        with pytest.raises(InputError, match=message):
            SpecBlockDrafter(draft_target(), folder)

    def test_a_file_cut_short(self, tmp_path):
        folder = specblock_folder(tmp_path / "draft")[0]
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[:-100])
        with pytest.raises(InputError, match="cannot read the weights"):
            SpecBlockDrafter(draft_target(), folder)
