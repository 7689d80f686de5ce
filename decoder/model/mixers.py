"""Layers with a recurrent state, by the functions that their mixers call.

transformers' hybrid models have mixers of many kinds around three functions: a causal
convolution, a gated delta rule and a mamba2 scan. As attention goes through a registered
function, so do these here: those of a model's modules are replaced by functions that, within
a forward of ours, run the rows of draft trees from the states of their sequences, and that
elsewhere call the replaced ones. The order of the calls says which layer calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from costmodel.errors import InputError
from decoder.model.attention import RowBlock, current_attention, replace_once
from decoder.model.kv_cache import KVCache
from decoder.model.recurrence import (
    Ancestors,
    RuleRows,
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
                replace_once(module, name, partial(_following, kind))


def _following(kind: str, function: Function) -> Function:
    def follow(*arguments: Any, **options: Any) -> Any:
        running = current_attention()
        states = _NOTES.get() if running is None else running.states
        if states is None:
            return function(*arguments, **options)
        return states(kind, function, *arguments, **options)

    return follow


_NOTES: ContextVar[Function | None] = ContextVar("notes of states", default=None)


@contextmanager
def noting_states() -> Iterator[list[StateShape]]:
    """The shapes of the states that forwards inside ask for; their functions stay as they are."""
    shapes: list[StateShape] = []

    def note(kind: str, function: Function, *arguments: Any, **options: Any) -> Any:
        shapes.append((kind, *SIZES[kind](*arguments, **options)))
        return function(*arguments, **options)

    token = _NOTES.set(note)
    try:
        yield shapes
    finally:
        _NOTES.reset(token)


class RowStates:
    """The states of a cache in one forward: each call of a function takes the next of them.

    The forward's rows become pending. What they see of each other is looked at once for all layers.
    """

    def __init__(self, cache: KVCache, blocks: Sequence[RowBlock]) -> None:
        self._cache, self._states, self._attentions = cache.states, 0, 0
        # Each sequence with its rows; no ancestors for a single row, and for a piece of text, with
        # no pending rows before.
        self._segments: list[tuple[int, slice, Ancestors | None]] = []
        first = 0
        for block in blocks:
            sequence, rows = block.sequence, slice(first, first + block.rows)
            if not cache.pending[sequence]:
                self._cache.drop(sequence)
            pending = self._cache.pending[sequence]
            text = block.rows == 1 or (len(blocks) == 1 and block.visible is None)
            ancestors = None
            if pending.rows or not text:
                visible = block.mask()
                assert visible is not None  # rows behind pending ones say what they see
                ancestors = Ancestors(visible, cache.device)
            pending.rows += block.rows
            self._segments.append((sequence, rows, ancestors))
            first = rows.stop
        _, rows, ancestors = self._segments[0]
        self._whole = ancestors is None and rows.stop > 1  # one piece of text

    def next_attention(self) -> int:
        """The number of the attention that is called now."""
        self._attentions += 1
        return self._attentions - 1

    def __call__(self, kind: str, function: Function, *arguments: Any, **options: Any) -> Any:
        number, shapes = self._states, self._cache.shapes
        if number >= len(shapes) or shapes[number][0] != kind:
            raise InputError("the model asks for other states than when it was loaded")
        self._states += 1
        return getattr(self, f"_{kind}")(number, function, *arguments, **options)

    def _parts(self, number: int) -> Iterator[tuple[slice, Ancestors | None, Tensor, Any]]:
        """Each sequence's rows, with the state behind its committed ones and its pending rows."""
        for sequence, rows, ancestors in self._segments:
            state, pending = self._cache.state(number, sequence), self._cache.pending[sequence]
            yield rows, ancestors, state, pending

    def _conv(
        self,
        number: int,
        function: Function,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """The convolution [1, channels, rows]."""
        parts = []
        for rows, ancestors, state, pending in self._parts(number):
            x, before = hidden_states[0, :, rows], pending.kept[number]
            held = (state, x) if before is None else (state, before, x)
            columns, width = torch.cat(held, 1), state.shape[1]
            if ancestors is None:
                mixed = function(columns[None], weight, bias, activation)[0, :, width:]
                kept = None if self._whole else x
                pending.add(number, kept, columns[:, x.shape[1] :].contiguous())
            else:
                mixed = convolved(columns, ancestors, weight, bias).t()
                mixed = mixed if activation is None else ACT2FN[activation](mixed)
                pending.add(number, x)
            parts.append(mixed.to(x.dtype))
        return torch.cat(parts, 1)[None]

    def _delta(
        self, number: int, function: Function, *inputs: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        """The gated delta rule [1, rows, heads, width]."""

        def whole(state: Tensor) -> Any:
            more = {"initial_state": state, "output_final_state": True}
            return function(*inputs, **options | more)

        return self._ruled(number, whole, partial(gated_delta, *inputs, **options)), None

    def _ssm(self, number: int, function: Function, *inputs: Tensor, **options: Any) -> Tensor:
        """The mamba2 scan [1, rows, heads, width]."""

        def whole(state: Tensor) -> tuple[Tensor, Tensor]:
            more = {"initial_states": state.mT, "return_final_states": True}
            output, behind = function(*inputs, **options | more)
            return output, behind.mT

        return self._ruled(number, whole, partial(state_space, *inputs, **options))

    def _ruled(
        self,
        number: int,
        whole: Callable[[Tensor], tuple[Tensor, Tensor]],
        rows_of: Callable[[], RuleRows],
    ) -> Tensor:
        """The outputs of a rule; `whole` runs a piece of text as transformers does."""
        if self._whole:
            [(_, _, state, pending)] = self._parts(number)
            output, behind = whole(state[None])
            pending.add(number, None, behind[0].float())
            return output
        rule, parts = rows_of(), []
        for rows, ancestors, state, pending in self._parts(number):
            if ancestors is None:
                output, kept, after = rule.single(rows, state)
                pending.add(number, kept, after)
            else:
                output, kept = rule.tree(rows, state, ancestors, pending.kept[number])
                pending.add(number, kept)
            parts.append(output)
        return torch.cat(parts)[None]
