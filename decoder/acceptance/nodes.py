"""Nodes of a drawn tree under examination: each as it is visited, or all rows together.

Both rules meet a node after all children before it were rejected, so what they ask of it depends
on no choice. An accelerator works it out for all nodes, in one copy to the host (`judge_rows`); a
CPU, where each row is a pass over the vocabulary, for visited ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from costmodel.statistics import Array, Ints
from decoder.acceptance.drawn import DrawnTree, sibling_ranks
from decoder.acceptance.sampling import ROWS_AT_ONCE, SeededChoices
from decoder.device import to_device


class LogitRows(Protocol):
    """The logits [rows, vocab] of a verification: a tensor, or rows that are made when read."""

    def __getitem__(self, row: int, /) -> torch.Tensor: ...


class Nodes:
    """Some rows of a tree [n], whose children are rejected one after another.

    After j rejected children both rules need r_j p_j (in recursive rejection r is 1). It has a
    closed form: with the p, q and r of the start, Q_j the mass of q without the j tokens, and
    t_0 = 0,
        r_j p_j = [r p - t_j q]+ / Z_j,  Z_j = D(t_j) + 1 - r,  D(t) = sum [r p - t q]+,
        t_(j+1) = t_j + Z_j / Q_j,       r_j = D(t_j) / Z_j.
    By induction: [r_j p_j - q_j]+ is [r p - t_j q - (Z_j / Q_j) q]+ / Z_j at tokens still in
    q, and 0 at the removed ones, where r p < t q already: a child x is only ever rejected if
    r_j p_j(x) < q_j(x). With S = D(t_(j+1)) / Z_j the rule's p = d / S, r = S / (S + 1 - r_j)
    give r_(j+1) p_(j+1) = [r p - t_(j+1) q]+ / (Z_j (S + 1 - r_j)), and that denominator is
    D(t_(j+1)) + Z_j - D(t_j) = Z_(j+1). So a rejected child costs one pass over the
    vocabulary, and t is the only state. Sums are in float64.

    At r = 1, D is 0 only if p = q at every remaining token, and then no child is rejected; if
    rounding makes it 0, the target's own p is used. Where p is no number no child is accepted.
    """

    def __init__(
        self, tree: DrawnTree, rows: Ints, below: Ints, p: torch.Tensor, share: torch.Tensor
    ) -> None:
        """
        rows, below  [n], and of their children [n, most], 0 behind the last
        p, share     the target's distributions [n, vocab], and r [n]
        """
        sources = to_device(np.maximum(tree.sources[rows], 0), tree.q.device)
        # q may be on another device, and lack the padding of the target's vocabulary.
        q = _normalised(tree.q.index_select(0, sources).to(p.device))
        self._q, self.confidences = functional.pad(q, (0, p.shape[1] - q.shape[1])), q.amax(-1)
        self._p, self._share, self._left = p, share, share  # D(t)
        self._divisor = share + (1.0 - share)  # Z
        self._weights = self._rest = p * share[:, None]
        self._subtracted, self._rejected = torch.zeros_like(share), 0  # t
        self._exists = to_device(below > 0, p.device)
        tokens = to_device(np.where(below > 0, tree.tokens[below - 1], 0), p.device)
        self._child_weights = self._weights.gather(1, tokens)
        self._child_q = self._q.gather(1, tokens) * self._exists
        # Q: the mass of q without the rejected children, at least that of the remaining ones.
        to_here = self._child_q.cumsum(1)
        before, remaining = to_here - self._child_q, to_here[:, -1:] - to_here + self._child_q
        self._free = torch.maximum(1.0 - before, remaining)

    def after(self, rejected: int) -> Nodes:
        """The same rows, once their first children are rejected; never fewer than before."""
        for child in range(self._rejected, rejected):
            exists, step = self._exists[:, child], self._divisor / self._free[:, child]
            self._subtracted = self._subtracted + torch.where(exists, step, 0.0)
            by = self._subtracted[:, None]
            self._rest = torch.addcmul(self._weights, by, self._q, value=-1.0).clamp_min_(0.0)
            self._left = torch.where(exists, self._rest.sum(-1), self._left)
            self._divisor = self._left + (1.0 - self._share)
        self._rejected = rejected
        return self

    def ratio(self) -> torch.Tensor:
        """min(1, r p(x) / q(x)) [n] of the first child x not yet rejected; 1 where none is left."""
        child, divisor = self._rejected, self._divisor
        weight = self._child_weights[:, child] - self._subtracted * self._child_q[:, child]
        ratio = (weight / divisor * self._free[:, child] / self._child_q[:, child]).clamp_max(1.0)
        ratio = torch.where((weight > 0.0) & (divisor > 0.0), ratio, 0.0)
        return torch.where(self._exists[:, child], ratio, 1.0)

    def kept(self) -> torch.Tensor:
        """The present r [n]: the probability that a row is accepted as a leaf."""
        return (self._left / self._divisor).clamp_max(1.0).nan_to_num(1.0)

    def rest(self) -> torch.Tensor:
        """The weights [n, vocab] from which the last token is drawn."""
        return torch.where((self._left > 0.0)[:, None], self._rest, self._p)


def _normalised(probabilities: torch.Tensor) -> torch.Tensor:
    exact = probabilities.double()
    return exact / exact.sum(-1, keepdim=True)


class VisitedRows:
    """What a rule asks of each row, worked out when it asks."""

    def __init__(
        self, tree: DrawnTree, logits: LogitRows, choices: SeededChoices, *, whole_paths: bool
    ) -> None:
        self._tree, self._logits, self._choices = tree, logits, choices
        self._whole_paths, self._children = whole_paths, tree.child_rows()
        self._shares: dict[int, float] = {}  # r of the rows, where it is not 1
        self._open: dict[int, Nodes] = {}  # rows whose children are examined

    def share(self, row: int, rank: int) -> float:
        """min(1, r p(x) / q(x)) of a child; children before it are rejected from now on."""
        if rank == 0:
            p = _normalised(self._choices.distribution(self._logits[row]))[None]
            share = p.new_tensor([self._shares.get(row, 1.0)])
            below = np.array([self._children[row]])
            self._open[row] = Nodes(self._tree, np.array([row]), below, p, share)
        ratio = float(self._open[row].after(rank).ratio())
        if self._whole_paths:
            self._shares[self._children[row][rank]] = ratio
        return ratio

    def kept(self, row: int) -> float:
        """r of a row all of whose children are rejected."""
        ended = self._ended(row)
        return self._shares[row] if ended is None else float(ended.kept())

    def token(self, row: int) -> int:
        """A token drawn from the rest of the target's distribution there."""
        ended = self._ended(row)
        if ended is None:
            return self._choices.one_of(self._choices.distribution(self._logits[row]))
        return self._choices.one_of(ended.rest()[0])

    def confidence(self, row: int) -> float:
        """The largest probability of q below a row."""
        q = self._tree.q[int(self._tree.sources[row])]
        return float(q.amax() / q.sum())

    def _ended(self, row: int) -> Nodes | None:
        """The row with all its children rejected; None where it has none."""
        children = len(self._children[row])
        return self._open[row].after(children) if children else None


