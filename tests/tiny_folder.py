"""A Hugging Face folder of a tiny Llama: its config, and weights and a tokenizer on demand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

POSITIONS = 256
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
}
END, MARK = "<|end|>", "<|mark|>"


def write_config(folder: Path, **changed: Any) -> Path:
    """The folder with a config.json and nothing else; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
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
    """A whole target: config, weights and tokenizer."""
    return write_tokenizer(write_weights(folder))
