"""From the text of `--drafter` to a drafter, and what it drafts in whole generations."""

import json

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from costmodel.errors import InputError
from decoder.drafters import checkpoint
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.eagle3.drafter import Eagle3Drafter
from decoder.drafters.factory import load_drafter
from decoder.drafters.ngram import NgramDrafter
from tests.decoder.draft_models import VOCAB, dflash_folder, draft_target, eagle3_folder
from tests.tiny_folder import write_weights


class TestKinds:
    def test_ngram(self):
        assert isinstance(load_drafter("ngram", draft_target()), NgramDrafter)

    def test_dflash(self, tmp_path):
        folder = dflash_folder(tmp_path / "draft")[0]
        assert isinstance(load_drafter(str(folder), draft_target()), DFlashDrafter)

    def test_eagle3_also_where_it_calls_itself_a_causal_model(self, tmp_path):
        folder = eagle3_folder(tmp_path / "draft", architectures=["LlamaForCausalLM"])[0]
        assert isinstance(load_drafter(str(folder), draft_target()), Eagle3Drafter)

    def test_a_causal_language_model(self, tmp_path):
        folder = write_weights(tmp_path / "small", vocab_size=VOCAB)
        assert isinstance(load_drafter(str(folder), draft_target()), CausalLMDrafter)

    @pytest.mark.parametrize("architectures", [["BertModel"], None, "LlamaForCausalLM"])
    def test_something_else(self, tmp_path, architectures):
        folder, config, _ = dflash_folder(tmp_path / "draft")
        del config["dflash_config"]
        config["architectures"] = architectures
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="is not that of a drafter") as raised:
            load_drafter(str(folder), draft_target())
        assert "ngram" in raised.value.hint

    def test_nothing_there(self, tmp_path, monkeypatch):
        def hf_hub_download(name, file):
            raise LocalEntryNotFoundError("the hub cannot be reached")

        monkeypatch.setattr(checkpoint, "hf_hub_download", hf_hub_download)
        with pytest.raises(InputError, match="there is no folder"):
            load_drafter(str(tmp_path / "nowhere"), draft_target())
        with pytest.raises(InputError, match="the hub does not give it"):
            load_drafter("n-gram", draft_target())
        with pytest.raises(InputError, match="name is empty"):
            load_drafter(" ", draft_target())