class JudgedRows:
    """The same from the numbers of all rows, on the host, in the order of `judge_rows`."""

    def __init__(self, tree: DrawnTree, numbers: Array) -> None:
        self._shares, self._kept, self._tokens, self._entropies, self._confidences = numbers
        self._children = tree.child_rows()
        self._visited: list[int] = []

    def share(self, row: int, rank: int) -> float:
        self._visited += [] if rank else [row]
        return float(self._shares[self._children[row][rank]])

    def kept(self, row: int) -> float:
        return float(self._kept[row])

    def token(self, row: int) -> int:
        self._visited += [] if self._children[row] else [row]
        return int(self._tokens[row])

    def confidence(self, row: int) -> float:
        return float(self._confidences[row])

    def entropies(self) -> list[float]:
        return self._entropies[self._visited].tolist()


RowNumbers = VisitedRows | JudgedRows


def judge_rows(
    tree: DrawnTree,
    distributions: Callable[[torch.Tensor], torch.Tensor],
    draw: Callable[[torch.Tensor], torch.Tensor],
    *,
    device: torch.device,
    whole_paths: bool,
) -> torch.Tensor:
    """What a rule asks of each row of a tree, float64 [5, rows] on the device, without a wait.

    In order: min(1, r p(x) / q(x)) of the row's token x; r, and a token drawn from the rest of the
    target's distribution, once all children are rejected; the distribution's entropy; the largest
    probability of q below the row.

    distributions  the target's [n, vocab] behind rows int64 [n]
    draw           tokens [n] in proportion to weights float64 [n, vocab]
    whole_paths    traversal verification; else recursive rejection, where r is 1 at every node
    """
    depths, parents = tree.row_depths(), tree.parents
    children = np.zeros((tree.rows, int(np.bincount(parents).max())), dtype=np.int64)
    children[parents, sibling_ranks(parents)] = np.arange(1, tree.rows)
    made = torch.ones(5, tree.rows, dtype=torch.float64, device=device)
    for depth in range(int(depths.max()) + 1):
        level = np.flatnonzero(depths == depth)
        for rows in np.array_split(level, -(-len(level) // ROWS_AT_ONCE)):
            at = to_device(rows, device)
            p = _normalised(distributions(at))
            share = made[0].index_select(0, at) if whole_paths else torch.ones_like(p[:, 0])
            below = children[rows, : max(int((children[rows] > 0).sum(1).max()), 1)]
            nodes = Nodes(tree, rows, below, p, share)
            shares = torch.stack([nodes.after(i).ratio() for i in range(below.shape[1])], 1)
            nodes.after(below.shape[1])
            entropies = torch.special.entr(p).sum(-1)
            others = nodes.kept(), draw(nodes.rest()), entropies, nodes.confidences
            made[1:].index_copy_(1, at, torch.stack(others))
            # Row 0 stands for a child that a row does not have, and keeps its 1.
            made[0].scatter_(0, to_device(below.ravel(), device), shares.flatten())
    return made
