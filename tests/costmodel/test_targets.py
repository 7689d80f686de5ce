"""The shipped list of targets."""

from __future__ import annotations

import json

import pytest
import yaml

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import find_target, load_targets, resolve_target
from costmodel.errors import InputError
from costmodel.io import read_yaml, shipped_directory

KEYS = {"kind", "positions", "rope_theta", "rotary_fraction", "llama3", "norm_epsilon", "config"}


def test_every_shipped_target_matches_the_facts(shared_dir):
    facts = yaml.safe_load((shared_dir / "facts/targets.yaml").read_text())
    targets = load_targets()
    assert set(targets) >= set(facts)
    for name, fact in facts.items():
        a = targets[name].architecture
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied"):
            assert getattr(a, field) == fact[field], (name, field)
        assert a.qk_norm == fact.get("qk_norm", False)
        assert a.parameters == fact["params"]
        assert (a.experts, a.active_experts) == (fact.get("experts", 0), fact.get("active", 0))
        rope = targets[name].hf_config["rope_parameters"]
        assert rope["rope_theta"] == fact["rope_theta"]
        assert rope["rope_type"] == fact.get("rope_type", "default")
        assert rope.get("partial_rotary_factor") == fact.get("rotary_fraction")


@pytest.mark.parametrize("name", sorted(load_targets()))
def test_transformers_builds_each_config_with_the_same_architecture(name):
    transformers = pytest.importorskip("transformers")
    entry = load_targets()[name]
    config = transformers.AutoConfig.for_model(**entry.hf_config)
    assert ModelArchitecture.from_hf_config(config, name=name) == entry.architecture
    assert config.max_position_embeddings == entry.hf_config["max_position_embeddings"]


# As the publishers' model cards on the hub count their safetensors files; of Gemma 3 4B less the
# 416,866,032 of its vision tower and the 2,950,272 of its projector.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-4b-it": 4_300_079_472 - 416_866_032 - 2_950_272,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "zai-org/GLM-4-32B-0414": 32_566_081_536,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-R1": 671_026_419_200,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name):
    assert find_target(name).architecture.parameters == PUBLISHED[name]


def test_names_stand_for_one_model_only():
    """The base model is not the instructed one, though it costs the same."""
    base, tuned = find_target("llama-3.1-8b"), find_target("llama-3.1-8b-instruct")
    assert (base.name, tuned.name) == (
        "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct",
    )  # fmt: skip
    assert base.architecture.hash == tuned.architecture.hash


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "qwen3-8b", " Qwen3-8B "])
def test_names_are_found_in_full_or_by_their_last_part(name):
    assert find_target(name).name == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("name", "near"),
    [("qwen3-9b", "Qwen/Qwen3-8B"), ("smollm2", "SmolLM2-135M"), ("", "Nearest")],
)
def test_unknown_names_list_near_ones(name, near):
    with pytest.raises(InputError, match=near) as caught:
        find_target(name)
    assert "\n" not in str(caught.value)


def test_the_sizes_of_each_entry_are_those_that_it_states():
    table = read_yaml(shipped_directory() / "targets.yaml")
    for name, entry in load_targets().items():
        row = table[name]
        row = table[row["like"]] | row if "like" in row else row
        for field in row.keys() - KEYS - {"like"}:
            assert getattr(entry.architecture, field) == row[field], (name, field)


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_folder_and_its_config_are_the_same_target(model_folder):
    entry = resolve_target(str(model_folder))
    assert (entry.name, entry.architecture.layers, entry.positions) == ("my-model", 2, 64)
    assert resolve_target(str(model_folder / "config.json")) == entry


def test_a_known_name_is_a_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_target("qwen3-8b") == find_target("Qwen/Qwen3-8B")
    assert resolve_target("qwen3-8b").positions == 40960
    with pytest.raises(InputError, match="no known target is called ''"):
        resolve_target("")


def test_the_reader_of_a_folder_may_add_defaults(model_folder):
    entry = resolve_target(str(model_folder), lambda folder: CONFIG | {"num_hidden_layers": 3})
    assert entry.architecture.layers == 3


@pytest.mark.parametrize("longest", ["64", 0, 64.5, True])
def test_the_longest_text_is_a_whole_number(model_folder, longest):
    path = model_folder / "config.json"
    path.write_text(json.dumps(CONFIG | {"max_position_embeddings": longest}))
    with pytest.raises(InputError, match=r"'max_position_embeddings' .* whole number above 0"):
        resolve_target(str(model_folder))
    path.write_text(json.dumps(CONFIG | {"max_position_embeddings": None}))
    assert resolve_target(str(model_folder)).positions is None


def test_folders_that_hold_no_readable_config(model_folder):
    (model_folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json cannot be read"):
        resolve_target(str(model_folder))
    (model_folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"holds no config\.json"):
        resolve_target(str(model_folder))
