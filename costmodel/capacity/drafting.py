"""What drafting costs a server: seconds of a draft, memory of the drafter."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from costmodel.architecture import ModelArchitecture
from costmodel.capacity.steps import ProfileForward, StepModel, StepSeconds
from costmodel.device import Peaks, device_by_name
from costmodel.errors import InputError
from costmodel.roofline import Roofline
from costmodel.stages import DrafterSection

# A DFlash drafter as its published configs have it: five layers of the target's width, and a
# projection of the hidden states of five target layers.
DFLASH_LAYERS = 5
DFLASH_FEATURES = 5
BLOCK_ROWS = 16
NAMES = ("dflash", "ngram")
# Peaks only decide where memory and compute meet; of an unknown device the usual ratio does.
_USUAL_PEAKS = Peaks(flops_per_s=3e14, bytes_per_s=2e12)


class Drafter(Protocol):
    """A drafter beside a target."""

    @property
    def label(self) -> str: ...
    @property
    def layers(self) -> int:
        """Layers that gaps between kernels are counted for."""
        ...

    def draft_s(self, forward: StepModel, batch: float, context: float) -> StepSeconds:
        """Seconds of drafting one block or chain for each of `batch` sequences."""
        ...

    def weight_bytes(self, architecture: ModelArchitecture) -> float:
        """Bytes of its weights, on all devices together."""
        ...

    def cache_bytes_per_token(self, architecture: ModelArchitecture) -> float:
        """Bytes of a token's keys and values, on all devices together."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FreeDrafter:
    """N-grams of the text itself: looked up on the host, next to nothing."""

    label: str = "n-gram: no cost on the device"
    layers: int = 0

    def draft_s(self, forward: StepModel, batch: float, context: float) -> StepSeconds:
        """Nothing."""
        return StepSeconds()

    def weight_bytes(self, architecture: ModelArchitecture) -> float:
        """None."""
        return 0.0

    def cache_bytes_per_token(self, architecture: ModelArchitecture) -> float:
        """None."""
        return 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockDrafter:
    """A DFlash drafter nobody timed: its own roofline, reached as far as the target's is.

    One forward of a block of 16 rows a sequence over five layers of the target's width (dense,
    also beside a mixture of experts), the feature projection, and the target's LM head.
    """

    label: str = (
        "DFlash by its size: 5 layers of the target's width and its LM head over blocks of 16"
    )
    layers: int = DFLASH_LAYERS

    def draft_s(self, forward: StepModel, batch: float, context: float) -> StepSeconds:
        """The target's forward of a block times the ratio of both physical rooflines."""
        device = device_by_name(forward.card.name)
        target = Roofline(
            architecture=forward.architecture,
            peaks=device.peaks if device else _USUAL_PEAKS,
            element_bytes=forward.precision.weight_bytes,
            count="physical",
            tensor_parallel=forward.tensor_parallel,
        )
        drafter = dataclasses.replace(target, architecture=self.architecture(forward.architecture))
        block = (BLOCK_ROWS, context, batch)
        share = float(drafter.seconds(*block) / target.seconds(*block))
        one = forward.decode(batch, context, BLOCK_ROWS)
        share *= 1 + self._projection(forward.architecture) / drafter.architecture.parameters
        return StepSeconds(
            products=share * one.products,
            attention=share * one.attention,
            all_reduce=share * one.all_reduce,
        )

    def architecture(self, target: ModelArchitecture) -> ModelArchitecture:
        """The drafter's sizes, the target's head included."""
        return dataclasses.replace(
            target,
            name=f"DFlash drafter of {target.name}",
            layers=DFLASH_LAYERS,
            tied=True,
            sliding_window=None,
            experts=0,
            active_experts=0,
            expert_ffn=0,
        )

    def weight_bytes(self, architecture: ModelArchitecture) -> float:
        """Without the head, which is the target's; in bfloat16."""
        own = self.architecture(architecture).parameters - architecture.vocab * architecture.hidden
        return 2.0 * (own + self._projection(architecture))

    def cache_bytes_per_token(self, architecture: ModelArchitecture) -> float:
        """Keys and values of five layers in bfloat16."""
        return 2.0 * 2 * DFLASH_LAYERS * architecture.kv_width

    @staticmethod
    def _projection(architecture: ModelArchitecture) -> int:
        return DFLASH_FEATURES * architecture.hidden**2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDrafter:
    """A draft timed at batch 1; of more sequences it grows as the target's block forward does."""

    section: DrafterSection
    memory: Drafter

    @property
    def label(self) -> str:
        """The name in the profile."""
        how = "timed by a decoder at its start" if self.section.kind == "quick" else "measured"
        return f"{self.section.name}, {how}"

    @property
    def layers(self) -> int:
        """None: the measured time holds the gaps."""
        return 0

    def draft_s(self, forward: StepModel, batch: float, context: float) -> StepSeconds:
        """Seconds of `batch` drafts."""
        one = float(self.section.seconds(context))
        if batch == 1:
            return StepSeconds(products=one)
        many = forward.decode(batch, context, BLOCK_ROWS).total
        return StepSeconds(products=one * many / forward.decode(1, context, BLOCK_ROWS).total)

    def weight_bytes(self, architecture: ModelArchitecture) -> float:
        """As of the kind of drafter that it is."""
        return self.memory.weight_bytes(architecture)

    def cache_bytes_per_token(self, architecture: ModelArchitecture) -> float:
        """As of the kind of drafter that it is."""
        return self.memory.cache_bytes_per_token(architecture)


def find_drafter(forward: StepModel, name: str | None) -> Drafter:
    """The drafter called so, from the profile where that has timed one.

    name  a kind, the name or part of the name of a timed drafter, or its architecture's hash;
          two joined drafters (`ngram+dflash`) answer only to names that hold the `+`
    Without a name: the profile's only drafter, else DFlash by its size. Raises InputError.
    """
    profile = forward.profile if isinstance(forward, ProfileForward) else None
    timed = list(profile.drafters.values()) if profile else []
    if name is None:
        return _measured(timed[0]) if len(timed) == 1 else BlockDrafter()
    if profile is not None and name in profile.drafters:
        return _measured(profile.drafters[name])
    for section in timed:
        if name.lower() in section.name.lower() and ("+" in name) == ("+" in section.name):
            return _measured(section)
    if name == "ngram":
        return FreeDrafter()
    if name == "dflash":
        return BlockDrafter()
    names = ", ".join([*NAMES, *(section.name for section in timed)])
    raise InputError(f"no drafter is called '{name}'", hint=f"Use one of: {names}")


def _measured(section: DrafterSection) -> MeasuredDrafter:
    memory: Drafter = FreeDrafter() if "gram" in section.name.lower() else BlockDrafter()
    return MeasuredDrafter(section=section, memory=memory)
