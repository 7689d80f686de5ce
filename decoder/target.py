"""The target model: prefill, verify a tree, commit a path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.attention import ATTENTION_NAME, ForwardPlan, plan_segment
from decoder.kv_cache import KVCache
from decoder.loading import LoadedModel
from decoder.tree import EMPTY, DraftTree

PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Step:
    """One sequence's part of a verification: its root (the bonus token) and draft tree."""

    root: int
    tree: DraftTree = EMPTY
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """One sequence's part of a forward."""

    sequence: int
    tokens: torch.Tensor  # [rows]
    offsets: torch.Tensor  # [rows]: positions behind the committed tokens
    visible: torch.Tensor | None  # [rows, pending + rows]


class Target:
    """One target model with its KV cache; everything a decode cycle asks of it.

    The profiler times these very methods. A borrowed model (`owned=False`) keeps
    its attention implementation: it is swapped only while a forward runs.
    """

    def __init__(self, loaded: LoadedModel, *, owned: bool = True) -> None:
        self.loaded = loaded
        self.architecture = loaded.architecture
        self.model = loaded.model
        self.cache: KVCache | None = None
        self.reservations = 0  # counts `reserve`: whose keys and values the cache holds
        self._base = loaded.model.base_model
        self._embedding = loaded.model.get_input_embeddings()
        self._head = loaded.model.get_output_embeddings()
        self._captured: tuple[int, ...] = ()
        self._features: dict[int, torch.Tensor] = {}
        self._group = loaded.architecture.heads // loaded.architecture.kv_heads
        self._owned = owned
        if owned:
            self.model.config._attn_implementation = ATTENTION_NAME

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def max_context(self) -> int:
        """Tokens the model can attend over: its positions, or its sliding window if smaller."""
        positions = int(getattr(self.model.config, "max_position_embeddings", 0)) or 1 << 30
        return min(positions, self.architecture.sliding_window or positions)

    def reserve(self, tokens: int, sequences: int = 1) -> KVCache:
        """An empty cache for `tokens` tokens, reused when the present one is large enough.

        There is one cache a target: whatever was being decoded with it cannot go on.
        """
        cache = self.cache
        if cache is None or cache.capacity < tokens or cache.sequences != sequences:
            cache = KVCache(
                self.architecture,
                capacity=tokens,
                sequences=sequences,
                dtype=self.dtype,
                device=self.device,
            )
            self.cache = cache
        cache.truncate(0)
        self.reservations += 1
        return cache

    def capture(self, layers: Sequence[int]) -> None:
        """Keep the hidden states of these layers from now on, for `features`.

        layers  indices into transformers' `hidden_states`: 0 is the embedding, i the
                output of layer i - 1, before the final norm
        Raises InputError for a layer that the target does not have.
        """
        outside = next((i for i in layers if not 0 <= i <= self.architecture.layers), None)
        if outside is not None:
            raise InputError(
                f"hidden states of layer {outside} are asked for, and {self.loaded.name} has "
                f"{self.architecture.layers} layers",
                hint="The drafter belongs to another target.",
            )
        self._captured = tuple(layers)
        self._features.clear()

    def features(self, sequence: int = 0) -> torch.Tensor | None:
        """[rows, layers * hidden] of the sequence's last forward; None if nothing is captured."""
        return self._features.get(sequence)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embeddings of tokens [...]: [..., hidden]."""
        return self._embedding(token_ids)

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab] of hidden states [..., hidden] behind the final norm."""
        return self._head(hidden)

    @torch.inference_mode()
    def prefill(self, token_ids: torch.Tensor, sequence: int = 0) -> torch.Tensor:
        """Append prompt tokens to a sequence, in chunks; logits [vocab] of the last one.

        token_ids  [tokens]
        """
        cache = self._cache_with_room(len(token_ids), sequence)
        if len(token_ids) == 0:
            raise InputError("the prompt is empty", hint="Give at least one token.")
        features = []
        for chunk in token_ids.split(PREFILL_CHUNK):
            rows = len(chunk)
            offsets = torch.arange(rows, device=self.device)
            visible = offsets[None, :] <= offsets[:, None]
            rest = _Rows(sequence, chunk, offsets, visible if rows > 1 else None)
            hidden = self._forward([rest])
            cache.commit(range(rows), sequence)
            features.append(self._features.get(sequence))
        if self._captured:
            self._features[sequence] = torch.cat(features)
        return self._head(hidden[-1])

    @torch.inference_mode()
    def verify(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """One forward over root and nodes of each step, each seeing its prefix and ancestors.

        Positions are the cached length plus the depth, so that rotary embeddings
        see the right distance in any order of the nodes (BASTION appendix E).
        With an empty tree this is the plain step. The steps are of different sequences;
        their rows lie end to end, without padding. Returns logits [rows, vocab] of each.
        """
        parts = []
        for step in steps:
            self._cache_with_room(step.tree.rows, step.sequence)
            visible = None
            if step.tree.nodes:
                visible = torch.from_numpy(step.tree.visibility()).to(self.device)
            tokens = self._to_device(step.tree.row_tokens(step.root))
            depths = self._to_device(step.tree.row_depths())
            parts.append(_Rows(step.sequence, tokens, depths, visible))
        logits = self._head(self._forward(parts))
        return list(logits.split([step.tree.rows for step in steps]))

    @torch.inference_mode()
    def extend(
        self,
        tokens: NDArray[np.int64],
        offsets: NDArray[np.int64],
        visible: NDArray[np.bool_],
        sequence: int = 0,
    ) -> torch.Tensor:
        """A forward of rows behind the pending ones, as a tree grows: logits [rows, vocab].

        offsets  [rows]  positions behind the committed tokens
        visible  [rows, pending + rows]  which pending and new rows each row sees
        """
        self._cache_with_room(len(tokens), sequence)
        seen = torch.from_numpy(visible).to(self.device)
        part = _Rows(sequence, self._to_device(tokens), self._to_device(offsets), seen)
        return self._head(self._forward([part]))

    def commit(self, rows: Sequence[int], sequence: int = 0) -> None:
        """Keep these pending rows as the new end of the prefix, and forget the others."""
        cache = self._cache_with_room(0, sequence)
        with torch.inference_mode():
            cache.commit(rows, sequence)

    def _cache_with_room(self, rows: int, sequence: int) -> KVCache:
        if self.cache is None:
            raise InputError("no KV cache is reserved", hint="Call reserve(tokens) first.")
        self.cache.check_room(rows, sequence)
        return self.cache

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _forward(self, parts: Sequence[_Rows]) -> torch.Tensor:
        """Hidden states [rows, hidden] of all parts; their rows become pending."""
        cache = self.cache
        if cache is None:
            raise InputError("no KV cache is reserved", hint="Call reserve(tokens) first.")
        segments, first = [], 0
        for part in parts:
            rows = slice(first, first + len(part.tokens))
            segments.append(plan_segment(cache, part.sequence, rows, part.visible, self._group))
            first = rows.stop
        lengths = cache.lengths
        positions = [part.offsets + lengths[part.sequence] for part in parts]
        with self._split_attention(), self._hooks() as states:
            output = self._base(
                input_ids=_join([part.tokens for part in parts])[None],
                position_ids=_join(positions)[None],
                use_cache=False,
                plan=ForwardPlan(cache, tuple(segments)),
            )
        for segment in segments:
            cache.pending[segment.sequence] += segment.rows.stop - segment.rows.start
            if states:
                kept = [states[layer][0, segment.rows] for layer in self._captured]
                self._features[segment.sequence] = torch.cat(kept, dim=-1)
        return output.last_hidden_state[0]

    @contextmanager
    def _hooks(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collects the captured hidden states [1, rows, hidden] of one forward, by layer."""
        states: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                states[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        modules = {i: self._base.layers[i - 1] if i else self._embedding for i in self._captured}
        handles = [module.register_forward_hook(keep(i)) for i, module in modules.items()]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _split_attention(self) -> Iterator[None]:
        """Our attention on a borrowed model, taken off again whatever happens."""
        if self._owned:
            yield
            return
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = ATTENTION_NAME
        try:
            yield
        finally:
            self.model.config._attn_implementation = before


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
