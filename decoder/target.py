"""The target model: prefill, verify a tree, commit a path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.device import to_device
from decoder.kv_cache import KVCache
from decoder.loading import LoadedModel
from decoder.runtime.base import (
    DenseVisible,
    Forwarded,
    RowBlock,
    Runtime,
    RuntimeChoice,
    TreeVisible,
)
from decoder.runtime.eager import EagerRuntime
from decoder.runtime.fused import fuse
from decoder.runtime.select import make_runtime
from decoder.runtime.step import ModelStep
from decoder.tree import EMPTY, DraftTree

PREFILL_CHUNK = 512
CAPACITY_STEP = 1024  # tokens: captured forwards belong to a cache, so it should seldom change


@dataclass(frozen=True, slots=True)
class Step:
    """One sequence's part of a verification: its root (the bonus token) and draft tree."""

    root: int
    tree: DraftTree = EMPTY
    sequence: int = 0


class Target:
    """One target model with its KV cache; everything a decode cycle asks of it.

    The profiler times these very methods. A borrowed model (`owned=False`) keeps
    its attention implementation: it is swapped only while a forward runs.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        owned: bool = True,
        runtime: RuntimeChoice = "auto",
        fused: bool = True,
    ) -> None:
        """
        runtime  `graphs` captures forwards of the target, `eager` does not; `auto` does so
                 on CUDA for a model that is owned
        fused    join products and small operations of the layers of an owned model
        Raises InputError for another runtime, DeviceError for graphs on a CPU.
        """
        self.loaded = loaded
        self.architecture = loaded.architecture
        self.ranks = loaded.ranks
        self.model = loaded.model
        self.cache: KVCache | None = None
        self.reservations = 0  # counts `reserve`: whose keys and values the cache holds
        self._step = ModelStep(loaded.model, owned=owned)
        if owned and fused:
            fuse(loaded.model)
        group = loaded.architecture.heads // loaded.architecture.kv_heads
        self._eager = EagerRuntime(self._step, group)
        self.runtime: Runtime = make_runtime(
            runtime,
            self._step,
            self._eager,
            capturable=owned and self.architecture.experts == 0,
            ranks=self.ranks,
        )
        self._features: dict[int, torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        return self._step.device

    @property
    def dtype(self) -> torch.dtype:
        return self._step.dtype

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
            graphs = self.runtime.kind == "graphs"
            cache = KVCache(
                self.loaded.local,
                capacity=-(-tokens // CAPACITY_STEP) * CAPACITY_STEP if graphs else tokens,
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
        if tuple(layers) != self._step.captured:
            self._step.captured = tuple(layers)
            self.runtime.forget()
        self._features.clear()

    def features(self, sequence: int = 0) -> torch.Tensor | None:
        """[rows, layers * hidden] of the sequence's last forward; None if nothing is captured."""
        return self._features.get(sequence)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embeddings of tokens [...]: [..., hidden]."""
        embedded: torch.Tensor = self._step.embedding(token_ids)
        return embedded

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab] of hidden states [..., hidden] behind the final norm."""
        logits: torch.Tensor = self._step.head(hidden)
        return logits

    def head_rows(self, tokens: NDArray[np.int64]) -> torch.Tensor | None:
        """A copy [len(tokens), hidden] of the head's weights; None if it is more than those."""
        head = self._step.head
        if type(head) is not torch.nn.Linear or head.bias is not None:
            return None
        return head.weight.detach()[to_device(tokens, self.device)]

    @torch.inference_mode()
    def prefill(self, token_ids: torch.Tensor, sequence: int = 0) -> torch.Tensor:
        """Append prompt tokens to a sequence, in chunks; logits [vocab] of the last one.

        token_ids  [tokens]
        """
        cache = self._cache_with_room(len(token_ids), sequence)
        if len(token_ids) == 0:
            raise InputError("the prompt is empty", hint="Give at least one token.")
        ids, features = token_ids.cpu().numpy(), []
        for first in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[first : first + PREFILL_CHUNK]
            rows = len(chunk)
            visible = DenseVisible(np.tri(rows, dtype=np.bool_)) if rows > 1 else None
            block = RowBlock(sequence, chunk, np.arange(rows), visible)
            done = self._eager.forward(cache, [block], last_only=True)
            self._add_pending([block], done.features)
            cache.commit(range(rows), sequence)
            features.append(done.features)
        if self._step.captured:
            self._features[sequence] = torch.cat(features)
        return done.logits[-1]

    @torch.inference_mode()
    def verify(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """One forward over root and nodes of each step, each seeing its prefix and ancestors.

        Positions are the cached length plus the depth, so that rotary embeddings
        see the right distance in any order of the nodes (BASTION appendix E).
        With an empty tree this is the plain step. The steps are of different sequences;
        their rows lie end to end. Returns logits [rows, vocab] of each, which under graphs
        the next forward overwrites.
        """
        blocks = []
        for step in steps:
            self._cache_with_room(step.tree.rows, step.sequence)
            tree = step.tree
            visible = TreeVisible(tree.parents) if tree.nodes else None
            tokens, depths = tree.row_tokens(step.root), tree.row_depths()
            blocks.append(RowBlock(step.sequence, tokens, depths, visible))
        logits = self._forward(blocks).logits
        return list(logits.split([block.rows for block in blocks]))

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
        return self._forward([RowBlock(sequence, tokens, offsets, DenseVisible(visible))]).logits

    def commit(self, rows: Sequence[int], sequence: int = 0) -> None:
        """Keep these pending rows as the new end of the prefix, and forget the others."""
        cache = self._cache_with_room(0, sequence)
        with torch.inference_mode():
            cache.commit(rows, sequence)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Forwards of this rank alone, whose numbers are wrong: to see whether memory suffices.

        They run eagerly, since a forward captured meanwhile would stay without the others.
        """
        runtime, self.runtime = self.runtime, self._eager
        try:
            with self.ranks.muted():
                yield
        finally:
            self.runtime = runtime

    def _cache_with_room(self, rows: int, sequence: int) -> KVCache:
        cache = self._reserved()
        cache.check_room(rows, sequence)
        return cache

    def _reserved(self) -> KVCache:
        if self.cache is None:
            raise InputError("no KV cache is reserved", hint="Call reserve(tokens) first.")
        return self.cache

    def _forward(self, blocks: Sequence[RowBlock]) -> Forwarded:
        """One forward of all blocks; their rows become pending."""
        done = self.runtime.forward(self._reserved(), blocks)
        self._add_pending(blocks, done.features)
        return done

    def _add_pending(self, blocks: Sequence[RowBlock], features: torch.Tensor | None) -> None:
        cache, first = self._reserved(), 0
        for block in blocks:
            cache.pending[block.sequence] += block.rows
            if features is not None:
                self._features[block.sequence] = features[first : first + block.rows]
            first += block.rows
