"""Quantised targets: their key, their bytes, and the packages that load them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from costmodel.errors import InputError, ProfileError
from costmodel.profile.store import ProfileStore
from costmodel.weights import quantization_of
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model.making import make_target
from decoder.model.quantization import check_loadable
from decoder.profiling.measured_profile import peaks_of, profile_key, subject_of
from decoder.profiling.probe import quick_profile
from tests.decoder.model.test_loading import load
from tests.decoder.models import random_model, target_of
from tests.tiny_folder import change_config, isolate, write_config, write_weights

pytestmark = pytest.mark.cpu_kind

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
W4A16 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}
SHARED_SCALE = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"input_activations": {"dynamic": True, "strategy": "tensor"}}},
}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    return isolate(monkeypatch, tmp_path / "home")


@pytest.mark.parametrize(("settings", "label"), [
    (GPTQ, "gptq-4bit-g128"),
    ({"quant_method": "awq", "bits": 4, "group_size": -1}, "awq-4bit"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes-4bit"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-128x128"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8-128x128-static"),
    ({"quant_method": "fp8", "weight_block_size": None}, "fp8-tensor"),
    (W4A16, "compressed-tensors-w4a16-g32"),
])  # fmt: skip
def test_labels(settings, label):
    assert quantization_of({"quantization_config": settings}) == label


@pytest.mark.parametrize("settings", [[], {}, "gptq", {"bits": 4}, {"quant_method": 4}])
def test_settings_that_are_none(settings, tmp_path):
    with pytest.raises(InputError, match="quantization_config"):
        quantization_of({"quantization_config": settings})


def test_a_gptq_model_does_not_find_the_profile_of_plain_weights(tmp_path):
    plain = target_of(random_model("llama-gqa", dtype=torch.float32))
    ProfileStore().save(quick_profile(plain, NgramDrafter()))
    assert ProfileStore().find(profile_key(plain))
    model = random_model("llama-gqa", dtype=torch.float32)
    model.config.quantization_config = GPTQ
    quantised = target_of(model)
    assert quantised.architecture.hash == plain.architecture.hash
    with pytest.raises(ProfileError, match="quantization none, here gptq-4bit-g128"):
        ProfileStore().find(profile_key(quantised))
    path = ProfileStore().save(quick_profile(quantised, NgramDrafter()))
    assert path.name.startswith("random.float32-gptq-4bit-g128.")
    assert ProfileStore().find(profile_key(quantised)).path == path
    assert ProfileStore().find(profile_key(plain)).path != path


@pytest.mark.parametrize(("settings", "packages"), [
    (GPTQ, "optimum gptqmodel"),
    ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'rooftree[bitsandbytes]'"),
    ({"quant_method": "compressed-tensors"}, "'rooftree[compressed-tensors]'"),
    ({"quant_method": "torchao"}, "'rooftree[torchao]'"),
    ({"quant_method": "quanto", "weights": ["qint8"]}, "'rooftree[quanto]'"),
])  # fmt: skip
def test_a_missing_package_is_named(tmp_path, monkeypatch, settings, packages):
    find_spec = "decoder.model.quantization.find_spec"
    monkeypatch.setattr(find_spec, lambda name: name == "accelerate" or None)
    folder = change_config(write_weights(tmp_path / "tiny"), quantization_config=settings)
    with pytest.raises(InputError, match=r"is quantised by .* must be installed") as caught:
        load(folder)
    assert f"pip install {packages};" in str(caught.value)


@pytest.mark.parametrize(("settings", "missing"), [
    ({"quant_method": "mxfp4"}, "is not loaded: its kernels are code"),
    ({"quant_method": "hqq"}, "is not loaded: transformers 5 has no loader"),
    (W4A16 | {"kv_cache_scheme": {"num_bits": 8}}, "is not loaded: it quantises the KV cache too"),
    (SHARED_SCALE, "is not loaded: all rows of a forward share one scale"),
    ({"quant_method": "quanto", "weights": "int8"}, "is not loaded: there is no quanto_qmap.json"),
    ({"quant_method": "secret", "bits": 3}, "this version"),  # of transformers, which goes on
])  # fmt: skip
def test_a_method_that_is_not_loaded(settings, missing):
    method = settings["quant_method"]
    with pytest.raises(InputError, match=f"by '?{method}'?, which {missing}"):
        check_loadable({"quantization_config": settings}, "folder")


def test_random_weights_of_a_quantised_config_are_refused(tmp_path):
    folder = write_config(tmp_path / "tiny", quantization_config=GPTQ)
    for weights in ("auto", "random"):
        with pytest.raises(InputError, match=r"quantised \(gptq-4bit-g128\), and random weights"):
            load(folder, weights=weights)


def bitnet_folder(folder):
    """A tiny target whose layers hold four ternary weights a byte; no package is needed."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}
    write_weights(folder, **sizes)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors[name].shape
        packed = torch.randint(0, 255, (rows // 4, columns), generator=generator)
        # The pairs of bits are 0, 1 or 2: a ternary weight plus 1.
        packed = sum((packed >> (2 * i) & 3).clamp(max=2) << (2 * i) for i in range(4))
        tensors[name] = packed.to(torch.uint8)
        tensors[name.replace(".weight", ".weight_scale")] = torch.tensor([20.0])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "bitnet", "linear_class": "bitlinear"}
    settings["quantization_mode"] = "offline"
    return change_config(folder, quantization_config=settings)


@torch._dynamo.config.patch(disable=True)  # BitNet's layers are compiled
def test_what_a_quantised_target_reads(tmp_path):
    loaded = load(bitnet_folder(tmp_path / "tiny"), dtype=torch.float32)
    assert loaded.quantization == "bitnet"
    packed = [p for p in (*loaded.model.parameters(), *loaded.model.buffers())
              if p.dtype == torch.uint8]  # fmt: skip
    a = loaded.architecture
    weights = a.layers * (a.attention_parameters + a.expert_parameters)
    assert sum(p.numel() for p in packed) * 4 == weights
    assert 0.25 < loaded.weight_bytes < 0.35  # scales, norms and frequencies included
    target = make_target(loaded)
    assert profile_key(target).quantization == "bitnet"
    roofline = subject_of(target).roofline(peaks_of(target.device, target.dtype))
    assert roofline.weight_bytes == loaded.weight_bytes
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    decoders = [TreeDecoder(target, policy=policy) for policy in ("plain", "fixed:6")]
    texts = [decoder.generate(prompt, max_new_tokens=12).token_ids for decoder in decoders]
    assert texts[0] == texts[1]
