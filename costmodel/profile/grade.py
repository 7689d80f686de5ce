"""Grades of profiles: how far to trust one, and whether a new one may replace a stored one."""

from __future__ import annotations

import dataclasses
from typing import Literal

from costmodel.profile.profile import Profile
from costmodel.profile.schema import SurfaceSection

Word = Literal["good", "usable", "do not use"]
WORDS: tuple[Word, ...] = ("good", "usable", "do not use")

# Shares of tokens/s lost by choices, mean and worst: the goals for a GPU and a quiet CPU, and
# for a CPU beside a busy process.
GOOD_REGRET = {"cuda": (0.005, 0.03), "cpu": (0.01, 0.05)}
USABLE_REGRET = (0.02, 0.08)
# The median error at held-out points: the goal, which on a CPU may be 1.5 times the noise; and
# five times the goal.
GOOD_ERROR, NOISE_FACTOR, USABLE_ERROR = 0.02, 1.5, 0.1
FEWEST_POINTS, FEWEST_HELD_OUT = 12, 6
FALL = 2.0  # a forward that takes this many times a larger one was disturbed
FEWER = 0.75  # share of the stored points; how many are measured differs between two runs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """One word, and the reasons why it is no better."""

    word: Word
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.word}: {'; '.join(self.reasons)}" if self.reasons else self.word


def grade(profile: Profile) -> Grade:
    """How far to trust the profile, by its regret, its held-out error and its points."""
    kind = profile.provenance.kind
    if kind != "measured":
        return Grade(word="usable", reasons=(f"{kind}, not measured in full here",))
    found = []
    if disturbed := _disturbed(profile.surface):
        found.append(("do not use", disturbed))
    if profile.held_out is None or profile.regret is None:
        found.append(("usable", "not checked against points held out"))
    else:
        regret, error, cpu = profile.regret, profile.held_out.error, profile.device.kind == "cpu"
        goals, losses = GOOD_REGRET[profile.device.kind], (regret.mean, regret.worst)
        names = ("on average", "at worst")
        for name, lost, goal, most in zip(names, losses, goals, USABLE_REGRET, strict=True):
            word, limit = ("do not use", most) if lost > most else ("usable", goal)
            if lost > goal:
                found.append((word, f"a choice loses {lost:.1%} {name}, more than {limit:.1%}"))
        high = regret.interval[1] if regret.interval is not None else regret.mean
        if high > USABLE_REGRET[0] and regret.mean <= goals[0] and regret.worst <= goals[1]:
            found.append(("usable", f"choices may lose up to {high:.1%} on average"))
        noise = profile.held_out.repeat_noise or 0.0
        goal = max(GOOD_ERROR, NOISE_FACTOR * noise if cpu else 0.0)
        if (uncertain := max(error.median, noise)) > USABLE_ERROR:
            found.append(("do not use", f"times are uncertain by {uncertain:.0%}"))
        elif (off := error.median) > goal:
            found.append(("usable", f"predictions are off by {off:.1%}, more than {goal:.1%}"))
        if error.points < FEWEST_HELD_OUT:
            held_out = counted(error.points, "held-out point")
            found.append(("usable", f"checked at {held_out}, {FEWEST_HELD_OUT} will do"))
    points = 0 if profile.surface is None else len(profile.surface.rows)
    if points < FEWEST_POINTS:
        found.append(("usable", f"measured at {counted(points, 'point')}, {FEWEST_POINTS} will do"))
    for word in reversed(WORDS):
        reasons = tuple(text for reached, text in found if reached == word)
        if reasons:
            return Grade(word=word, reasons=reasons)
    return Grade(word="good")


def objection(stored: Profile, new: Profile) -> str:
    """What speaks against replacing a stored profile by a new one of its key; empty: nothing.

    Its grade is worse, or it was measured at fewer points or over a smaller range.
    """
    before, after = grade(stored), grade(new)
    alike = stored.provenance.rank == new.provenance.rank
    worse = WORDS.index(after.word) > WORDS.index(before.word)
    if worse and (alike or after.word == "do not use"):
        return f"the new one is worse ({after.word}, the stored one is {before.word})"
    old, made = stored.surface, new.surface
    if old is None or made is None or not alike:
        return ""
    axes = {"rows": "row counts", "context": "contexts", "batch": "batch sizes"}
    for name, shown in axes.items():
        (low, high), (least, most) = (
            (min(getattr(one, name)), max(getattr(one, name))) for one in (old, made)
        )
        if low < least or most < high:
            return (
                f"the new one's {shown} go from {least} to {most}, "
                f"the stored one's from {low} to {high}"
            )
    if len(made.rows) < FEWER * len(old.rows):
        points = counted(len(made.rows), "point")
        return f"the new one was measured at {points}, the stored one at {len(old.rows)}"
    return ""


def counted(count: int, noun: str) -> str:
    """`1 point`, `2 points`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _disturbed(surface: SurfaceSection | None) -> str:
    """The worst fall of times with rows, where it is no fall of a quiet machine; else empty."""
    if surface is None:
        return ""
    worst, text, p = FALL, "", surface.points()
    for at in range(len(p)):
        line = (p.context == p.context[at]) & (p.batch == p.batch[at]) & (p.rows > p.rows[at])
        less = min(p.seconds[line], default=p.seconds[at])
        if p.seconds[at] > worst * less:
            worst, rows = p.seconds[at] / less, counted(int(p.rows[at]), "row")
            place = f"{rows} at context {p.context[at]:.0f}"
            text = f"{place} took {worst:.0f} times as long as more rows"
    return text
