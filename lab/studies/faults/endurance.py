"""One decoder used for long, and from four threads at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from costmodel.errors import RooftreeError
from decoder.engine import TreeDecoder
from decoder.model.loading import LoadedModel
from decoder.model.target import Target

TOKENS = 12
MOST_GROWTH_BYTES = 20_000_000  # over the generations after the first hundred


def prompts(count: int) -> list[list[int]]:
    return [[3 + n % 50, 7, 3 + n % 50, 7, 11 + n % 13] for n in range(count)]


def run_threads(loaded: LoadedModel, calls: int) -> dict[str, Any]:
    """Calls on one decoder from four threads: the right text, or a clear error."""
    plain = TreeDecoder(Target(loaded), policy="plain")
    wanted = [plain.generate(p, max_new_tokens=TOKENS).token_ids for p in prompts(50)]
    decoder = TreeDecoder(Target(loaded), policy="fixed:6")
    counts: dict[str, Any] = {"calls": calls, "right": 0, "errors": 0, "failures": []}

    def call(number: int) -> str:
        try:
            done = decoder.generate(prompts(50)[number % 50], max_new_tokens=TOKENS)
        except RooftreeError:
            return "errors"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "right" if done.token_ids == wanted[number % 50] else "a wrong text"

    with ThreadPoolExecutor(4) as pool:
        for outcome in pool.map(call, range(calls)):
            if outcome in ("right", "errors"):
                counts[outcome] += 1
            else:
                counts["failures"].append(outcome[:200])
    return counts


def run_long(loaded: LoadedModel, generations: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Generations in a row: the same texts again and again, and memory that does not grow."""
    decoder = TreeDecoder(Target(loaded), policy="fixed:6")
    first: list[list[int]] = []
    failures: list[str] = []
    process, base_bytes = psutil.Process(), 0
    for number in range(generations):
        tokens = decoder.generate(prompts(10)[number % 10], max_new_tokens=TOKENS).token_ids
        if number < 10:
            first.append(tokens)
        elif tokens != first[number % 10]:
            failures.append(f"generation {number} gave another text")
        if number == min(100, generations // 2):
            gc.collect()
            base_bytes = process.memory_info().rss
    gc.collect()
    grown_bytes = process.memory_info().rss - base_bytes
    if grown_bytes > MOST_GROWTH_BYTES:
        failures.append(f"memory grew by {grown_bytes / 1e6:.0f} MB")
    say(f"{generations} generations: {grown_bytes / 1e6:+.1f} MB")
    return {"generations": generations, "grown_bytes": grown_bytes, "failures": failures}
