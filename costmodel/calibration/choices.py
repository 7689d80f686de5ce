"""Choices of a tree size at measured points: their regret, and the points that leave it open.

Measured times are noisy, and the best size by noisy times looks better than it is: its loss is
partly the noise of the times that it is judged by. `likely_regret` takes that part out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.calibration.points import Points
from costmodel.fields import Section, Share
from costmodel.statistics import Array, Bools

MIN_CHOICES = 4  # row counts of a context; with fewer there is hardly a choice to get wrong
_DRAWS = 200
_STANDS_OUT = 3.0  # standard errors of a residual that is no noise
_INTERVAL = (0.05, 0.95)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCurve:
    """Expected committed tokens a verification, by the number of drafted nodes N.

    A(N) = 1 + (saturation - 1) N / (N + half_nodes): one token without a draft, half of the
    gain at `half_nodes`, and concave like the curve of any best-first tree (paper, eq. 5).
    """

    saturation: float
    half_nodes: float

    @property
    def text(self) -> str:
        """A(N) as a formula."""
        return f"1 + {self.saturation - 1:g} N / (N + {self.half_nodes:g})"

    def committed(self, nodes: ArrayLike) -> Array:
        n = np.asarray(nodes, dtype=np.float64)
        return np.asarray(1.0 + (self.saturation - 1.0) * n / (n + self.half_nodes))


# 4.5 tokens a verification, half of the gain at 16 nodes: one of the standard curves.
USUAL_CURVE = AcceptanceCurve(saturation=4.5, half_nodes=16.0)


def standard_curves() -> tuple[AcceptanceCurve, ...]:
    """The 18 curves over which decision regret is stated, from a useless drafter to the paper's
    best.
    """
    return tuple(
        AcceptanceCurve(saturation=saturation, half_nodes=half_nodes)
        for saturation in (1.3, 2.0, 3.0, 4.5, 6.5, 10.0)
        for half_nodes in (4, 16, 64)
    )


class Regret(Section):
    """Shares of tokens/s lost, 0 .. 1, by choosing N from predicted times instead of true ones.

    Times of verifications alone give the regret for a free draft, the harder case. `worst` is the
    expected loss of the choice with the largest one; `interval` a 90 % interval of the mean.
    """

    mean: Share
    worst: Share
    interval: tuple[Share, Share] | None = None


def regret_at_contexts(points: Points, predicted_s: ArrayLike) -> Regret | None:
    """Decision regret over the standard curves, choosing among each context's row counts.

    None where no context (and batch) has two row counts. Points of one shape count once.
    """
    predicted, times_s = np.asarray(predicted_s, dtype=np.float64), points.seconds[None]
    losses = [_losses(points, predicted, times_s, here)[0] for here in choices(points)]
    if not losses:
        return None
    lost = np.concatenate(losses, axis=1)
    return Regret(mean=float(lost.mean()), worst=float(lost.max()))


def likely_regret(points: Points, predicted_s: ArrayLike) -> Regret | None:
    """The regret of `regret_at_contexts` under times that are likely given the measured ones.

    The prediction is off by a model error, the measured time by its noise. The variance of the
    model error is what the residuals exceed the noise by: over all points, or at one point where
    it stands out. Times are drawn from the normal posterior of both (empirical Bayes, in log
    seconds), with the variance of the residuals as uncertain as its number of points makes it.
    """
    groups = list(choices(points))
    if not groups:
        return None
    predicted, random = np.asarray(predicted_s, dtype=np.float64), np.random.default_rng(0)
    residual = np.log(points.seconds / predicted)
    # A factor common to all times changes no choice.
    residual -= np.median(residual)
    noise = points.median_error**2
    freedom = max(len(points) - 1, 1)
    total = np.sum(residual**2) / random.chisquare(freedom, (_DRAWS, 1))
    alone = np.where(residual**2 > _STANDS_OUT**2 * noise, residual**2 - noise, 0.0)
    model = np.maximum(np.maximum(total - np.mean(noise), alone), 0.0)
    weight = model / np.maximum(model + noise, 1e-12)  # [draws, points]
    spread = np.sqrt(weight * noise)
    drawn = weight * residual + spread * random.standard_normal(weight.shape)
    lost = np.concatenate(
        [_losses(points, predicted, predicted * np.exp(drawn), here)[0] for here in groups], axis=1
    )
    means = lost.mean(axis=1)
    low, high = np.quantile(means, _INTERVAL)
    return Regret(
        mean=float(means.mean()),
        worst=float(lost.mean(axis=0).max()),
        interval=(float(low), float(high)),
    )


def doubt(points: Points, predicted_s: ArrayLike) -> Array:
    """The expected loss behind each point if the times were measured again: [points].

    Times are drawn within their noise. Where another size than the predicted one is best by
    the drawn times, the loss counts for both (top-two Thompson sampling).
    """
    predicted, random = np.asarray(predicted_s, dtype=np.float64), np.random.default_rng(0)
    noise = points.median_error * random.standard_normal((_DRAWS, len(points)))
    score = np.zeros(len(points))
    for here in choices(points):
        lost, chosen, best = _losses(points, predicted, points.seconds * np.exp(noise), here)
        for places in (np.broadcast_to(chosen, best.shape), best):
            score += np.bincount(here[places].ravel(), lost.ravel(), len(points))
    return np.asarray(score / _DRAWS / len(standard_curves()), dtype=np.float64)


def most_rows_that_pay(points: Points, slack: float) -> int:
    """The largest row count that some standard curve may choose at some context and batch.

    slack  a size counts where its tokens a second are within this share of the best size's
    """
    most = 1
    for here in choices(points):
        rows = points.rows[here]
        for curve in standard_curves():
            rate = curve.committed(rows - 1) / points.seconds[here]
            most = max(most, int(rows[rate * (1 + slack) >= rate.max()].max()))
    return most


def has_choices(points: Points) -> Bools:
    """[points] whether a point's context has row counts enough for a choice to be judged."""
    _, number, counts = np.unique(points.context, return_inverse=True, return_counts=True)
    return np.asarray(counts[number] >= MIN_CHOICES)


def _losses(
    points: Points, predicted_s: Array, seconds: Array, here: NDArray[np.intp]
) -> tuple[Array, NDArray[np.intp], NDArray[np.intp]]:
    """Losses [draws, curves] at one context by drawn seconds [draws, points].

    With the place in `here` of the chosen size [curves] and of the best one [draws, curves].
    """
    nodes = points.rows[here] - 1
    committed = np.stack([curve.committed(nodes) for curve in standard_curves()])
    chosen = np.argmax(committed / predicted_s[here], axis=1)
    rates = committed / seconds[:, None, here]  # [draws, curves, sizes]
    best = np.argmax(rates, axis=2)
    taken = rates[:, np.arange(len(chosen)), chosen]
    return 1.0 - taken / rates.max(axis=2), chosen, best


def choices(points: Points) -> Iterator[NDArray[np.intp]]:
    """The numbers of each context's points to choose among, one for each row count."""
    shapes = np.stack([points.context, points.batch], axis=1)
    for context, batch in np.unique(shapes, axis=0):
        here = np.flatnonzero((points.context == context) & (points.batch == batch))
        rows, first = np.unique(points.rows[here], return_index=True)
        if len(rows) > 1:
            yield here[first]
