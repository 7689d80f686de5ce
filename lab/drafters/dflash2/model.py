"""The DFlash 2 draft model: convolutions within the block, and codebooks that score pairs.

Facts from the published code (z-lab/dflash, dflash/model.py, MIT): each sublayer stands between
two convolutions over the block's rows, whose kernels come from the sublayer's normed input; the
context's rows have none. A convolution reads a row and the ones before it, never a row before the
block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from decoder.drafters.blocks import DraftShape, Rope, RowCache, Span
from decoder.drafters.checkpoint import Fields
from decoder.drafters.dflash.config import DFlashConfig, backbone
from decoder.drafters.dflash.model import DFlashLayer, DFlashModel, JoinedLayer
from decoder.model.runtime.linear import join


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """The fields of DFlash, and of what stands around and behind its layers.

    taps   rows that a convolution reads: a block row and those before it
    group  channels that share a kernel
    rank   of the codebooks
    top    candidates of a position whose pairs are scored
    """

    LABEL: ClassVar[str] = "a DFlash 2 drafter"
    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("DFlash2DraftModel",)

    vocab: int
    taps: int
    group: int
    rank: int
    top: int

    @classmethod
    def recognises(cls, published: Mapping[str, Any]) -> bool:
        return cls.named_in(published)

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        values = backbone(fields, shifted=False)
        hidden, block = values["shape"].hidden, values["block_size"]
        group = fields.whole("conv_group_size", most=hidden)
        if hidden % group:
            raise fields.wrong("conv_group_size", f"a divisor of hidden_size ({hidden})")
        vocab = fields.whole("vocab_size")
        fields.require({"draft_vocab_size": vocab})
        own = {
            "vocab": vocab,
            "taps": fields.whole("conv_kernel_size", most=block),
            "group": group,
            "rank": fields.whole("selector_rank"),
            "top": fields.whole("selector_top_k", most=vocab),
        }
        return {"name": "dflash2", **values, **own}

    def costs(self) -> dict[str, object]:
        own = {name: getattr(self, name) for name in ("taps", "group", "rank", "top")}
        return {**DFlashConfig.costs(self), **own}


BEFORE, AFTER = 0, 1  # a sublayer


class BlockConvolution(nn.Module):
    """The convolutions before and after one sublayer; at first they change nothing."""

    def __init__(self, hidden: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def kernels(self, projected: torch.Tensor) -> torch.Tensor:
        """Both kernels of each row, [..., 2, taps, hidden], of rows after the projection."""
        _, taps, hidden = self.base_kernel.shape
        moved = projected.unflatten(-1, (2, taps, -1))
        return self.base_kernel + moved.repeat_interleave(hidden // moved.shape[-1], dim=-1)


def convolve(rows: torch.Tensor, kernels: torch.Tensor, side: int) -> torch.Tensor:
    """The convolution of a block's rows [..., rows, hidden] on one side of a sublayer."""
    mixed = kernels[..., side, 0, :] * rows
    for tap in range(1, min(kernels.shape[-2], rows.shape[-2])):
        earlier = kernels[..., tap:, side, tap, :] * rows[..., :-tap, :]
        mixed = mixed + nn.functional.pad(earlier, (0, 0, tap, 0))
    return mixed


class DFlash2Layer(DFlashLayer):
    """One layer, with the convolutions around attention and feed-forward."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        sizes = config.shape.hidden, config.taps, config.group
        self.attention_conv, self.mlp_conv = BlockConvolution(*sizes), BlockConvolution(*sizes)


class ConvolvedLayer(JoinedLayer):
    """A layer's pass over block rows; the convolutions stand before the residual additions."""

    def __init__(self, layer: DFlash2Layer, shape: DraftShape) -> None:
        super().__init__(layer, shape)
        self._attention_kernels = join([layer.attention_conv.kernel_projection])
        self._ffn_kernels = join([layer.mlp_conv.kernel_projection])

    def __call__(
        self, block: torch.Tensor, rope: Rope, cache: RowCache, layer: int, seen: Span
    ) -> torch.Tensor:
        module = self.layer
        rows = module.input_layernorm(block)
        kernels = module.attention_conv.kernels(self._attention_kernels(rows))
        mixed = self.attend(convolve(rows, kernels, BEFORE), rope, cache, layer, seen)
        block = block + convolve(self.output(mixed), kernels, AFTER)
        rows = module.post_attention_layernorm(block)
        kernels = module.mlp_conv.kernels(self._ffn_kernels(rows))
        gated = self.gated(convolve(rows, kernels, BEFORE))
        return block + convolve(self.down(gated), kernels, AFTER)


class CandidateSelector(nn.Module):
    """Codebooks of the tokens before and after, joined by the hidden state between them."""

    def __init__(self, vocab: int, head: int, hidden: int, rank: int) -> None:
        """head: the number of tokens that can be drafted"""
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(head, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(
        self, hidden: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        """What is added to the scores of candidates [..., before, after], in float32.

        hidden  [..., hidden]        of the rows that predict them
        before  int64 [..., before]  tokens of the vocabulary
        after   int64 [..., after]   columns of the head
        """
        between = self.hidden_projection(hidden).float()[..., None, :]
        contexts = self.predecessor_codebook[before].float() * between
        return contexts @ self.successor_codebook[after].float().mT


class DFlash2Model(DFlashModel):
    """The weights under their published names."""

    config_type = DFlash2Config
    layer_type = DFlash2Layer
    joined_type = ConvolvedLayer
    config: DFlash2Config

    def __init__(self, config: DFlash2Config, head: int | None = None) -> None:
        super().__init__(config, head)
        sizes = config.vocab, head or config.vocab, config.shape.hidden, config.rank
        self.candidate_selector = CandidateSelector(*sizes)
