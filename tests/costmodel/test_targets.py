"""The shipped list of targets."""

from __future__ import annotations

import pytest
import yaml

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from costmodel.targets import find_target, load_targets

ROW = (
    "{kind: llama, layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn: 128,"
    " vocab: 1000, tied: true, positions: 64, rope_theta: 10000, parameters: 138048}"
)


def test_every_shipped_target_matches_the_facts(shared_dir):
    facts = yaml.safe_load((shared_dir / "facts/targets.yaml").read_text())
    targets = load_targets()
    assert set(targets) == set(facts)
    for name, fact in facts.items():
        a = targets[name].architecture
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied"):
            assert getattr(a, field) == fact[field], (name, field)
        assert a.qk_norm == fact.get("qk_norm", False)
        assert a.parameters == targets[name].parameters == fact["params"]
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


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "qwen3-8b", " Qwen3-8B "])
def test_names_are_found_in_full_or_by_their_last_part(name):
    assert find_target(name).name == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("name", "near"),
    [("qwen3-9b", "Qwen/Qwen3-8B"), ("smollm2", "SmolLM2-135M"), ("", "Known|Near")],
)
def test_unknown_names_list_near_ones(name, near):
    with pytest.raises(InputError, match=near) as caught:
        find_target(name)
    assert "\n" not in str(caught.value)


def test_a_table_of_ones_own(tmp_path):
    path = tmp_path / "targets.yaml"
    path.write_text(f"me/tiny: {ROW}\n")
    assert load_targets(path)["me/tiny"].architecture.parameters == 138048


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must map"),
        ("a: 3", "a: must be a mapping"),
        (f"a: {ROW.replace('138048', '7')}", "parameters is 7, but the sizes give 138048"),
        (f"a: {ROW.replace('positions: 64, ', '')}", "'positions' is missing"),
        (f"a: {ROW.replace('kind: llama, ', '')}", "'kind' is missing"),
        (f"a: {ROW.replace('llama', 'gpt_neox')}", "kv_heads does not fit"),
        (f"a: {ROW.replace('layers: 2', 'layers: x')}", "num_hidden_layers"),
    ],
)
def test_wrong_tables_name_the_entry(tmp_path, text, message):
    path = tmp_path / "targets.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_targets(path)
    assert str(path) in str(caught.value)
