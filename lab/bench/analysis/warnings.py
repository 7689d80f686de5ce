"""Warnings about a result: noise, few prompts, differing texts, borrowed costs."""

from __future__ import annotations

from statistics import median

from lab.bench.analysis.figures import differing
from lab.bench.record import PLAIN, Response, Result

FEW_PROMPTS = 10
NOISY = 0.05


def result_warnings(result: Result) -> tuple[str, ...]:
    """Each warning says what to do about it. Those of the responses come last."""
    warnings = [
        f"{one.name} failed "
        + ("at its start" if one.prompt is None else f"at prompt '{one.prompt}'")
        + f", after {one.answered} texts, which are left out: {one.reason}"
        for one in result.failed
    ]
    if (prompts := len(result.prompts)) < FEW_PROMPTS:
        noun = "prompt" if prompts == 1 else "prompts"
        warnings.append(
            f"only {prompts} {noun}: intervals are wide or missing; give {FEW_PROMPTS} or more"
        )
    warnings += _noise(result)
    if result.profile is not None and result.profile.kind not in ("measured", "quick"):
        warnings.append(
            f"the costs come from a {result.profile.kind} profile, not from this machine: "
            "`rooftree calibrate` measures one"
        )
    counts = {arm.name: differing(result, arm.name) or 0 for arm in result.arms}
    if wrong := ", ".join(f"{name} {count}" for name, count in counts.items() if count):
        each = len(result.of(PLAIN))
        hint = (
            "near-ties round differently over one row and over several; --same-text compares our "
            "arms on one text, and --dtype float32 decides nearly all ties alike"
        )
        if result.settings.dtype == "float32":
            hint = "near-ties may still round differently in float32; more than a few would be a "
            hint += "fault"
        warnings.append(f"texts that differ from plain decoding's, of {each}: {wrong} ({hint})")
    warnings += _updates(result)
    drift = (warning for response in result.responses for warning in response.warnings)
    return tuple(warnings + list(dict.fromkeys(drift)))


def _noise(result: Result) -> list[str]:
    """Changes of plain decoding's speed, which does the same work throughout the run."""
    plain = sorted(result.of(PLAIN), key=lambda one: one.place)
    steps = [(one, _step(one)) for one in plain if one.decoded_tokens > 0]
    warnings = []
    spread = _repeat_spread(steps)
    if spread is not None and spread > NOISY:
        warnings.append(
            f"a noisy machine: repeats of plain decoding are {spread:.0%} apart; stop other "
            "programs, or raise --repeat"
        )
    half = len(steps) // 2
    if half >= FEW_PROMPTS // 2:
        before, after = (median(s for _, s in part) for part in (steps[:half], steps[half:]))
        change = after / before - 1
        if abs(change) > NOISY:
            warnings.append(
                f"plain steps took {abs(change):.0%} {'more' if change > 0 else 'less'} time in "
                "the second half: the machine changed; the interleaved order evens it out, but "
                "run again when it is quiet"
            )
    return warnings


def _step(response: Response) -> float:
    """Seconds of a plain step, or its multiple of the least possible where that is known.

    The multiple is comparable between prompts of different lengths.
    """
    return response.decode_s / (response.limit_s or response.decoded_tokens)


def _repeat_spread(steps: list[tuple[Response, float]]) -> float | None:
    """Median over prompts of the relative range of their repeats; None without repeats."""
    by_prompt: dict[str, list[float]] = {}
    for response, step_s in steps:
        by_prompt.setdefault(response.prompt, []).append(step_s)
    spreads = [
        (max(times) - min(times)) / median(times) for times in by_prompt.values() if len(times) > 1
    ]
    return median(spreads) if spreads else None


def _updates(result: Result) -> list[str]:
    names = [arm.name for arm in result.arms if arm.updates]
    idle = [
        name
        for name in names
        if not any(one.update is not None and one.update.trained for one in result.of(name))
    ]
    warnings = []
    if idle:
        warnings.append(
            f"no update was made by {', '.join(idle)}: a bandit watches 10 texts first and fills a "
            "buffer of 4, and 'always' waits for 8; give more prompts"
        )
    if names and result.settings.repeats > 1:
        warnings.append(
            f"repeats of a prompt were decoded by drafters that had learnt from it "
            f"({', '.join(names)}): --repeat 1 meets new prompts only"
        )
    return warnings
