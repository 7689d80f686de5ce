"""Seconds of an engine's steps: from a profile, corrected by the times observed."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import ProfileError
from costmodel.profile.profile import Profile

Array = NDArray[np.float64]

CONTEXT_RANGE = 64  # tokens; the costs at its middle serve the whole range
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
                hint="Add it with `rooftree calibrate --engine vllm --drafter`",
            )
        self._calibration = profile.verify_calibration()
        self._drafter = section
        self._tables: dict[tuple[int, int, int], Array] = {}
        self._drafts: dict[tuple[int, int, int], Array] = {}
        self._log_factor = 0.0
        self._log_drafted = 0.0
        self._seen = 0
        self.gap_s = 0.0

    def verify_s(self, batch: int, context: float, most_drafted: int) -> Array:
        """Seconds of a step with 0 .. `most_drafted` draft tokens in all; [most_drafted + 1]."""
        place = int(context) // CONTEXT_RANGE
        key = (batch, place, most_drafted)
        table = self._tables.get(key)
        if table is None:
            rows = 1.0 + np.arange(most_drafted + 1) / batch
            middle = CONTEXT_RANGE * (place + 0.5)
            table = np.asarray(self._calibration.predict_s(rows, middle, batch), dtype=np.float64)
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[key] = table
        corrected: Array = table * math.exp(self._log_factor + self._log_drafted)
        corrected[0] = table[0] * math.exp(self._log_factor)
        return corrected

    def draft_s(self, batch: int, context: float, longest: int) -> Array:
        """Seconds of drafting 0 .. `longest` tokens a sequence; [longest + 1]."""
        place = int(context) // CONTEXT_RANGE
        key = (batch, place, longest)
        table = self._drafts.get(key)
        if table is None:
            middle = CONTEXT_RANGE * (place + 0.5)
            costs = [self._drafter.seconds(n, middle, batch) for n in range(longest + 1)]
            table = np.array(costs)
            if len(self._drafts) >= MOST_TABLES:
                self._drafts.clear()
            self._drafts[key] = table
        corrected: Array = table * math.exp(self._log_factor)
        return corrected

    def observe(self, predicted_s: float, measured_s: float, *, drafted: bool) -> None:
        """Learn from one step without a prefill; `predicted_s` is corrected already."""
        if not (0 < measured_s < math.inf and predicted_s > 0):
            return
        self._seen += 1
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
