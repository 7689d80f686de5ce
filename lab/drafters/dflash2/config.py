"""The fields of a DFlash 2 checkpoint, nested or in the speculators library's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from decoder.drafters.checkpoint import Fields
from decoder.drafters.dflash.config import DFlashConfig, backbone


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
