"""A Hugging Face folder of a tiny Llama, and a machine to oneself to try it on."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from costmodel.catalog import Peaks
from profiler.measure.instruments import Guard, Instruments
from tests.fake_timing import CountRule, FakeTimer

POSITIONS = 256
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 260,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
END, MARK = "<|end|>", "<|mark|>"


def write_config(folder: Path, **changed: Any) -> Path:
    """The folder with a config.json and nothing else; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    return folder


def change_config(folder: Path, **changed: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return folder


def write_weights(folder: Path, **changed: Any) -> Path:
    """The folder with a config and random float32 weights that repeat themselves soon."""
    write_config(folder, **changed)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(CONFIG | changed)))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6.0)
    model.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer without merges: every UTF-8 byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": [MARK], "eos_token": END})
    fast.save_pretrained(folder)
    return folder


def write_all(folder: Path) -> Path:
    return write_tokenizer(write_weights(folder))


QUIET = {"busy_processes": [], "steal_share": 0.0}  # no other work on the machine


def isolate(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A data directory (returned), locks of one's own, and a quiet machine of made-up peaks."""
    patch.setattr("decoder.profiling.probe.BUDGET_S", 0.0)
    patch.setenv("ROOFTREE_HOME", str(folder / "home"))
    (folder / "locks").mkdir(mode=0o700, parents=True, exist_ok=True)
    patch.setattr(tempfile, "tempdir", str(folder / "locks"))
    peaks = Peaks(flops_per_s=1e11, bytes_per_s=1e10)
    patch.setattr("decoder.profiling.measured_profile.measure_peaks", lambda *_: peaks)
    patch.setattr("profiler.measure.machine.observe", lambda: QUIET)
    return folder / "home"


def fake_clock(
    patch: pytest.MonkeyPatch, samples: int = 3, interrupt_after: int = -1, spread: float = 0.1
) -> None:
    """Calibrations by a clock of 1 ms a call, or longer by up to a share `spread`.

    The sample after `interrupt_after` raises KeyboardInterrupt.
    """

    def instruments(device: torch.device) -> Instruments:
        random = np.random.default_rng(0)
        taken = itertools.count()

        def duration_s(call: object) -> float:
            if next(taken) == interrupt_after:
                raise KeyboardInterrupt
            return 1e-3 * (1.0 + spread * random.random())

        rule = CountRule(samples=samples)
        return Instruments(timer=FakeTimer(duration_s), guard=Guard(), rule=rule)

    patch.setattr("profiler.calibrate.decoder.instruments", instruments)


def listing(folder: Path) -> dict[str, bytes]:
    """Every file below the folder with its content, but locks and notes of exact structures."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and path.parent.name != "structures"
    }
