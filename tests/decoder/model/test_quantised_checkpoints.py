"""Checkpoints that a library quantises and saves here: loaded, decoded, their key and bytes."""

import shutil
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from decoder.engine import TreeDecoder
from decoder.model.loading import load_model
from decoder.model.making import make_target
from decoder.profiling.measured_profile import peaks_of, profile_key, runtime_section, subject_of
from tests.tiny_folder import change_config, isolate, write_weights

CPU = torch.device("cpu")
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
NEW = 40


def by_transformers(options):
    """A maker of a folder by a config's constructor, which imports the library."""

    def make(plain, folder):
        model = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=options(), dtype=torch.float32, device_map={"": CPU}
        )
        model.save_pretrained(folder)

    return make


def int8():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return TorchAoConfig(Int8DynamicActivationInt8WeightConfig())


def int4():
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return TorchAoConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32)))


def by_quanto(kind):
    def make(plain, folder):
        from optimum.quanto import QuantizedModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(plain).eval()
        quantised = QuantizedModelForCausalLM.quantize(model, weights=kind, exclude="lm_head")
        quantised.save_pretrained(folder)

    return make


def by_compressed_tensors(preset):
    def make(plain, folder):
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            apply_quantization_config,
            preset_name_to_scheme,
        )

        model = AutoModelForCausalLM.from_pretrained(plain)
        scheme = preset_name_to_scheme(preset, ["Linear"])
        if scheme.weights.group_size:
            scheme.weights.group_size = 32
        settings = {"quantization_status": "initialized", "ignore": ["lm_head"]}
        wanted = QuantizationConfig(config_groups={"all": scheme}, **settings)
        apply_quantization_config(model, wanted)
        largest = 448 if scheme.weights.type == "float" else 2 ** (scheme.weights.num_bits - 1) - 1
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                rows = module.weight.view(len(module.weight), module.weight_scale.shape[1], -1)
                module.weight_scale.data.copy_(rows.abs().amax(-1) / largest)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)

    return make


def fine_grained_fp8(plain, folder):
    """A block of 32 x 32 weights has a scale; transformers itself needs a GPU to make it."""
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].view(rows // 32, 32, columns // 32, 32)
        scales = blocks.abs().amax((1, 3)) / 448
        packed = (blocks / scales[:, None, :, None]).view(rows, columns)
        tensors[name] = packed.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    settings["activation_scheme"] = "dynamic"
    change_config(folder, quantization_config=settings)


class Form(NamedTuple):
    """A kind of checkpoint."""

    library: str
    make: Callable
    label: str | None  # the beginning of the profile's key
    held: Callable[[int, int], float]  # bytes of [rows, columns]; in float32 where it is unpacked


def nf4_held(rows, columns):
    """A scale for 64 weights, which a CPU with bfloat16 halves, and a table of 16 numbers."""
    from bitsandbytes.functional import has_avx512bf16

    return rows * columns * (1 / 2 + (2 if has_avx512bf16() else 4) / 64) + 64


def of_tensors(preset, label, held):
    return Form("compressed_tensors", by_compressed_tensors(preset), label, held)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMS = {
    "torchao-int8-inputs": Form(
        "torchao", by_transformers(int8),
        "torchao-int8dynamicactivationint8weight-", lambda n, k: n * k + 5 * n,
    ),
    "torchao-int4": Form(  # a byte each; a scale and a zero point a group
        "torchao", by_transformers(int4), "torchao-intxweightonly-",
        lambda n, k: n * k * (1 + 5 / 32),
    ),
    "bitsandbytes-nf4": Form(
        "bitsandbytes", by_transformers(lambda: BitsAndBytesConfig(**NF4)), "bitsandbytes-4bit",
        nf4_held,
    ),
    "quanto-int4": Form(  # a scale and a shift a row
        "optimum.quanto", by_quanto("qint4"), "quanto-qint4", lambda n, k: n * k / 2 + 8 * n
    ),
    "w4a16": of_tensors("W4A16", "compressed-tensors-w4a16-g32",
                        lambda n, k: 4 * (n * k + n * k / 32)),
    "w8a8": of_tensors("W8A8", "compressed-tensors-w8a8", lambda n, k: 4 * (n * k + n)),
    "fp8-dynamic": of_tensors("FP8_DYNAMIC", "compressed-tensors-fpw8a8",
                              lambda n, k: 4 * (n * k + n)),
    "fp8": Form("accelerate", fine_grained_fp8, None, lambda n, k: 4 * n * k),
}  # fmt: skip


@pytest.fixture
def form(request, tmp_path, monkeypatch):
    form = FORMS[request.param]
    pytest.importorskip(form.library, reason=f"{form.library} is not installed")
    isolate(monkeypatch, tmp_path / "home")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    form.make(write_weights(tmp_path / "plain", **sizes), tmp_path / "quantised")
    return form


def own_text(folder, form):
    """transformers' greedy text of the same checkpoint."""
    if form.library == "optimum.quanto":
        from optimum.quanto import QuantizedModelForCausalLM

        model = QuantizedModelForCausalLM.from_pretrained(folder)._wrapped
    else:
        options = {"dtype": torch.float32, "device_map": {"": CPU}}
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    return text[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("form", FORMS, indirect=True)
def test_a_checkpoint_decodes_as_transformers_decodes_it(form, tmp_path):
    folder = str(tmp_path / "quantised")
    loaded = load_model(folder, dtype=torch.float32, device=CPU)
    target = make_target(loaded)
    for policy in ("plain", "fixed:6", "bastion"):
        text = TreeDecoder(target, policy=policy).generate(PROMPT, max_new_tokens=NEW)
        assert list(text.token_ids) == own_text(folder, form)
    key, section = profile_key(target), runtime_section(target)
    assert key.quantization == section.quantization
    if form.label is None:  # plain weights in memory: the key and the bytes of such
        assert key.quantization is None and section.weight_bytes is None
        assert loaded.stored == "fp8-32x32"
    else:
        assert key.quantization.startswith(form.label) and loaded.stored.startswith(form.label)
        shapes = [(64, 64)] * 4 + [(128, 64)] * 2 + [(64, 128)]
        norms = 4 * (5 * 64 + 2 * 8)  # and two tables of frequencies
        weights = 2 * sum(n * k for n, k in shapes) + 5 * 64
        expected = (2 * sum(form.held(*shape) for shape in shapes) + norms) / weights
        assert section.weight_bytes == pytest.approx(expected, rel=0.003)
        peaks = peaks_of(target.device, target.dtype)
        assert subject_of(target).roofline(peaks).weight_bytes == section.weight_bytes
    plain = "held and read as plain" in " ".join(target.runtime.warnings)
    assert plain == (form.label is None or form.label.startswith("compressed"))
