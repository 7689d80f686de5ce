"""The fields of a Domino checkpoint's config.json: those of DFlash, and of the correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from decoder.drafters.checkpoint import Fields
from decoder.drafters.dflash.config import INNER, DFlashConfig, backbone

PROJECTORS = ("domino", "causal_v5")  # the second name is that of early checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class DominoConfig(DFlashConfig):
    """The fields of DFlash, and of the correction along a path.

    state        size of the recurrent state
    width        of the correction's inner layer
    plain_slots  first slots of the block, whose logits are not corrected
    """

    LABEL: ClassVar[str] = "a Domino drafter"

    vocab: int
    state: int
    width: int
    plain_slots: int

    @classmethod
    def recognises(cls, published: Mapping[str, Any]) -> bool:
        inner = published.get(INNER)
        fields = inner if isinstance(inner, Mapping) else published
        return fields.get("projector_type") in PROJECTORS

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        fields.get("projector_type")  # read, and unused
        values = backbone(fields, shifted=True)
        # Without the shift, public implementations differ in the state that a row takes.
        fields.require({"shift_label": True, "sample_from_anchor": True})
        width = fields.whole("emb_dim")
        own = {
            "vocab": fields.whole("vocab_size"),
            "state": fields.whole("gru_hidden_dim", width),
            "width": width,
            "plain_slots": fields.whole("pure_draft_prefix_len", 1, least=0),
        }
        return {"name": "domino", **values, **own}

    def costs(self) -> dict[str, object]:
        own = {name: getattr(self, name) for name in ("state", "width", "plain_slots")}
        return {**DFlashConfig.costs(self), **own}
