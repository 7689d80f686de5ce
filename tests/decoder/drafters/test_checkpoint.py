"""From the text of `--drafter` to a drafter; folders that are damaged, incomplete or not there."""

import json
from dataclasses import replace

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from costmodel.errors import InputError
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.eagle3 import Eagle3Drafter
from decoder.drafters.factory import load_drafter
from decoder.drafters.ngram import NgramDrafter
from decoder.drafters.vocabulary import FILE, DraftHead
from tests.decoder.draft_models import VOCAB, dflash_folder, draft_target, eagle3_folder, rounds
from tests.decoder.models import request
from tests.tiny_folder import write_weights

CAUSAL = ["LlamaForCausalLM"]
KINDS = {
    "dflash": (DFlashDrafter, dflash_folder, "layers.1.mlp.up_proj.weight"),
    "eagle3": (Eagle3Drafter, eagle3_folder, "midlayer.mlp.up_proj.weight"),
}


@pytest.fixture(params=KINDS)
def made(request, tmp_path):
    """How the drafter is made, a good folder, and the name of one of its tensors."""
    drafter, write, name = KINDS[request.param]
    folder = write(tmp_path / "draft")[0]
    return lambda where: drafter(draft_target(), where), folder, name


def test_all_that_is_wrong_is_listed_at_once(made):
    drafter, folder, name = made
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"], tensors["norm.weight"]
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors | {"selector.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(InputError) as raised:
        drafter(folder)
    wrong = f"1 of a wrong shape ({name} [39, 32] instead of [40, 32])"
    missing = ("2 missing (", "fc.weight", "norm.weight")
    for part in (*missing, "1 not known (selector.weight)", wrong, str(folder)):
        assert part in raised.value.problem


@pytest.mark.parametrize("kept", [None, 0, 5, 0.5, 0.999])
def test_safetensors_that_are_truncated_or_missing(made, kept):
    drafter, folder, _ = made
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if kept is None:
        with pytest.raises(InputError, match=r"holds no model\.safetensors"):
            drafter(folder)
        return
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    message = r"cannot read the weights in .*model\.safetensors"
    with pytest.raises(InputError, match=message) as raised:
        drafter(folder)
    assert "fetch it again" in raised.value.hint


@pytest.mark.parametrize(("name", "content", "message"), [
    ("config", None, r"config\.json"), ("config", "[1, 2]", r"config\.json"),
    ("model.safetensors.index", '{"weight_map": 3}', r"model\.safetensors\.index\.json"),
    ("model.safetensors.index", '{"weight_map": {"fc.weight": "model-1.safetensors"}}',
     r"lacks model-1\.safetensors, which its index names"),
])  # fmt: skip
def test_files_that_say_nothing_of_weights(made, name, content, message):
    drafter, folder, _ = made
    path = folder / f"{name}.json"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        drafter(folder)


@pytest.fixture
def no_hub(monkeypatch):
    def snapshot_download(name, **options):
        huggingface_hub.utils.validate_repo_id(name)
        raise LocalEntryNotFoundError("the hub cannot be reached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_a_hub_that_does_not_have_it(made, no_hub):
    drafter, _, _ = made
    with pytest.raises(InputError, match="'z-lab/some' is no folder here, and the hub"):
        drafter("z-lab/some")
    with pytest.raises(InputError, match="neither a folder nor a hub id"):
        drafter("not a name")


class TestKinds:
    @pytest.mark.parametrize(("write", "kind"), [
        (lambda place: "ngram", NgramDrafter),
        (lambda place: dflash_folder(place)[0], DFlashDrafter),
        # also where it calls itself a causal model
        (lambda place: eagle3_folder(place, architectures=CAUSAL)[0], Eagle3Drafter),
        (lambda place: write_weights(place, vocab_size=VOCAB), CausalLMDrafter),
    ])  # fmt: skip
    def test_each_is_known_by_its_name_or_config(self, tmp_path, write, kind):
        assert isinstance(load_drafter(str(write(tmp_path / "draft")), draft_target()), kind)

    @pytest.mark.parametrize("architectures", [["BertModel"], None, "LlamaForCausalLM"])
    def test_something_else(self, tmp_path, architectures):
        folder, config, _ = dflash_folder(tmp_path / "draft")
        del config["dflash_config"]
        config["architectures"] = architectures
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="is not that of a drafter") as raised:
            load_drafter(str(folder), draft_target())
        assert "ngram" in raised.value.hint

    @pytest.mark.parametrize(("name", "message"), [
        ("./nowhere", "there is no folder"), ("n-gram", "the hub does not give it"),
        (" ", "name is empty"),
    ])  # fmt: skip
    def test_nothing_there(self, no_hub, name, message):
        with pytest.raises(InputError, match=message):
            load_drafter(name, draft_target())


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


def test_a_damaged_list_is_refused(tmp_path):
    target, folder = draft_target(), dflash_folder(tmp_path)[0]
    for content in ("[3, 2]", "[]", '{"a": 1}', "[1, 1]", "[-1, 2]", "[1.5]", "no"):
        (folder / FILE).write_text(content)
        with pytest.raises(InputError, match=FILE):
            DFlashDrafter(target, folder)


def test_tokens_that_the_target_lacks_are_refused():
    with pytest.raises(InputError, match="vocabulary"):
        DraftHead(draft_target(), np.array([1, VOCAB]))
