"""Layers with a recurrent state, by the functions that their mixers call.

transformers' hybrid models have mixers of many kinds around three functions: a causal
convolution, a gated delta rule and a mamba2 scan. As attention goes through a registered
function, so do these here: those of a model's modules are replaced by functions that, within
a forward of ours, run the rows of draft trees from the states of their sequences, and that
elsewhere call the replaced ones. The order of the calls says which layer calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from costmodel.errors import InputError
from decoder.model.attention import RowBlock, current_attention
from decoder.model.kv_cache import KVCache
from decoder.model.recurrence import (
    Ancestors,
    RuleRows,
    StateCache,
    StateShape,
    convolved,
    gated_delta,
    state_space,
)

FUNCTIONS = {
    "causal_conv1d_fn": "conv",
    "torch_chunk_gated_delta_rule": "delta",
    "chunk_kimi_delta_attention": "delta",
    "mamba2_chunk_scan": "ssm",
    "mamba_selective_scan": "other",
}
# Of a call's state: channels and columns, or heads, keys and values.
SIZES: dict[str, Callable[..., tuple[int, ...]]] = {
    "conv": lambda x, weight, *_, **__: (weight.shape[0], weight.shape[1] - 1),
    "delta": lambda query, key, value, *_, **__: (value.shape[2], key.shape[3], value.shape[3]),
    "ssm": lambda x, dt, a, b, *_, **__: (x.shape[2], b.shape[3], x.shape[3]),
    "other": lambda *_, **__: (),  # of a rule that draft trees cannot follow
}
Function = Callable[..., Any]
_replacing = Lock()


def follow_states(model: torch.nn.Module) -> None:
    """Replace the functions that the model's modules call, once in a process."""
    classes = {part for module in model.modules() for part in type(module).__mro__}
    modules = [sys.modules.get(name) for name in {part.__module__ for part in classes}]
    with _replacing:
        for module in modules:
            for name, kind in FUNCTIONS.items():
                function = vars(module).get(name) if module is not None else None
                if function is not None and not hasattr(function, "follows"):
                    setattr(module, name, _following(kind, function))


def _following(kind: str, function: Function) -> Function:
    @functools.wraps(function)
    def follow(*arguments: Any, **options: Any) -> Any:
        running = current_attention()
        states = _NOTES.get() if running is None else running.states
        if states is None:
            return function(*arguments, **options)
        return states(kind, function, *arguments, **options)

    follow.follows = function  # type: ignore[attr-defined]
    return follow


class StateNotes:
    """Notes the states that a forward within it asks for; their functions stay as they are."""

    def __init__(self) -> None:
        self.shapes: list[StateShape] = []

    def __enter__(self) -> None:
        self._token = _NOTES.set(self)

    def __exit__(self, *_: object) -> None:
        _NOTES.reset(self._token)

    def __call__(self, kind: str, function: Function, *arguments: Any, **options: Any) -> Any:
        self.shapes.append((kind, *SIZES[kind](*arguments, **options)))
        return function(*arguments, **options)


class StateSegment(NamedTuple):
    """The rows of one sequence in a forward.

    ancestors  None for a single row, and for a piece of text, with no pending rows before
    """

    sequence: int
    rows: slice
    ancestors: Ancestors | None

    @property
    def single(self) -> bool:
        return self.rows.stop - self.rows.start == 1


_NOTES: ContextVar[StateNotes | None] = ContextVar("notes of states", default=None)


