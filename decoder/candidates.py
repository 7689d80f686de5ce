"""Candidates made fit to build a tree from, whatever a drafter gives.

A drafter is a model that may overflow, a file that may be damaged, or somebody else's
code. What it proposes may cost speed, never the output: what is no token of the target
or no probability is left out here, before anything is chosen or forwarded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decoder.tree import CandidateTree, Lattice


def usable(candidates: Lattice | CandidateTree, vocab: int) -> Lattice | CandidateTree:
    """The candidates without tokens outside [0, vocab) and without probabilities that are none.

    Probabilities above 1 (infinity included) count as 1; those that are negative or not a
    number are none. Of a tree, what hangs below such a node goes with it. Candidates that
    need nothing are returned as they are.
    """
    tokens, probabilities = candidates.tokens, candidates.probabilities
    sound = (probabilities >= 0.0) & (tokens >= 0) & (tokens < vocab)  # NaN compares false
    if sound.all() and (probabilities <= 1.0).all():
        return candidates
    if isinstance(candidates, Lattice):
        return _sound_lattice(candidates, sound)
    return _sound_tree(candidates, sound)


def _sound_lattice(lattice: Lattice, sound: NDArray[np.bool_]) -> Lattice:
    """Positions down to the first without a sound candidate; K is the fewest of any left."""
    counts = sound.sum(axis=1)
    gone = np.flatnonzero(counts == 0)
    depth = int(gone[0]) if len(gone) else len(counts)
    width = int(counts[:depth].min(initial=lattice.tokens.shape[1]))
    # Sound ones first, the most probable before the others; equals stay in their order.
    capped = np.where(sound, np.minimum(lattice.probabilities, 1.0), -1.0)[:depth]
    order = np.argsort(-capped, axis=1, kind="stable")[:, :width]
    return Lattice(
        np.take_along_axis(lattice.tokens[:depth], order, axis=1),
        np.take_along_axis(capped, order, axis=1),
        lattice.whole if lattice.whole is None else lattice.whole[:depth],
    )


def _sound_tree(tree: CandidateTree, sound: NDArray[np.bool_]) -> CandidateTree:
    """The nodes whose whole path is sound."""
    kept = np.ones(len(sound) + 1, dtype=np.bool_)  # by row: the root is kept
    for node, parent in enumerate(tree.parents):
        kept[node + 1] = sound[node] and kept[parent]
    rows = np.cumsum(kept) - 1
    nodes = kept[1:]
    return CandidateTree(
        tree.tokens[nodes],
        rows[tree.parents[nodes]],
        np.minimum(tree.probabilities[nodes], 1.0),
    )
