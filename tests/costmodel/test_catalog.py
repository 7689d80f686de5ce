"""The shipped lists of targets and devices, and the lookup by name."""

import csv
import json

import pytest

from costmodel import catalog
from costmodel.architecture import ModelArchitecture
from costmodel.catalog import device_by_name, find_device, find_target, load_devices, resolve_target
from costmodel.errors import InputError
from costmodel.io import read_yaml, shipped_directory
from costmodel.weights import stored_weights, with_quantization
from tests.conftest import DATA
from tests.costmodel.test_architecture import LLAMA


def test_every_shipped_target_matches_the_facts():
    facts = read_yaml(DATA / "targets.yaml")
    targets = catalog.load_targets()
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


@pytest.mark.parametrize("name", sorted(catalog.load_targets()))
def test_transformers_builds_each_config_with_the_same_architecture(name):
    transformers = pytest.importorskip("transformers")
    entry = catalog.load_targets()[name]
    config = transformers.AutoConfig.for_model(**entry.hf_config)
    assert ModelArchitecture.from_hf_config(config, name=name) == entry.architecture
    assert config.max_position_embeddings == entry.hf_config["max_position_embeddings"]


# As the publishers' model cards on the hub count their safetensors files; of Gemma 3 4B less the
# 416,866,032 of its vision tower and the 2,950,272 of its projector.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648, "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496, "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-4b-it": 4_300_079_472 - 416_866_032 - 2_950_272,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704, "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672, "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "zai-org/GLM-4-32B-0414": 32_566_081_536, "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-R1": 671_026_419_200,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name):
    assert find_target(name).architecture.parameters == PUBLISHED[name]


def test_a_name_in_full_or_by_its_last_part_stands_for_one_model(tmp_path, monkeypatch):
    """The base model is not the instructed one, though it costs the same."""
    for name in ("Qwen/Qwen3-8B", "qwen/qwen3-8b", "qwen3-8b", " Qwen3-8B "):
        assert find_target(name).name == "Qwen/Qwen3-8B"
    base, tuned = find_target("llama-3.1-8b"), find_target("llama-3.1-8b-instruct")
    assert (base.name, tuned.name) == (
        "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"
    )  # fmt: skip
    assert base.architecture.hash == tuned.architecture.hash
    monkeypatch.chdir(tmp_path)
    assert resolve_target("qwen3-8b") == find_target("Qwen/Qwen3-8B")
    assert resolve_target("qwen3-8b").positions == 40960
    for name, near in (("qwen3-9b", "Qwen/Qwen3-8B"), ("smollm2", "SmolLM2-135M"), ("", "Nearest")):
        with pytest.raises(InputError, match=near) as caught:
            resolve_target(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "base", "weights"), [
    ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "Qwen3-235B-A22B", "fp8_block"),
    ("RedHatAI/Qwen3-8B-FP8-dynamic", "Qwen3-8B", "fp8_dynamic"),
    ("nvidia/Llama-3.1-70B-Instruct-FP8", "Llama-3.1-70B-Instruct", "fp8"),
    ("nvidia/DeepSeek-R1-0528-NVFP4", "DeepSeek-V3", "nvfp4"),
    ("openai/gpt-oss-20b", "gpt-oss-20b", "mxfp4"),
    ("Qwen/Qwen3-8B-AWQ", "Qwen3-8B", "awq-4bit-g128"),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen2.5-7B-Instruct", "gptq-4bit-g128"),
    ("RedHatAI/Qwen3-8B-quantized.w4a16", "Qwen3-8B", "compressed-tensors-w4a16-g128"),
    ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen3-8B", "bitsandbytes-4bit"),
])  # fmt: skip
def test_a_name_says_how_a_checkpoint_is_stored(name, base, weights):
    entry = resolve_target(name, hub=True)
    assert (entry.name, entry.weights) == (name, weights)
    assert entry.architecture.hash == find_target(base).architecture.hash


