"""What one draft costs, for profiles and probes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import cast

import numpy as np
import torch

from costmodel.stages import DrafterSection
from decoder.device import synchronise
from decoder.drafters.base import Drafter, DraftRequest, RewindableSession
from decoder.growth import TopPaths
from decoder.target import Target

REPEATS = 5
CONTEXT = 1024  # tokens, where the target and drafter have room for as many
WIDTH = 256  # candidates a position, those of the largest usual tree
NEW_TOKENS = 4  # that a round emits, three accepted ones among them
DISTINCT_TOKENS = 50  # few, so that there are earlier matches to follow as in real text


def steady_draft(
    drafter: Drafter, target: Target, context: int, seed: int = 0
) -> Callable[[], object]:
    """A function that drafts as in any round behind `context` cached tokens, the same each time.

    Where the drafter takes in what the target has kept of the round before, that is part of
    it: each call observes a usual number of tokens and drafts, and the next one first goes
    back to the shorter text. A model that drafts takes all of them in, though in a text some
    are known to it from its own draft: a few rows more in the same forward. Text and target
    features are random. Raises InputError as the drafter does.
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
    growth = TopPaths()
    request = DraftRequest(depth=drafter.max_depth, width=min(WIDTH, vocab), growth=growth)
    if not hasattr(session, "rewind") or context <= NEW_TOKENS:
        session.start(tokens[:-1], features)
        return lambda: session.draft(tokens, request)
    rewindable = cast(RewindableSession, session)
    before = context - NEW_TOKENS
    emitted = tokens[before + 1 :].tolist()
    rows = None if features is None else features[before:]
    rewindable.start(tokens[:before], None if features is None else features[:before])
    rewindable.draft(tokens[: before + 1], request)  # takes in what only a prompt leaves over

    def one_round() -> object:
        rewindable.rewind(before)
        rewindable.observe(emitted, rows)
        return rewindable.draft(tokens, request)

    return one_round


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
