"""What a reader should know before believing a result, each with what to do about it."""

from __future__ import annotations

from statistics import median

from profiler.bench.figures import differing
from profiler.bench.record import PLAIN, Response, Result

FEW_PROMPTS = 10
NOISY = 0.05
OURS = ("measured", "quick")  # profiles of this very machine


def result_warnings(result: Result) -> tuple[str, ...]:
    """All warnings that the result itself gives rise to."""
    found = [
        *_few_prompts(result),
        *_noise(result),
        *_profile(result),
        *_differing(result),
        *_updates(result),
    ]
    drift = (warning for response in result.responses for warning in response.warnings)
    return tuple(found + list(dict.fromkeys(drift)))


def _few_prompts(result: Result) -> list[str]:
    prompts = len(result.prompts)
    if prompts >= FEW_PROMPTS:
        return []
    noun = "prompt" if prompts == 1 else "prompts"
    return [f"only {prompts} {noun}: intervals are wide or missing; give {FEW_PROMPTS} or more"]


def _noise(result: Result) -> list[str]:
    """Plain decoding does the same work all along, so that its changes are the machine's."""
    plain = sorted(result.of(PLAIN), key=lambda one: one.place)
    steps = [(one, _step(one)) for one in plain if one.decoded_tokens > 0]
    found = []
    apart = _apart(steps)
    if apart is not None and apart > NOISY:
        found.append(
            f"a noisy machine: repeats of plain decoding are {apart:.0%} apart; stop other "
            "programs, or raise --repeat"
        )
    half = len(steps) // 2
    if half >= FEW_PROMPTS // 2:
        before, after = (median(s for _, s in part) for part in (steps[:half], steps[half:]))
        change = after / before - 1
        if abs(change) > NOISY:
            found.append(
                f"plain steps took {abs(change):.0%} {'more' if change > 0 else 'less'} time in "
                "the second half: the machine changed; the interleaved order evens it out, but "
                "run again when it is quiet"
            )
    return found


def _step(response: Response) -> float:
    """The time of a plain step, as a multiple of the least possible where that is known.

    Contexts differ from prompt to prompt, and the least possible with them.
    """
    return response.decode_s / (response.limit_s or response.decoded_tokens)


def _apart(steps: list[tuple[Response, float]]) -> float | None:
    """Median relative distance of the repeats of a prompt; None without repeats."""
    by_prompt: dict[str, list[float]] = {}
    for response, step_s in steps:
        by_prompt.setdefault(response.prompt, []).append(step_s)
    spreads = [(max(own) - min(own)) / median(own) for own in by_prompt.values() if len(own) > 1]
    return median(spreads) if spreads else None


def _profile(result: Result) -> list[str]:
    if result.profile is None:
        return []
    if result.profile.kind in OURS:
        return []
    return [
        f"the costs come from a {result.profile.kind} profile, not from this machine: "
        "`rooftree calibrate` measures one"
    ]


def _updates(result: Result) -> list[str]:
    names = [arm.name for arm in result.arms if arm.updates]
    idle = [
        name
        for name in names
        if not any(one.update is not None and one.update.trained for one in result.of(name))
    ]
    found = []
    if idle:
        found.append(
            f"no update was made by {', '.join(idle)}: a bandit watches 10 texts first and fills a "
            "buffer of 4, and 'always' waits for 8; give more prompts"
        )
    if names and result.settings.repeats > 1:
        found.append(
            f"repeats of a prompt were decoded by drafters that had learnt from it "
            f"({', '.join(names)}): --repeat 1 meets new prompts only"
        )
    return found


def _differing(result: Result) -> list[str]:
    counts = {arm.name: differing(result, arm.name) or 0 for arm in result.arms}
    wrong = [f"{name} {count}" for name, count in counts.items() if count]
    if not wrong:
        return []
    each = len(result.of(PLAIN))
    hint = (
        "near-ties round differently over one row and over several; --same-text compares our "
        "arms on one text, and --dtype float32 decides nearly all ties alike"
        if result.settings.dtype != "float32"
        else "near-ties may still round differently in float32; more than a few would be a fault"
    )
    return [f"texts that differ from plain decoding's, of {each}: {', '.join(wrong)} ({hint})"]