TORCHAO = {"quant_method": "torchao"}
TORCHAO["quant_type"] = {"default": {"_type": "Int4WeightOnlyConfig"}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def quark(dtype, **inputs):
    parts = {"weight": {"dtype": dtype}, "input_tensors": {"dtype": dtype, **inputs}}
    return {"quant_method": "quark", "global_quant_config": parts}


def compressed(bits, kind, *, dynamic=True, **weights):
    group = {"weights": {"num_bits": bits, "type": kind, **weights}}
    group["input_activations"] = {"num_bits": bits, "type": kind, "dynamic": dynamic}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(("stored", "weights"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": None}, "modelopt-w4a8_awq"),
    (AWQ, "awq-4bit-g128"),
    ({"quant_method": "gptq", "bits": 8}, "gptq-8bit"),
    ({"quant_method": "my_own", "bits": 3}, "my_own-3bit"),
    ({"load_in_4bit": True}, "bitsandbytes-4bit"),
    (TORCHAO, "torchao-int4weightonly-e73280"),
    (quark("fp8_e4m3", is_dynamic=False), "fp8"),
    (quark("fp8_e4m3", is_dynamic=True), "fp8_dynamic"),
    (quark("fp4"), "quark-d80dc4"),
    (compressed(8, "float", dynamic=True), "fp8_dynamic"),
    (compressed(8, "float", dynamic=False), "fp8"),
    (compressed(8, "float", strategy="block", dynamic=True), "fp8_block"),
    (compressed(4, "float", group_size=16), "nvfp4"),
    (compressed(8, "int", dynamic=True), "compressed-tensors-w8a8"),
    (None, "bfloat16"),
])  # fmt: skip
def test_a_config_says_how_its_checkpoint_is_stored(stored, weights):
    fields = {"quantization_config": stored}
    for config in (fields, {"text_config": fields}):
        assert stored_weights(with_quantization(config)) == weights


def test_the_parameters_of_each_entry_are_those_that_it_states():
    table = read_yaml(shipped_directory() / "targets.yaml")
    for name, entry in catalog.load_targets().items():
        row = table[name]
        row = table[row["like"]] | row if "like" in row else row
        parameters = entry.architecture.parameters
        assert row.get("parameters", parameters) == parameters, name


@pytest.fixture
def resolved(tmp_path):
    """Writes a config with other fields into a folder, and reads it as a target."""

    def resolve(**changed):
        fields = LLAMA | {"max_position_embeddings": 64} | changed
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return resolve_target(str(tmp_path))

    return resolve


def test_a_folder_is_a_target_whose_weights_are_as_stored_beside_it(resolved, tmp_path):
    entry = resolved()
    assert (entry.name, entry.architecture.layers, entry.positions) == (tmp_path.name, 2, 64)
    assert resolve_target(str(tmp_path / "config.json")) == entry
    named = resolve_target(str((tmp_path / "config.json").rename(tmp_path / "tuned.json")))
    assert (named.name, named.architecture.hash) == ("tuned", entry.architecture.hash)
    old = compressed(4, "int") | {"quant_method": "compressed-tensors"}
    assert resolved(compression_config=old).weights == "compressed-tensors-w4a4"
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {}, "quantization": {"quant_algo": "FP8"}}))
    assert resolved().weights == "fp8"
    assert resolved(quantization_config=AWQ).weights == "awq-4bit-g128"
    beside.write_text("[]")
    with pytest.raises(InputError, match=r"hf_quant_config\.json does not say"):
        resolved()
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match=r"holds no config\.json"):
        resolve_target(str(tmp_path))


@pytest.mark.parametrize("longest", ["64", 0, 64.5, True])
def test_the_longest_text_is_a_whole_number(resolved, longest):
    with pytest.raises(InputError, match="max_position_embeddings"):
        resolved(max_position_embeddings=longest)


@pytest.mark.parametrize(("rope", "positions"), [
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    ({"rope_type": "yarn", "factor": 4.0}, 256),  # the original positions are the config's
    ({"type": "linear", "factor": 8}, 512),
    ({"type": "dynamic", "factor": 2.0}, 128),
    ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
      "original_max_position_embeddings": 16}, 64),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 16}, 64),
    (None, 64),
])  # fmt: skip
def test_rotary_scaling_lengthens_the_longest_text(resolved, rope, positions):
    assert resolved(rope_scaling=rope).positions == positions


