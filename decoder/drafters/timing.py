"""What one draft costs, for profiles and probes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch

from costmodel.stages import DrafterSection
from decoder.device import synchronise
from decoder.drafters.base import Drafter, DraftRequest
from decoder.growth import TopPaths
from decoder.target import Target

REPEATS = 5
CONTEXT = 1024  # tokens, where the target and drafter have room for as many
WIDTH = 256  # candidates a position, those of the largest usual tree
DISTINCT_TOKENS = 50  # few, so that there are earlier matches to follow as in real text


def steady_draft(
    drafter: Drafter, target: Target, context: int, seed: int = 0
) -> Callable[[], object]:
    """A function that drafts behind a text of `context` tokens, the same each time.

    Text and target features are random. Raises InputError as the drafter does.
    """
    random = np.random.default_rng(seed)
    vocab = target.architecture.vocab
    tokens = random.integers(0, min(DISTINCT_TOKENS, vocab), context + 1).astype(np.int64)
    features = None
    if drafter.feature_layers:
        width = len(drafter.feature_layers) * target.architecture.hidden
        features = torch.randn(context, width, generator=torch.Generator().manual_seed(seed)).to(
            target.device, target.dtype
        )
    session = drafter.session()
    session.start(tokens[:-1], features)
    growth = TopPaths()
    request = DraftRequest(depth=drafter.max_depth, width=min(WIDTH, vocab), growth=growth)

    def draft() -> object:
        return session.draft(tokens, request)

    return draft


def time_drafter(drafter: Drafter, target: Target) -> DrafterSection:
    """One draft's cost, for a profile that does not have this drafter."""
    context = min(CONTEXT, target.max_context - drafter.max_depth - 1)
    draft = steady_draft(drafter, target, context)
    times = []
    for _ in range(REPEATS + 1):
        synchronise(target.device)
        start_s = perf_counter()
        draft()
        synchronise(target.device)
        times.append(perf_counter() - start_s)
    kept = times[1:]  # the first call compiles
    return DrafterSection(
        name=drafter.name,
        context=[context],
        median_s=[median(kept)],
        mad_s=[mad_s(kept)],
        n=[len(kept)],
    )


def mad_s(times: list[float]) -> float:
    """The median absolute deviation of some seconds."""
    centre = median(times)
    return median(abs(value - centre) for value in times)
