"""Recurrent states: outputs of a draft tree's rows from one state, steps of it, and their cache.

A row reads the state behind its own path. No state a node is made: the decays and the updates
of a row's ancestors are sums under the ancestor mask, and where an update reads the state
before it (gated delta rule) the updates of all rows are the solution of one unit lower
triangular system (the chunk form of Yang et al., Gated Delta Networks, with ancestors in
place of earlier rows). A commit steps along the accepted path in the order of operations of
transformers' decoding, so that the state does not drift from it.

A state is [heads, keys, values], in float32. Rows are the second dimension of all that is kept
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from costmodel.errors import InputError
from costmodel.statistics import Bools, Ints

NORM_EPS = 1e-6  # of transformers' normalised queries and keys
READING = "delta"  # the kind of rule whose updates read the state


# `conv` with channels and columns, `delta` or `ssm` with heads, keys and values.
StateShape = tuple[str | int, ...]


class Ancestors:
    """The pending and new rows that each new row has on its path; made once a forward.

    visible  boolean [rows, pending + rows], with the row itself
    hidden   the opposite [rows, pending + rows, 1], on the device
    summed   float32 [rows, pending + rows]: a product with it sums over a row's path
    """

    def __init__(self, visible: Bools, device: torch.device) -> None:
        self._visible, self.pending = visible, visible.shape[1] - visible.shape[0]
        seen = torch.from_numpy(visible).to(device)
        self.hidden, self.summed = ~seen[..., None], seen.to(torch.float32)
        self._windows: dict[int, Tensor] = {}

    def windows(self, width: int) -> Tensor:
        """The last `width` columns of each row's path, flat int64 [rows * width].

        The columns are width - 1 committed ones, then the pending and new rows.
        """
        if width not in self._windows:
            index = torch.from_numpy(path_windows(self._visible, width).ravel())
            self._windows[width] = index.to(self.hidden.device)
        return self._windows[width]


def path_windows(visible: Bools, width: int) -> Ints:
    """See `Ancestors.windows`; int64 [rows, width]."""
    lengths = visible.sum(1)
    index = lengths[:, None] - 1 + np.arange(width)  # as if all were committed
    behind = lengths[:, None] - visible.cumsum(1)  # rows of the path behind each of its rows
    rows, columns = np.nonzero(visible & (behind < width))
    index[rows, width - 1 - behind[rows, columns]] = width - 1 + columns
    return index


def convolved(columns: Tensor, ancestors: Ancestors, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The causal depthwise convolution along each row's path, [rows, channels].

    columns  [channels, width - 1 + pending + rows]
    weight   [channels, width]

    A convolution over windows: products that are summed by hand round differently in bfloat16.
    """
    channels, width = weight.shape
    windows = columns[:, ancestors.windows(width)].view(channels, -1, width).transpose(0, 1)
    mixed = functional.conv1d(
        windows.contiguous().to(weight.dtype), weight[:, None], bias, groups=channels
    )
    return mixed[..., 0]


class KeptRows(NamedTuple):
    """What a rule keeps of rows, for a commit and for rows of later forwards.

    key     [heads, rows, keys], and value [heads, rows, values]: as the rule's step has them
    beta    [heads, rows, 1]: the share of a value, or the length of a step
    decay   [heads, rows, 1], or of each key's number [heads, rows, keys]; a logarithm
    update  [heads, rows, values]: what is added to the state under the key
    total   the decay from the committed state on
    """

    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor
    update: Tensor
    total: Tensor