class RowStates:
    """The states in one forward: each call of a function takes the next of them.

    cache  whose pending rows the forward's rows become
    """

    def __init__(self, cache: StateCache, segments: Sequence[StateSegment]) -> None:
        self._cache, self._segments = cache, segments
        self._states = self._attentions = 0

    def next_attention(self) -> int:
        """The number of the attention that is called now."""
        self._attentions += 1
        return self._attentions - 1

    def __call__(self, kind: str, function: Function, *arguments: Any, **options: Any) -> Any:
        return getattr(self, f"_{kind}")(function, *arguments, **options)

    def _conv(
        self,
        function: Function,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The convolution [1, channels, rows]."""
        number, parts = self._next("conv"), []
        for segment in self._segments:
            x = hidden_states[0, :, segment.rows]
            state = self._cache.state(number, segment.sequence)
            pending = self._cache.pending[segment.sequence]
            before = pending.kept[number]
            held = (state, x) if before is None else (state, before, x)
            columns, width = torch.cat(held, 1), state.shape[1]
            if segment.ancestors is None:
                mixed = function(columns[None], weight, bias, activation)[0, :, width:]
                kept = x if segment.single else None
                pending.add(number, kept, columns[:, x.shape[1] :].contiguous())
            else:
                mixed = convolved(columns, segment.ancestors, weight, bias).t()
                mixed = mixed if activation is None else ACT2FN[activation](mixed)
                pending.add(number, x)
            parts.append(mixed.to(x.dtype))
        return torch.cat(parts, 1)[None]

    def _delta(
        self,
        function: Function,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """The gated delta rule [1, rows, heads, width]."""
        normed = bool(options.get("use_qk_l2norm_in_kernel", False))

        def whole(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            options.update(initial_state=state, output_final_state=True)
            output, behind = function(query, key, value, g=g, beta=beta, **options)
            return output, behind

        def rows() -> RuleRows:
            return gated_delta(query, key, value, g, beta, normed=normed)

        return self._ruled("delta", whole, rows), None

    def _ssm(self, function: Function, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        """The mamba2 scan [1, rows, heads, width]; inputs are x, dt, A, B and C."""
        x, dt, a, b, c = inputs

        def whole(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            options.update(initial_states=state.mT, return_final_states=True)
            output, behind = function(*inputs, **options)
            return output, behind.mT

        def rows() -> RuleRows:
            step, bias = dt, options.get("dt_bias")
            if bias is not None:
                step = step + bias.to(dt.dtype)
            if options.get("dt_softplus"):
                step = softplus(step)
            return state_space(x, step, a, b, c, options.get("D"))

        return self._ruled("ssm", whole, rows)

    def _ruled(
        self,
        kind: str,
        whole: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        rows_of: Callable[[], RuleRows],
    ) -> torch.Tensor:
        """The outputs of a rule; `whole` runs a piece of text as transformers does."""
        number, parts = self._next(kind), []
        first = self._segments[0]
        if first.ancestors is None and not first.single:
            output, behind = whole(self._cache.state(number, first.sequence)[None])
            self._cache.pending[first.sequence].add(number, None, behind[0].float())
            return output
        rows = rows_of()
        for segment in self._segments:
            state = self._cache.state(number, segment.sequence)
            pending = self._cache.pending[segment.sequence]
            if segment.ancestors is None:
                output, kept, behind = rows.single(segment.rows, state)
                pending.add(number, kept, behind)
            else:
                before = pending.kept[number]
                output, kept = rows.tree(segment.rows, state, segment.ancestors, before)
                pending.add(number, kept)
            parts.append(output)
        return torch.cat(parts)[None]

    def _next(self, kind: str) -> int:
        number, shapes = self._states, self._cache.shapes
        if number >= len(shapes) or shapes[number][0] != kind:
            raise InputError("the model asks for other states than when it was loaded")
        self._states += 1
        return number


def row_states(cache: KVCache, states: StateCache, blocks: Sequence[RowBlock]) -> RowStates:
    """The states of the cache in a forward of these blocks.

    What rows see of each other is looked at here, once for all layers.
    """
    segments, first = [], 0
    for block in blocks:
        sequence, rows = block.sequence, slice(first, first + block.rows)
        if not cache.pending[sequence]:
            states.drop(sequence)
        pending = states.pending[sequence]
        text = block.rows == 1 or (len(blocks) == 1 and block.visible is None)
        ancestors = None
        if pending.rows or not text:
            visible = block.mask()
            assert visible is not None  # rows behind pending ones say what they see
            ancestors = Ancestors(visible, cache.device)
        pending.rows += block.rows
        segments.append(StateSegment(sequence, rows, ancestors))
        first = rows.stop
    return RowStates(states, segments)
