"""The config.json of a DSpark drafter, in the forms of DeepSpec, SpecForge and speculators.

DeepSpec (deepseek-ai/DeepSpec, MIT) copies the target's config and adds fields at the top level;
SpecForge and ModelOpt put them in `dflash_config`; speculators has the layers' in
`transformer_layer_config`. Both also write plain DFlash drafters in their form, without a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from decoder.drafters.checkpoint import Fields, architectures
from decoder.drafters.dflash.config import INNER, DFlashConfig, backbone, of_speculators
from lab.drafters.conditional import LEVEL_NODES

Correction = Literal["none", "vanilla", "gated", "rnn"]
CORRECTIONS: tuple[Correction, ...] = ("vanilla", "gated", "rnn")
PAIRED = 32  # candidates of a position, among which all pairs are scored
SPECULATORS = ("dspark", "dflash")  # kinds of the speculators library
OWN_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "DFlashSpeculator")


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """The fields of a DFlash drafter's config, and those of the heads.

    correction   how a row's scores depend on the tokens before it
    rank         of the correction; 0 without one
    confidence   the width of the confidence head's input; 0 without this head
    """

    LABEL: ClassVar[str] = "a DSpark drafter"
    ARCHITECTURES: ClassVar[tuple[str, ...]] = (*OWN_ARCHITECTURES, "DFlashDraftModel")

    correction: Correction
    rank: int
    confidence: int

    @classmethod
    def recognises(cls, published: Mapping[str, Any]) -> bool:
        inner = published.get(INNER)
        named = any(name in architectures(published) for name in OWN_ARCHITECTURES)
        kind = inner.get("projector_type") if isinstance(inner, Mapping) else None
        return named or kind == "dspark" or published.get("speculators_model_type") in SPECULATORS

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        fields.get("projector_type")  # read, and unused
        values = backbone(fields, shifted=not of_speculators(fields))
        values["vocab"] = fields.whole("vocab_size")
        rank = fields.whole("markov_rank", 0, least=0)
        correction = fields.get("markov_head_type") or "vanilla"
        if correction not in CORRECTIONS:
            raise fields.wrong("markov_head_type", f"one of {', '.join(CORRECTIONS)}")
        confident = fields.one_flag(("enable_confidence_head", "use_confidence_head"), False)
        with_rank = fields.flag("confidence_head_with_markov", True)
        width = values["shape"].hidden + (rank if with_rank else 0)
        return values | {
            "name": "dspark" if rank else "dflash",
            "correction": correction if rank else "none",
            "rank": rank,
            "confidence": width if confident else 0,
        }

    def costs(self) -> dict[str, object]:
        # Not by super(): a dataclass with slots is another class than the one that was written.
        costs = DFlashConfig.costs(self)
        if self.correction == "none":
            return costs
        width = LEVEL_NODES if self.correction == "rnn" else PAIRED
        return costs | {"correction": self.correction, "rank": self.rank, "candidates": width}
