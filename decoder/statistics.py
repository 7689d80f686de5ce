"""What a generation did: counts, stage times, and where its cost model came from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from time import perf_counter

import torch

from decoder.device import synchronise


@dataclass(slots=True)
class StageTimes:
    """Seconds spent in each part of the decode cycle, over all rounds."""

    draft_s: float = 0.0
    build_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0

    def add(self, other: StageTimes) -> None:
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))


class Laps:
    """Adds the time since the last lap to a stage of one round.

    device  where given, a lap ends when the device has finished its work, which
            costs a synchronisation on an accelerator
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.stages = StageTimes()
        self._device = device
        self._last_s = perf_counter()

    def end(self, stage: str) -> float:
        """End the lap of `stage` (a field of StageTimes); its seconds."""
        if self._device is not None:
            synchronise(self._device)
        now_s = perf_counter()
        lap_s, self._last_s = now_s - self._last_s, now_s
        setattr(self.stages, stage, getattr(self.stages, stage) + lap_s)
        return lap_s


@dataclass(slots=True)
class Statistics:
    """Counts and times of one generation; in a batch, times of the rounds it took part in.

    The first token comes from the prefill; every other one from a round of the
    decode loop, so rates use `new_tokens - 1` over `decode_s`.
    """

    policy: str
    profile: str  # the line that says where the cost model came from
    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafted_rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish: str = ""  # "eos", "stop", "length" or "interrupted"
    warnings: list[str] = field(default_factory=list)  # as of drift; each once
    stages: StageTimes = field(default_factory=StageTimes)
    tree_nodes: list[int] = field(default_factory=list)  # of each round
    accepted_depths: list[int] = field(default_factory=list)  # of each round

    def count_round(self, nodes: int, accepted: int) -> None:
        """Add a round that verified `nodes` drafted tokens and accepted some of them."""
        self.rounds += 1
        self.drafted_rounds += nodes > 0
        self.drafted_tokens += nodes
        self.accepted_tokens += accepted
        self.tree_nodes.append(nodes)
        self.accepted_depths.append(accepted)

    @property
    def tokens_per_s(self) -> float | None:
        """Decode-only rate; None where nothing was decoded after the prefill."""
        decoded = self.new_tokens - 1
        return decoded / self.decode_s if decoded > 0 and self.decode_s > 0 else None

    @property
    def tokens_per_verification(self) -> float | None:
        """Tokens kept for each target forward after the prefill, plain steps counted too.

        The bonus token counts; tokens accepted behind the end of the text do not.
        """
        return (self.new_tokens - 1) / self.rounds if self.rounds else None

    def lines(self) -> list[str]:
        """What `--stats` prints."""
        rate = self.tokens_per_s
        per_step = self.tokens_per_verification
        stages = asdict(self.stages)
        total_s = sum(stages.values()) or 1.0
        shares = ", ".join(f"{name[:-2]} {value / total_s:.1%}" for name, value in stages.items())
        return [
            f"{self.new_tokens} tokens in {self.decode_s:.2f} s after a prefill of "
            f"{self.prompt_tokens} tokens in {self.prefill_s:.2f} s; ended by {self.finish}",
            "too few tokens for a rate"
            if rate is None or per_step is None
            else f"{rate:.1f} tokens/s, {per_step:.2f} tokens a verification, "
            f"{self.drafted_tokens} drafted and {self.accepted_tokens} accepted in "
            f"{self.rounds} rounds ({self.policy})",
            f"time: {shares}",
            *(f"warning: {warning}" for warning in self.warnings),
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON, derived figures included, per-round lists left out."""
        data = asdict(self)
        del data["tree_nodes"], data["accepted_depths"]
        return data | {
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_verification": self.tokens_per_verification,
        }
