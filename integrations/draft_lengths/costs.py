"""Seconds of an engine's steps: from a profile, corrected by what is observed, at any context."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from costmodel.errors import ProfileError
from costmodel.profile.profile import Profile
from costmodel.statistics import Array

Key = tuple[int, int, int]  # batch, range of contexts, longest draft

CONTEXT_RANGE = 128  # tokens; the costs at its middle serve the whole range
MOST_TABLES = 512
FADING = 0.05
CLIP = 0.1  # of the logarithm of one observed ratio: other work makes single steps much slower
MOST_DRAFTED = 0.35  # of the logarithm of the factor of steps with drafts
GAP_SHARE = 0.5  # longer pauses between two steps are no overhead but idleness


class StepCosts:
    """Predicted seconds of steps by their rows, and how far the observed ones differ.

    The factor of all steps and that of steps with drafts over plain ones are learnt apart: only
    the second decides whether drafts pay.
    """

    def __init__(self, profile: Profile, drafter: str) -> None:
        """drafter: key of its cost in the profile. Raises ProfileError where there is none."""
        section = profile.engine_drafters.get(drafter)
        if section is None:
            names = ", ".join(profile.engine_drafters) or "none"
            raise ProfileError(
                f"the profile has no cost of the drafter {drafter} (it has {names})",
                hint="Add it with `rooftree calibrate vllm --drafter`",
            )
        self._calibration = profile.verify_calibration()
        self._drafter = section
        self._tables: dict[Key, list[float]] = {}
        self._drafts: dict[Key, list[float]] = {}
        self._verify_s: dict[Key, list[float]] = {}  # corrected, until something is learnt
        self._draft_s: dict[Key, list[float]] = {}
        self._log_factor = 0.0
        self._log_drafted = 0.0
        self._seen = 0
        self.gap_s = 0.0

    def verify_s(self, batch: int, context: float, most_drafted: int) -> Sequence[float]:
        """Seconds of a step with 0 .. `most_drafted` draft tokens in all; [most_drafted + 1]."""
        key = (batch, int(context) // CONTEXT_RANGE, most_drafted)
        if key in self._verify_s:
            return self._verify_s[key]
        table = self._tables.get(key)
        if table is None:
            rows = 1.0 + np.arange(most_drafted + 1) / batch
            seconds = np.asarray(self._calibration.predict_s(rows, _middle(key), batch), np.float64)
            table = _kept(self._tables, key, seconds.tolist())
        plain_factor = math.exp(self._log_factor)
        factor = plain_factor * math.exp(self._log_drafted)
        corrected = [table[0] * plain_factor, *(drafted_s * factor for drafted_s in table[1:])]
        return _kept(self._verify_s, key, corrected)

    def draft_s(self, batch: int, context: float, longest: int) -> Sequence[float]:
        """Seconds of drafting 0 .. `longest` tokens a sequence; [longest + 1]."""
        key = (batch, int(context) // CONTEXT_RANGE, longest)
        if key in self._draft_s:
            return self._draft_s[key]
        table = self._drafts.get(key)
        if table is None:
            drafted_s = self._drafter.seconds(range(longest + 1), _middle(key), batch)
            table = _kept(self._drafts, key, drafted_s.tolist())
        factor = math.exp(self._log_factor)
        return _kept(self._draft_s, key, [seconds * factor for seconds in table])

    def observe(self, predicted_s: float, measured_s: float, *, drafted: bool) -> None:
        """Learn from one step without a prefill; `predicted_s` is corrected already."""
        if not (0 < measured_s < math.inf and predicted_s > 0):
            return
        self._seen += 1
        self._verify_s.clear()
        self._draft_s.clear()
        weight = max(FADING, 1.0 / (1 + self._seen))
        step = min(max(math.log(measured_s / predicted_s), -CLIP), CLIP)
        if drafted:  # which factor is at fault shows once there are plain steps too
            step *= 0.5
            self._log_drafted += weight * step
            self._log_drafted = min(max(self._log_drafted, -MOST_DRAFTED), MOST_DRAFTED)
        self._log_factor += weight * step

    def observe_gap(self, gap_s: float, step_s: float) -> None:
        """Learn the time between two steps, which every step costs."""
        if 0 <= gap_s < GAP_SHARE * step_s:
            self.gap_s += FADING * (gap_s - self.gap_s)


class ContextCurves:
    """Moves tables that an engine measured at one context to the context of a batch.

    The engine's own times are multiplied by the profile's ratio of the two contexts: what the
    engine alone knows, as the padding of its graphs, stays in them.
    """

    def __init__(self, costs: StepCosts, table_context: int, longest: int) -> None:
        """
        table_context  cached tokens at which the engine measured its tables
        longest        tokens of the longest draft of a sequence
        """
        self._costs, self._table_context, self._longest = costs, table_context, longest

    def verify_ms(self, table_ms: Array, batch: int, context: float) -> Array:
        """The table by tokens of a step, for a batch of one new token and its drafts each."""
        most = min(batch * self._longest, len(table_ms) - 1 - batch)
        there_s, here_s = (
            np.array(self._costs.verify_s(batch, at, batch * self._longest)[: most + 1])
            for at in (self._table_context, context)
        )
        moved = table_ms.copy()
        moved[batch : batch + most + 1] *= here_s / there_s
        return moved

    def draft_ms(self, table_ms: Array, batch: int, context: float) -> Array:
        """The table by sequences of a draft."""
        there_s, here_s = (
            self._costs.draft_s(batch, at, self._longest)[-1]
            for at in (self._table_context, context)
        )
        moved = table_ms.copy()
        if there_s > 0:
            moved[batch] *= here_s / there_s
        return moved


def _middle(key: Key) -> float:
    return CONTEXT_RANGE * (key[1] + 0.5)


def _kept(tables: dict[Key, list[float]], key: Key, table: list[float]) -> list[float]:
    if len(tables) >= MOST_TABLES:
        tables.clear()
    tables[key] = table
    return table
