"""Loading targets: valid folders and names, and the error of each invalid one."""

import gc
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from costmodel.errors import InputError
from decoder.model.loading import load_model
from decoder.model.making import make_target
from tests.tiny_folder import change_config, write_config, write_weights

CPU = torch.device("cpu")
MAPS = Path("/proc/self/maps")
KNOWN = "HuggingFaceTB/SmolLM2-135M-Instruct"


def load(name, **options):
    return load_model(str(name), **({"dtype": torch.float32, "device": CPU} | options))


@pytest.fixture
def hub_requests(monkeypatch):
    """No hub and an empty cache; the list of requests to the hub."""
    calls = []

    def snapshot_download(name, *, allow_patterns, local_files_only=False):
        huggingface_hub.utils.validate_repo_id(name)
        calls.append((name, local_files_only))
        raise LocalEntryNotFoundError("the hub cannot be reached.\nA second line.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


class TestFolders:
    @pytest.mark.skipif(not MAPS.is_file(), reason="only Linux lists the files in memory")
    def test_a_packed_model_keeps_no_file_in_memory(self, tmp_path):
        folder = write_weights(tmp_path / "tiny")
        stored = str(folder / "model.safetensors")
        dtype = load_file(stored)["lm_head.weight"].dtype
        loaded = load(folder, dtype=dtype)
        mapped = stored in MAPS.read_text()
        target = make_target(loaded)
        gc.collect()
        assert target.runtime.kind == "packed"
        assert mapped and stored not in MAPS.read_text()

    def test_a_config_alone_gives_random_weights(self, tmp_path):
        loaded = load(write_config(tmp_path / "tiny"))
        assert (loaded.weights, loaded.source) == ("random", "")
        assert sum(p.numel() for p in loaded.model.parameters()) == loaded.architecture.parameters

    @pytest.mark.parametrize("tied", [False, True])
    def test_random_weights_are_as_transformers_makes_them(self, tmp_path, tied):
        """Buffers, ties and the spread of every weight, against a model made on the CPU."""
        folder = write_config(
            tmp_path / "tiny",
            tie_word_embeddings=tied,
            hidden_size=256,
            rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                             "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 64},
        )  # fmt: skip
        model = load(folder, weights="random").model
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        ours, theirs = dict(model.named_buffers()), dict(plain.named_buffers())
        assert ours.keys() == theirs.keys() and "model.rotary_emb.inv_freq" in ours
        for name, buffer in theirs.items():
            torch.testing.assert_close(ours[name], buffer, rtol=0, atol=0)
        both = model.named_parameters(), plain.named_parameters()
        for (name, one), (other, two) in zip(*both, strict=True):
            assert (name, one.shape, one.dtype) == (other, two.shape, two.dtype)
            if "norm" in name:
                assert bool((one == 1).all())
            else:
                assert one.std().item() == pytest.approx(two.std().item(), rel=0.1)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


class TestNames:
    def test_a_known_target_by_its_short_name(self, hub_requests, tmp_path, monkeypatch):
        monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
        with torch.device("meta"):  # its shape is enough
            loaded = load("smollm2-135m-instruct", device=torch.device("meta"))
        assert (loaded.name, loaded.weights) == (KNOWN, "random")
        assert loaded.architecture.layers == 30
        assert hub_requests == [(KNOWN, True)]

    def test_a_hub_id_that_cannot_be_fetched(self, hub_requests):
        with pytest.raises(InputError, match="the hub cannot be reached") as caught:
            load("someone/something", weights="pretrained", download=True)
        assert "rooftree demo-model" in str(caught.value)
        assert "second line" not in str(caught.value)
        assert hub_requests == [("someone/something", True), ("someone/something", False)]


class TestBrokenFolders:
    @pytest.mark.parametrize("weights", ["auto", "random"])
    def test_no_config(self, tmp_path, weights):
        with pytest.raises(InputError, match=r"holds no config\.json"):
            load(tmp_path, weights=weights)

    @pytest.mark.parametrize(("changed", "message"), [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "mamba", "num_attention_heads": None}, "no field 'num_attention_heads'"),
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": -32}, "hidden_size"),
        ({"num_attention_heads": 5}, "attention heads"),
        ({"num_key_value_heads": 3}, "kv_heads|key_value_heads"),
    ])  # fmt: skip
    def test_a_config_of_something_else(self, tmp_path, changed, message):
        with pytest.raises(InputError, match=message) as caught:
            load(write_config(tmp_path, **changed))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
    def test_truncated_weights(self, tmp_path, share):
        file = write_weights(tmp_path) / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        with pytest.raises(InputError, match="cannot load the weights"):
            load(tmp_path)

    def test_a_missing_tensor_is_not_replaced_by_noise(self, tmp_path):
        file = write_weights(tmp_path) / "model.safetensors"
        tensors = load_file(file)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(InputError, match=r"1 missing.*layers\.1\.mlp\.up_proj"):
            load(tmp_path)

    def test_weights_in_pickle_files_are_not_touched(self, tmp_path):
        write_config(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
        assert load(tmp_path).weights == "random"
        with pytest.raises(InputError, match="no weights found"):
            load(tmp_path, weights="pretrained")

    def test_code_in_the_folder_is_never_run(self, tmp_path):
        changed = {"model_type": "custom", "auto_map": {"AutoConfig": "code.Config"}}
        write_config(tmp_path, **changed)
        (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
        with pytest.raises(InputError, match="is not known to transformers"):
            load(tmp_path)
        assert not (tmp_path / "executed").exists()

    def test_more_than_the_memory(self, tmp_path):
        write_config(tmp_path, hidden_size=1 << 20, intermediate_size=1 << 22)
        with pytest.raises(InputError, match=r"needs .* GB for its weights, but cpu has"):
            load(tmp_path)


class TestKernels:
    """A config may name code on the hub as a kernel, which transformers fetches and runs."""

    @pytest.fixture
    def fetched(self, monkeypatch):
        """Names that reach transformers' loader of kernels."""
        names, place = [], "transformers.integrations.hub_kernels"
        for loader in ("load_and_register_attn_kernel", "get_kernel"):
            monkeypatch.setattr(f"{place}.{loader}", lambda name, *_, **__: names.append(name))
        return names

    @pytest.mark.parametrize("field", ["attn_implementation", "experts_implementation"])
    @pytest.mark.parametrize(
        "name", ["evil/kernel", "paged|evil/kernel", {"": "evil/kernel"}, "evil/kernel@v1:f", 5]
    )
    def test_code_from_the_hub_is_refused(self, tmp_path, fetched, field, name):
        folder = change_config(write_weights(tmp_path / "tiny"), **{field: name})
        for weights in ("pretrained", "random"):
            with pytest.raises(InputError, match=rf"as {field}, which is no part") as caught:
                load(folder, weights=weights)
            assert caught.value.hint == f"Take {field} out of its config.json."
        assert fetched == []

    @pytest.mark.parametrize("name", [None, "eager", "sdpa", "flash_attention_2"])
    def test_names_of_transformers_itself_change_nothing(self, tmp_path, fetched, name):
        """Flash attention, where its package is missing, would come from the hub too."""
        folder = change_config(write_weights(tmp_path / "tiny"), attn_implementation=name)
        assert load(folder).model.config._attn_implementation == "sdpa"
        assert fetched == []
