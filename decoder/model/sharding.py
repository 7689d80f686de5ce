"""Shards of a dense decoder: a rank's heads, FFN columns and part of the LM head.

Query, key, value, gate and up weights are split by rows, output and down weights by columns;
the ranks' output and down products are summed (Shoeybi et al., Megatron-LM, section 3). The
LM head is split by vocabulary. Every rank holds the whole input embedding, which saves a sum
a forward, and all norms.
"""

from __future__ import annotations

import copy
import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from decoder.model.ranks import Ranks, SplitHead, SummedLinear
from decoder.model.runtime.fused import FUSIBLE

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
BY_COLUMNS = ("o_proj", "down_proj")
CHUNK = 256  # rows or columns of random weights drawn from one seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rank's part of a whole tensor: `start` to `stop` along one axis."""

    whole: tuple[int, ...]
    axis: int = 0
    start: int = 0
    stop: int = 0


class WeightSource(Protocol):
    """A source of a shard's weights."""

    def fill(self, name: str, parameter: torch.Tensor, piece: Piece) -> bool:
        """Write the piece of the named tensor to `parameter`; False where the source has none."""


def local_architecture(architecture: ModelArchitecture, size: int) -> ModelArchitecture:
    """The architecture that one of `size` ranks holds; vocabulary and layers stay whole.

    Raises InputError where the ranks cannot share the target evenly.
    """
    if size == 1:
        return architecture
    a = architecture
    if a.experts or not a.gated_ffn:
        raise _not_sharded(a.name)
    shared = gcd(a.kv_heads, a.ffn)  # KV heads divide the heads
    if shared % size:
        fitting = ", ".join(str(n) for n in range(1, shared + 1) if shared % n == 0)
        raise InputError(
            f"{size} processes cannot share {a.name}: {a.heads} heads, {a.kv_heads} KV heads and "
            f"an FFN of {a.ffn} columns are not all multiples of {size}",
            hint=f"Degrees that divide them: {fitting} (--nproc-per-node).",
        )
    return replace(a, heads=a.heads // size, kv_heads=a.kv_heads // size, ffn=a.ffn // size)


def build_shard(
    config: Any, placed: tuple[torch.dtype, torch.device], ranks: Ranks, source: WeightSource
) -> PreTrainedModel:
    """The rank's part of the model, filled from the source on the device.

    config  of the whole target
    placed  dtype and device
    Raises InputError for a family that cannot be split, LookupError for weights that the source
    lacks.
    """
    dtype, device = placed
    architecture = ModelArchitecture.from_hf_config(config)
    model, head = _empty_shard(config, architecture, dtype, ranks)
    model.to_empty(device=device)
    base = model.base_model
    base.rotary_emb = type(base.rotary_emb)(config=model.config).to(device)
    absent = [
        name
        for name, parameter in model.named_parameters()
        if not source.fill(name, parameter.data, _piece(name, parameter, head, ranks))
    ]
    if absent:
        raise LookupError(f"{len(absent)} missing or of a wrong shape, as {absent[0]}")
    if architecture.tied:
        head.weight = nn.Parameter(model.get_input_embeddings().weight.data[head.rows])
    return model.requires_grad_(False).eval()


def _empty_shard(
    config: Any, architecture: ModelArchitecture, dtype: torch.dtype, ranks: Ranks
) -> tuple[PreTrainedModel, SplitHead]:
    """The model on the meta device, and its head, which has no weight where it is tied."""
    local = local_architecture(architecture, ranks.size)
    config = copy.deepcopy(config)
    config.head_dim = local.head_dim  # else derived from the reduced head count
    config.num_attention_heads, config.num_key_value_heads = local.heads, local.kv_heads
    config.intermediate_size = local.ffn
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for layer in model.base_model.layers:
        if type(layer) not in FUSIBLE:
            raise _not_sharded(architecture.name)
        layer.self_attn.o_proj = SummedLinear(layer.self_attn.o_proj, ranks)
        layer.mlp.down_proj = SummedLinear(layer.mlp.down_proj, ranks)
    head = SplitHead(architecture.vocab, ranks)
    if not architecture.tied:
        rows = head.rows.stop - head.rows.start
        weight = torch.empty(rows, architecture.hidden, dtype=dtype, device="meta")
        head.weight = nn.Parameter(weight)
    model.set_output_embeddings(head)
    return model, head


def _piece(name: str, parameter: torch.Tensor, head: SplitHead, ranks: Ranks) -> Piece:
    shape, module = tuple(parameter.shape), name.split(".")[-2]
    if module == "lm_head":
        whole = (head.out_features, *shape[1:])
        return Piece(whole=whole, start=head.rows.start, stop=head.rows.stop)
    if module in BY_ROWS:
        axis = 0
    elif module in BY_COLUMNS and len(shape) == 2:
        axis = 1
    else:
        return Piece(whole=shape, stop=shape[0])
    length = shape[axis]
    whole = tuple(n * ranks.size if i == axis else n for i, n in enumerate(shape))
    start = ranks.rank * length
    return Piece(whole=whole, axis=axis, start=start, stop=start + length)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWeights:
    """Weights as the families initialise them; the whole model is the same for any degree.

    Each chunk of a tensor has its own seed, so a rank draws only the chunks of its piece.
    """

    deviation: float
    seed: int = 0

    def fill(self, name: str, parameter: torch.Tensor, piece: Piece) -> bool:
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            return True
        total = piece.whole[piece.axis]
        for first in range(piece.start // CHUNK * CHUNK, piece.stop, CHUNK):
            count = min(CHUNK, total - first)
            shape = [count if i == piece.axis else n for i, n in enumerate(piece.whole)]
            drawn = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            drawn.normal_(0.0, self.deviation, generator=self._generator(name, first, drawn.device))
            start, stop = max(piece.start, first), min(piece.stop, first + count)
            part = drawn.narrow(piece.axis, start - first, stop - start)
            parameter.narrow(piece.axis, start - piece.start, stop - start).copy_(part)
        return True

    def _generator(self, name: str, first: int, device: torch.device) -> torch.Generator:
        text = f"{self.seed} {name} {first}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:7])
        return torch.Generator(device).manual_seed(seed)


class Checkpoint:
    """Tensors of a folder's safetensors files, read piece by piece."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        """files: closes the opened files."""
        self._tensors: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            opened = files.enter_context(safe_open(path, framework="pt"))
            self._tensors |= dict.fromkeys(opened.keys(), opened)

    def fill(self, name: str, parameter: torch.Tensor, piece: Piece) -> bool:
        if name not in self._tensors:
            return False
        stored = self._tensors[name].get_slice(name)
        if tuple(stored.get_shape()) != piece.whole:
            return False
        part = slice(piece.start, piece.stop)
        parameter.copy_(stored[part] if piece.axis == 0 else stored[:, part])
        return True


def _not_sharded(name: str) -> InputError:
    families = ", ".join(sorted(layer.__name__.removesuffix("DecoderLayer") for layer in FUSIBLE))
    return InputError(
        f"{name} cannot be shared by several processes",
        hint=f"Tensor parallelism takes dense targets of the families {families}.",
    )