@dataclass(frozen=True, slots=True)
class RuleRows:
    """The rows of a call of a rule, [heads, rows, width] each; names as in `KeptRows`.

    kind   `delta` (gated delta rule), whose updates read the state, or `ssm` (mamba2)
    parts  keys, values, betas, decays
    skip   [heads] of a connection from values to outputs, or None
    """

    kind: str
    query: Tensor
    parts: Sequence[Tensor]
    dtype: torch.dtype
    skip: Tensor | None = None

    def single(self, rows: slice, state: Tensor) -> tuple[Tensor, KeptRows, Tensor]:
        """The output of one row, what is kept of it, and the state behind it."""
        key, value, beta, decay = (part[:, rows] for part in self.parts)
        kept = KeptRows(key, value, beta, decay, (value * beta).float(), decay)
        state, update = stepped(self.kind, state, kept, 0)
        if self.kind == READING:
            output = (state * self.query[:, rows].mT).sum(-2, keepdim=True)
            kept = kept._replace(update=update)
        else:
            output = self.query[:, rows] @ state.to(self.query.dtype)
        return self._finished(output, rows), kept, state

    def tree(
        self, rows: slice, state: Tensor, ancestors: Ancestors, before: KeptRows | None
    ) -> tuple[Tensor, KeptRows]:
        """Outputs [rows, heads, values], and what is kept; `before` of the pending rows."""
        parts, pending = [part[:, rows] for part in self.parts], ancestors.pending
        query, key, value, beta, decay = (part.float() for part in (self.query[:, rows], *parts))
        total = ancestors.summed @ _behind(before, "decay", decay)
        # Decays from each row on a path to the new row, [heads, rows, pending + rows, 1 or width].
        # Other rows are masked before the exponential: between siblings it may overflow.
        between = total[:, :, None] - _behind(before, "total", total)[:, None]
        between.masked_fill_(ancestors.hidden, float("-inf")).exp_()
        keys, from_state = _behind(before, "key", key).float(), total.exp()
        update = value * beta
        if self.kind == READING:
            weighted = key * beta
            system = _scores(weighted, keys, between)
            update -= (weighted * from_state) @ state
            if before is not None:
                update -= system[:, :, :pending] @ before.update
            update = torch.linalg.solve_triangular(
                system[:, :, pending:], update, upper=False, unitriangular=True
            )
        output = (query * from_state) @ state
        output += _scores(query, keys, between) @ _behind(before, "update", update)
        key, value, beta, decay = parts
        kept = KeptRows(key, value, beta, decay, update, total)
        return self._finished(output, rows), kept

    def _finished(self, output: Tensor, rows: slice) -> Tensor:
        """[rows, heads, values] of [heads, rows, values]."""
        if self.skip is not None:
            output = output + self.parts[1][:, rows] * self.skip[:, None, None]
        return output.transpose(0, 1).to(self.dtype)


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> RuleRows:
    """The rows of a call of transformers' gated delta rule, which has all in float32.

    query, key  [1, rows, heads or a part of them, width]; each serves as many heads of values
    value       [1, rows, heads, width]
    g           [1, rows, heads], or of each key's number (Kimi's delta attention)
    beta        [1, rows, heads]
    """
    decay = g if g.ndim == key.ndim else g[..., None]
    inputs = (query, key, value, beta[..., None], decay)
    queries, keys, *others = (part[0].transpose(0, 1).float() for part in inputs)
    if options.get("use_qk_l2norm_in_kernel"):
        queries, keys = (
            heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + NORM_EPS)
            for heads in (queries, keys)
        )
    group = value.shape[2] // key.shape[2]
    if group > 1:
        queries, keys = (part.repeat_interleave(group, 0) for part in (queries, keys))
    queries = queries / queries.shape[-1] ** 0.5
    return RuleRows("delta", queries, (keys, *others), query.dtype)


