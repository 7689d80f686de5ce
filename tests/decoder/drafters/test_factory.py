"""From the text of `--drafter` to a drafter, and what it drafts in whole generations."""

import json

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from costmodel.errors import InputError
from decoder.drafters import checkpoint
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.eagle3.drafter import Eagle3Drafter
from decoder.drafters.factory import load_drafter
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.profiling.startup import ProfileChoice
from tests.decoder.draft_models import VOCAB, dflash_folder, draft_target, eagle3_folder
from tests.decoder.models import greedy
from tests.tiny_folder import isolate, write_weights

PROMPT = [5, 17, 3, 88, 5, 17, 3, 41, 5, 17]
WRITERS = {"dflash": dflash_folder, "eagle3": eagle3_folder}
POLICIES = ["fixed:8", "static-tree:1x97", "chain", "bastion", "plain"]


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A data directory of one's own, and peaks that are known at once."""
    return isolate(monkeypatch, tmp_path)


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


def decoder_with(kind, folder, family, policy, **options):
    target = draft_target(family, torch.float64)
    drafter = load_drafter(str(WRITERS[kind](folder)[0]), target)
    choice = ProfileChoice(calibrate=False)
    return TreeDecoder(target, drafter=drafter, policy=policy, profile=choice, **options)


class TestWholeGenerations:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("family", ["qwen3", "llama"])
    @pytest.mark.parametrize("kind", WRITERS)
    def test_greedy_output_is_that_of_plain_decoding(self, home, tmp_path, kind, family, policy):
        decoder = decoder_with(kind, tmp_path / "draft", family, policy)
        for prompt in (PROMPT, [9]):
            result = decoder.generate(prompt, max_new_tokens=30)
            assert result.token_ids == greedy(decoder.target.model, prompt, 30)
        if policy == "static-tree:1x97":
            # All tokens are children of the root, so each round accepts one and moves its row.
            assert result.stats.accepted_tokens == 14

    @pytest.mark.parametrize("rule", ["walk", "recursive", "traversal"])
    @pytest.mark.parametrize("kind", WRITERS)
    def test_sampling_is_repeatable_under_every_rule(self, home, tmp_path, kind, rule):
        decoder = decoder_with(kind, tmp_path / "draft", "qwen3", "fixed:40", acceptance=rule)
        texts = [
            decoder.generate(PROMPT, max_new_tokens=20, temperature=1.0, seed=seed).token_ids
            for seed in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]
