"""The start-up probe: a few verifications and drafts, timed for at most a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch

from costmodel.calibration.points import Points
from costmodel.errors import DrafterError, RooftreeError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import DrafterSection
from costmodel.statistics import mad_s
from decoder.device import seconds_of
from decoder.drafters.base import Drafter, DraftRequest
from decoder.model.target import Step, Target
from decoder.profiling.measured_profile import make_profile, peaks_of, subject_of
from decoder.tree.draft_tree import DraftTree
from decoder.tree.growth import TopPaths

POINTS = ((1, 256), (4, 256), (16, 256), (1, 1024), (32, 1024), (64, 256))  # rows, context
LEAST_POINTS = 4  # that are timed however long they take
BUDGET_S = 5.0  # of all, without first calls, which may compile
POINTS_SHARE = 0.3  # of it, that the points have at least
REPEATS = 7


def quick_profile(
    target: Target, drafter: Drafter, draft_cost: DrafterSection | None = None
) -> Profile:
    """A profile of provenance `quick`, from about six points that are timed now.

    draft_cost  of this drafter, if it was timed before
    """
    start_s = perf_counter()
    until_s = start_s + BUDGET_S
    peaks = peaks_of(target.device, target.dtype)
    drafts = draft_cost or time_drafter(drafter, target, until_s)
    longest = target.max_context
    fitting = ((rows, min(context, longest - rows)) for rows, context in POINTS if rows < longest)
    shapes = list(dict.fromkeys(fitting))
    samples = _time_points(target, shapes, max(until_s, perf_counter() + POINTS_SHARE * BUDGET_S))
    rows, contexts = zip(*shapes[: len(samples)], strict=True)
    points = Points(
        rows=rows,
        context=contexts,
        seconds=[median(times) for times in samples],
        mad_s=np.array([mad_s(times) for times in samples], np.float64),
        n=[len(times) for times in samples],
    )
    provenance = {
        "samples": sum(map(len, samples)),
        "duration_s": round(perf_counter() - start_s, 2),
    }
    sections = {"drafters": {drafter.architecture_hash: drafts}}
    return make_profile(subject_of(target), "quick", points, peaks, provenance, **sections)


def _time_points(
    target: Target, shapes: list[tuple[int, int]], until_s: float
) -> list[list[float]]:
    """Seconds of each shape (rows, context), in passes over all of them while time is left.

    Each shape first runs once untimed. Without time for more it ends after `LEAST_POINTS` shapes.
    The target gets its cache back afterwards.

    until_s  by the clock `perf_counter`, and as much later as compiling and capturing take
    """
    before = target.cache
    target.cache = None
    cache = target.reserve(max(rows + context for rows, context in shapes))
    try:
        cache.fill_with_noise()

        def seconds(rows: int, context: int) -> float:
            cache.truncate(context)
            steps = [Step(0, _broad_tree(rows - 1))]
            return seconds_of(lambda: target.verify(steps), target.device)

        samples: list[list[float]] = []
        for shape in shapes:
            if len(samples) >= LEAST_POINTS and perf_counter() > until_s:
                break
            untimed_s = seconds(*shape)
            samples.append([seconds(*shape)])
            until_s += max(untimed_s - samples[-1][0], 0.0)
        pass_s = sum(first_s for [first_s] in samples)
        while len(samples[0]) < REPEATS and perf_counter() + pass_s <= until_s:
            for shape, times_s in zip(shapes, samples, strict=False):
                times_s.append(seconds(*shape))
        return samples
    finally:
        target.cache = before


def time_forward(target: Target, rows: int, context: int) -> list[float]:
    return _time_points(target, [(rows, context)], perf_counter() + BUDGET_S)[0]


def _broad_tree(nodes: int) -> DraftTree:
    """A tree whose every row has up to four children."""
    node = np.arange(nodes, dtype=np.int64)
    depths = (np.log2(3 * node + 4) / 2).astype(np.int64)  # 4, 16, 64, ... nodes a depth
    return DraftTree(node, node // 4, depths, np.full(nodes, 0.1))


DRAFT_REPEATS = 5
CONTEXT = 1024  # tokens, where the target and drafter have room for as many
WIDTH = 256  # candidates a position, those of the largest usual tree
NEW_TOKENS = 4  # that a round emits, three accepted ones among them
DISTINCT_TOKENS = 50  # few, so that there are earlier matches to follow as in real text


def steady_draft(
    drafter: Drafter, target: Target, context: int, seed: int = 0
) -> Callable[[], object]:
    """A function that makes the same usual draft behind `context` cached tokens at each call.

    A drafter may process the tokens that were accepted in the round before: a call rewinds the
    text by `NEW_TOKENS`, observes them again and drafts. A drafting model processes all of them,
    although in a real text some are cached. Text and features are random. Raises InputError.
    """
    random = np.random.default_rng(seed)
    vocab = target.architecture.vocab
    tokens = random.integers(0, min(DISTINCT_TOKENS, vocab), context + 1).astype(np.int64)
    tokens.setflags(write=False)  # as in decoding
    features = None
    if drafter.feature_layers:
        width = len(drafter.feature_layers) * target.architecture.hidden
        features = torch.randn(context, width, generator=torch.Generator().manual_seed(seed)).to(
            target.device, target.dtype
        )
    session = drafter.start(tokens[:-1], features)
    growth = TopPaths()
    request = DraftRequest(depth=drafter.max_depth, width=min(WIDTH, vocab), growth=growth)
    if not session.rewinds or context <= NEW_TOKENS:
        return lambda: session.draft(tokens, request)
    before = context - NEW_TOKENS
    emitted = tokens[before + 1 :].tolist()
    rows = None if features is None else features[before:]
    session.draft(tokens, request)  # processes the prompt

    def one_round() -> object:
        session.rewind(before)
        session.observe(emitted, rows)
        return session.draft(tokens, request)

    return one_round


def time_drafter(drafter: Drafter, target: Target, until_s: float = float("inf")) -> DrafterSection:
    """The cost of one draft, as a section of a profile. Raises DrafterError where it fails.

    until_s  no further draft starts after this time of the clock `perf_counter`
    """
    context = min(CONTEXT, target.max_context - drafter.max_depth - 1)
    times_s: list[float] = []
    try:
        draft = steady_draft(drafter, target, context)
        # The first call compiles, so there are two at least.
        while len(times_s) < 2 or (len(times_s) <= DRAFT_REPEATS and perf_counter() <= until_s):
            times_s.append(seconds_of(draft, target.device))
    except RooftreeError:
        raise
    except Exception as error:
        raise DrafterError(
            f"the drafter {drafter.name} fails where its draft is timed:"
            f" {type(error).__name__}: {error}",
            hint="Mend it, or use another drafter.",
        ) from error
    del times_s[0]
    return DrafterSection(
        name=drafter.name,
        context=(context,),
        median_s=(median(times_s),),
        mad_s=(mad_s(times_s),),
        n=(len(times_s),),
    )
