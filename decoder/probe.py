"""The start-up probe: six points with the decoder's own verify step, at most a few seconds."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np
import torch

from costmodel.points import Points
from costmodel.profile import Profile
from costmodel.stages import DrafterSection
from decoder.device import synchronise
from decoder.drafters.base import Drafter
from decoder.drafters.timing import mad_s, time_drafter
from decoder.profiles import Measurement, find_peaks, make_profile
from decoder.target import Step, Target
from decoder.tree import EMPTY, DraftTree

POINTS = ((1, 256), (4, 256), (16, 256), (64, 256), (1, 1024), (32, 1024))  # rows, context
BUDGET_S = 5.0
REPEATS = 7


def quick_profile(target: Target, drafter: Drafter, known: DrafterSection | None = None) -> Profile:
    """A profile with provenance `quick`, from about six points timed here and now.

    known  the cost of this drafter, where it was timed before
    """
    start_s = perf_counter()
    peaks = find_peaks(target)
    shapes = probe_shapes(target.max_context)
    samples = _time_points(target, shapes, deadline_s=start_s + BUDGET_S)
    rows, contexts = zip(*shapes, strict=True)
    points = Points(
        rows=rows,
        context=contexts,
        seconds=[median(times) for times in samples],
        mad_s=[mad_s(times) for times in samples],
        n=[len(times) for times in samples],
    )
    return make_profile(
        target,
        Measurement(
            kind="quick",
            points=points,
            peaks=peaks,
            provenance={
                "samples": sum(len(times) for times in samples),
                "duration_s": round(perf_counter() - start_s, 2),
            },
            sections={
                "drafters": {drafter.architecture_hash: known or time_drafter(drafter, target)}
            },
        ),
    )


def probe_shapes(longest: int) -> list[tuple[int, int]]:
    """(rows, context) of the points that fit `longest` positions, each once."""
    fitting = [(rows, min(context, longest - rows)) for rows, context in POINTS if rows < longest]
    return list(dict.fromkeys(fitting))


def _time_points(
    target: Target, shapes: list[tuple[int, int]], deadline_s: float
) -> list[list[float]]:
    """Seconds of each shape, in passes over all of them until the deadline, once at least."""
    before = target.cache
    target.cache = None
    cache = target.reserve(max(rows + context for rows, context in shapes))
    try:
        with torch.inference_mode():
            cache.data.normal_()
        trees = [_bush(rows - 1) for rows, _ in shapes]
        for tree, (_, context) in zip(trees, shapes, strict=True):
            cache.truncate(context)
            target.verify([Step(0, tree)])
        samples: list[list[float]] = [[] for _ in shapes]
        for _ in range(REPEATS):
            for tree, (_, context), times in zip(trees, shapes, samples, strict=True):
                cache.truncate(context)
                times.append(_seconds(target, tree))
            if target.ranks.largest(perf_counter() - deadline_s) > 0:
                break
        return samples
    finally:
        target.cache = before


def time_forward(target: Target, rows: int, context: int) -> list[float]:
    """Seconds of a few forwards of one shape."""
    return _time_points(target, [(rows, context)], deadline_s=perf_counter() + BUDGET_S)[0]


def _seconds(target: Target, tree: DraftTree) -> float:
    synchronise(target.device)
    start_s = perf_counter()
    target.verify([Step(0, tree)])
    synchronise(target.device)
    return perf_counter() - start_s


def _bush(nodes: int) -> DraftTree:
    """A tree whose every row has up to four children."""
    if nodes == 0:
        return EMPTY
    parents = np.arange(nodes, dtype=np.int64) // 4
    depths = np.empty(nodes, np.int64)
    for node, parent in enumerate(parents):
        depths[node] = 1 if parent == 0 else depths[parent - 1] + 1
    return DraftTree(np.arange(nodes, dtype=np.int64), parents, depths, np.full(nodes, 0.1))