def state_space(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any) -> RuleRows:
    """The rows of a call of transformers' mamba2 scan, which steps in the model's dtype.

    x     [1, rows, heads, width];  dt  [1, rows, heads];  b, c  [1, rows, groups, size]
    a     [heads], and `D` and `dt_bias` of the options
    """
    if options.get("dt_bias") is not None:
        dt = dt + options["dt_bias"].to(dt.dtype)
    if options.get("dt_softplus"):
        dt = functional.softplus(dt)
    value, steps, key, query = (part[0].transpose(0, 1) for part in (x, dt[..., None], b, c))
    key, query = (part.repeat_interleave(len(value) // len(part), 0) for part in (key, query))
    decay = steps.float() * a.float()[:, None, None]
    return RuleRows("ssm", query, (key, value, steps, decay), x.dtype, options.get("D"))


def stepped(kind: str, state: Tensor, kept: KeptRows, row: int) -> tuple[Tensor, Tensor]:
    """The state behind a row, in transformers' order of operations, and the row's update."""
    key, value, beta, decay = (part[:, row] for part in kept[:4])
    state = state * decay.exp()[..., None]
    if kind != READING:
        return (state + (beta * key)[..., None] * value[:, None]).float(), kept.update[:, row]
    update = (value - (state * key[..., None]).sum(-2)) * beta
    return state.add_(key[..., None] * update[:, None]), update[:, None]


def _behind(before: KeptRows | None, name: str, new: Tensor) -> Tensor:
    """A part of the new rows behind that of the pending rows."""
    return new if before is None else torch.cat((getattr(before, name), new), 1)


def _scores(queries: Tensor, keys: Tensor, between: Tensor) -> Tensor:
    """Products of all queries and keys, decayed, [heads, rows, pending + rows]."""
    if between.shape[-1] == 1:
        return queries @ keys.mT * between[..., 0]
    return torch.einsum("hik,hijk,hjk->hij", queries, between, keys)


@dataclass(slots=True)
class PendingStates:
    """What is kept of a sequence's pending rows for each state, until some are committed.

    kept    columns [channels, rows] of a convolution, or what its rule keeps; None of a longer
            piece of text, which is committed whole
    behind  the state behind all rows; None where they are no piece of text
    rows    number of them
    """

    kept: list[Any]
    behind: list[Tensor | None]
    rows: int = 0

    def add(self, number: int, kept: Any, behind: Tensor | None = None) -> None:
        """Keep further rows of a state."""
        before = self.kept[number]
        if isinstance(before, KeptRows):
            kept = KeptRows(*(torch.cat(pair, 1) for pair in zip(before, kept, strict=True)))
        elif before is not None:
            kept = torch.cat((before, kept), 1)
        self.kept[number], self.behind[number] = kept, behind


class StateCache:
    """The states of every layer that has one, by sequence.

    A state is never written to: another takes its place. So a copy of a sequence costs nothing.
    Rules keep theirs in float32 whatever the model's dtype is.

    shapes  of each state, in the order in which a forward asks for them
    """

    def __init__(
        self, shapes: Sequence[StateShape], sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes, self._zeros = shapes, []
        for kind, *sizes in shapes:
            kept = dtype if kind == "conv" else torch.float32
            self._zeros.append(torch.zeros(*map(int, sizes), dtype=kept, device=device))
        self._states = [list(self._zeros) for _ in range(sequences)]
        self.pending = [self._none() for _ in range(sequences)]

    def _none(self) -> PendingStates:
        nothing: list[Any] = [None] * len(self.shapes)
        return PendingStates(nothing, list(nothing))

    def state(self, number: int, sequence: int) -> Tensor:
        """A state behind the sequence's committed tokens: [channels, columns] or [heads, ...]."""
        return self._states[sequence][number]

    def drop(self, sequence: int) -> None:
        """Forget the pending rows."""
        self.pending[sequence] = self._none()

    def clear(self, sequence: int) -> None:
        """Begin an empty text."""
        self._states[sequence] = list(self._zeros)
        self.drop(sequence)

    def copy_from(self, other: StateCache, source: int, sequence: int) -> None:
        self._states[sequence] = list(other._states[source])
        pending = other.pending[source]
        copied = replace(pending, kept=list(pending.kept), behind=list(pending.behind))
        self.pending[sequence] = copied

    def commit(self, rows: Sequence[int], sequence: int) -> None:
        """Step along these pending rows, which are a path from the first.

        They are forgotten at the next forward.
        """
        pending = self.pending[sequence]
        if not pending.rows or not rows:
            return
        whole, states = list(rows) == list(range(pending.rows)), list(self._states[sequence])
        for number, (kept, behind) in enumerate(zip(pending.kept, pending.behind, strict=True)):
            state = states[number]
            if whole and behind is not None:
                state = behind
            elif kept is None:
                raise InputError("the rows of a piece of text can only be committed together")
            elif isinstance(kept, KeptRows):
                for row in rows:
                    state, _ = stepped(str(self.shapes[number][0]), state, kept, row)
            else:
                path = kept[:, torch.tensor(list(rows), device=kept.device)]
                columns = torch.cat((state, path), 1)
                state = columns[:, columns.shape[1] - state.shape[1] :].contiguous()
            states[number] = state
        self._states[sequence] = states

    def fill_with_noise(self) -> None:
        """States of a text that was not read, to time forwards."""
        self._states = [[torch.randn_like(zero) for zero in self._zeros] for _ in self._states]