@pytest.mark.parametrize("settings", [
    7, {}, {"bits": 4}, {"quant_method": "compressed-tensors", "config_groups": {"a": [1]}},
    {"quant_method": "quark", "global_quant_config": {"weight": "fp8"}},
])  # fmt: skip
def test_settings_that_say_nothing_are_refused_in_one_line(resolved, settings):
    with pytest.raises(InputError, match="quantization_config"):
        resolved(quantization_config=settings)


def test_every_device_matches_the_facts():
    with open(DATA / "devices.csv", newline="") as stream:
        facts = {row["nvml_name"]: row for row in csv.DictReader(stream)}
    devices = load_devices()
    assert {spec.name for spec in devices.values()} >= set(facts)
    for name, row in facts.items():
        spec = device_by_name(name)
        assert spec.peak_flops_per_s == pytest.approx(float(row["bf16_dense_tflops"]) * 1e12)
        assert spec.peak_bytes_per_s == pytest.approx(float(row["memory_gb_per_s"]) * 1e9)
        assert spec.memory_bytes == int(row["memory_gb"]) * 2**30
        assert spec.l2_bytes == int(row["l2_mb"]) * 2**20
        assert (spec.sm_count, spec.tdp_w) == (int(row["sm_count"]), int(row["tdp_w"]))
        assert spec.confidence == row["confidence"]
        fp8 = row["fp8_dense_tflops"]
        assert (spec.fp8_flops_per_s is None) == (fp8 == "")
        if fp8:
            assert spec.fp8_flops_per_s == pytest.approx(float(fp8) * 1e12)


def test_slugs_are_unique_and_figures_those_of_devices_sold_since_2018():
    devices = load_devices()
    assert all(slug == catalog.slugify(slug) and len(slug) <= 24 for slug in devices)
    for spec in devices.values():  # none has a name of another
        assert all(find_device(n) is spec for n in (spec.slug, spec.name, *spec.aliases))
    assert catalog.device_slug("AMD EPYC 7B13 64-Core (r)") == "amd-epyc-7b13-64-core-r"
    assert len(load_devices()) >= 35
    for spec in load_devices().values():
        assert spec.source and spec.confidence in ("corroborated", "recalled")
        assert 60e12 <= spec.peak_flops_per_s <= 3e15
        assert 200e9 <= spec.peak_bytes_per_s <= 8e12
        assert 8e9 <= spec.memory_bytes <= 320e9 and 1e6 <= spec.l2_bytes <= 300e6
        assert 20 <= spec.sm_count <= 320 and 50 <= spec.tdp_w <= 1600
    # A device without bfloat16 has the rate of float16: NVIDIA's T4 data sheet.
    assert (load_devices()["t4"].dtype, load_devices()["a10"].dtype) == ("float16", "bfloat16")
    assert load_devices()["t4"].peaks.flops_per_s == 65e12


@pytest.mark.parametrize(("reported", "slug"), [
    ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("Tesla T4", "t4"), ("NVIDIA GH200 480GB", "gh200"),
    ("A100-SXM4-80GB", "a100-sxm-80gb"),
])  # fmt: skip
def test_what_drivers_report_is_found_exactly(reported, slug):
    assert device_by_name(reported).slug == catalog.device_slug(reported) == slug
    assert device_by_name(reported.lower()) is None
    assert device_by_name(f"{reported}-3e") is None


@pytest.mark.parametrize(("query", "slug"), [
    ("H100-SXM", "h100-sxm"), ("h100 sxm", "h100-sxm"), ("h100", "h100-sxm"), ("4090", "rtx-4090"),
    ("nvidia rtx a6000", "rtx-a6000"), ("H20", "h20"), ("NVIDIA l40", "l40"),
])  # fmt: skip
def test_a_slug_a_name_and_an_alias_find_their_device_in_any_case(query, slug):
    assert find_device(query).slug == slug


@pytest.mark.parametrize(("query", "near"), [
    ("a100", "a100-sxm-80gb"), ("rtx pro 6000", "rtx-pro-6000-server"),
    ("Server Edition", "rtx-pro-6000-server"), ("a10g", "a10"), ("v100", "h100-sxm"), ("", ""),
])  # fmt: skip
def test_a_part_of_a_name_finds_nothing_but_names_the_nearest(query, near):
    with pytest.raises(InputError, match="no known device is called") as caught:
        find_device(query)
    assert near in caught.value.hint
    assert "`rooftree devices` lists all" in caught.value.hint
