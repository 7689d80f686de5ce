"""The target of the decode loop: prefill a prompt, verify draft trees, commit a path."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from costmodel.errors import InputError
from costmodel.statistics import Bools, Ints
from decoder.device import to_device
from decoder.model.attention import RowBlock
from decoder.model.kv_cache import KVCache
from decoder.model.loading import LoadedModel
from decoder.model.runtime.capture import ChosenTokens
from decoder.model.runtime.eager import EagerRuntime, ModelStep
from decoder.model.runtime.graphs import GraphRuntime
from decoder.model.structure import Structure
from decoder.tree.draft_tree import EMPTY, DraftTree, visibility

PREFILL_CHUNK = 512
GPU_PREFILL_CHUNK = 2048  # fewer rows leave a GPU waiting for weights
CAPACITY_STEP = 1024  # tokens: captured forwards belong to a cache, so it should seldom change

Runtime = EagerRuntime | GraphRuntime

_LOCKS: WeakKeyDictionary[Any, RLock] = WeakKeyDictionary()
_LOCKS_LOCK = Lock()


@dataclass(frozen=True, slots=True)
class Step:
    """One sequence's part of a verification: its root (the bonus token) and draft tree."""

    root: int
    tree: DraftTree = EMPTY
    sequence: int = 0


class Target:
    """A target model with its KV cache, and the forwards of a decode cycle.

    lock  held by whoever decodes, for a whole text or for a round of a stream
    """

    def __init__(
        self, loaded: LoadedModel, step: ModelStep, structure: Structure, runtime: Runtime
    ) -> None:
        """See `decoder.model.making`."""
        self.loaded, self.architecture, self.model = loaded, loaded.architecture, loaded.model
        self.structure, self.runtime = structure, runtime
        self.device, self.dtype = step.device, step.dtype
        with _LOCKS_LOCK:  # targets around one model share its attention and its hooks
            self.lock = _LOCKS.setdefault(loaded.model, RLock())
        self.cache: KVCache | None = None
        self.reservations = 0  # calls of `reserve`, by which a caller sees that its cache was taken
        self._step, self._eager = step, runtime.eager  # which runs prefills
        self._features: dict[int, Tensor] = {}
        self._chosen: tuple[ChosenTokens, int] | None = None

    @property
    def max_context(self) -> int:
        """Tokens that the model can attend over: its positions."""
        return self._step.positions

    @property
    def prefill_chunk(self) -> int:
        return GPU_PREFILL_CHUNK if self.device.type == "cuda" else PREFILL_CHUNK

    def check_length(self, prompt_tokens: int, new_tokens: int) -> None:
        """Raise InputError for a text that the model's rotary factors do not allow."""
        if self._step.rope is not None:
            self._step.rope.check(prompt_tokens, new_tokens, self.loaded.name)

    def reserve(self, tokens: int, sequences: int = 1) -> KVCache:
        """An empty cache for `tokens` tokens, which ends any earlier use of the target.

        A target has one cache, which is reused where it is large enough. Under graphs it doubles.
        """
        cache = self.cache
        if cache is None or cache.capacity < tokens or cache.sequences != sequences:
            doubled = 2 * cache.capacity if cache and cache.sequences == sequences else 0
            cache = self.cache = None  # first, so that its memory and its graphs' are free
            if self.runtime.kind == "graphs":
                rounded = -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
                with suppress(InputError):  # of too little memory
                    cache = self.new_cache(max(rounded, min(doubled, self.max_context)), sequences)
            self.cache = cache = cache or self.new_cache(tokens, sequences)
        cache.truncate(0)
        self.reservations += 1
        return cache

    def new_cache(self, tokens: int, sequences: int = 1, **made: Any) -> KVCache:
        sizes: Any = {"capacity": tokens, "sequences": sequences}
        return KVCache(self.structure, **sizes, dtype=self.dtype, device=self.device, **made)

    def prepare(self, rows: int) -> None:
        """Capture the forwards of up to `rows` rows a sequence for the reserved cache.

        Without it each is captured at its first use, in the middle of a text.
        """
        cache = self._reserved()
        self.runtime.prepare(cache, rows, cache.sequences)

    def capture(self, layers: Sequence[int]) -> None:
        """Return the hidden states of these layers as features of later forwards.

        layers  indices into transformers' `hidden_states`: 0 is the embedding, i the
                output of layer i - 1, before the final norm
        Raises InputError for a layer that the target does not have.
        """
        outside = next((i for i in layers if not 0 <= i <= self.architecture.layers), None)
        if outside is not None:
            raise InputError(
                f"the drafter reads hidden states of layer {outside}, but {self.loaded.name} has "
                f"{self.architecture.layers} layers",
                hint="The drafter belongs to another target.",
            )
        if layers and not self._step.has_layers:
            raise InputError(
                f"the drafter reads hidden states of layers, and {self.loaded.name} does not keep "
                "its layers in one list",
                hint="Use a drafter that reads none, as ngram.",
            )
        if tuple(layers) != self._step.captured:
            self._step.captured = tuple(layers)
            self.runtime.forget()
        self._features.clear()

    def features(self, sequence: int = 0) -> Tensor | None:
        """Features [rows, layers * hidden] of the sequence's last forward; None without capture."""
        return self._features.get(sequence)

    def chosen(self) -> Ints | None:
        """The greedy token behind each row of the last verification, on the host.

        The rows of all steps end to end. None where the runtime does not choose them within
        the forward. Waits for the forward.
        """
        return None if self._chosen is None else self._chosen[0].read(self._chosen[1])

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embeddings [..., hidden] of tokens [...]."""
        return self._step.embedding(token_ids)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden states [..., hidden] after the final norm."""
        return self._step.logits(hidden)

    def head_weight(self) -> Tensor:
        """The LM head's weight [vocab, hidden]; a copy where weights are packed."""
        return self._step.head_weight()

    def head_rows(self, tokens: Ints) -> Tensor | None:
        """A copy [tokens, hidden] of the head's weights for tokens; None where logits need more."""
        head = self._step.head
        plain = self._step.plain_head and type(head) is torch.nn.Linear
        if not plain or head.bias is not None:
            return None
        return self._step.head_rows(to_device(tokens, self.device))

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, sequence: int = 0) -> Tensor:
        """Append prompt tokens to a sequence, in chunks; returns logits [vocab] of the last token.

        token_ids  [tokens]
        """
        cache = self._cache_with_room(len(token_ids), sequence)
        if len(token_ids) == 0:
            raise InputError("the prompt is empty", hint="Give at least one token.")
        rope = self._step.rope
        if rope is not None and not cache.lengths[sequence]:  # all its sequences share the factors
            long = rope.is_long(len(token_ids))
            if long != self._step.long and any(cache.lengths):
                raise InputError(
                    f"prompts of up to {rope.switch} tokens and longer ones have different rotary "
                    f"factors in {self.loaded.name} (longrope), and cannot be decoded together",
                    hint="Give them one after another.",
                )
            self._step.long = long
        ids, features = token_ids.cpu().numpy(), []
        for first in range(0, len(ids), self.prefill_chunk):
            chunk = ids[first : first + self.prefill_chunk]
            block = RowBlock(sequence, chunk, np.arange(len(chunk)), None)
            done = self._eager.forward(cache, [block], last_only=True)
            self._add_pending([block], done.features)
            cache.commit(range(len(chunk)), sequence)
            features += [] if done.features is None else [done.features]
        if features:
            self._features[sequence] = torch.cat(features)
        return done.logits[-1]

    @torch.inference_mode()
    def verify(self, steps: Sequence[Step]) -> list[Tensor]:
        """One forward over the root and nodes of each step; returns logits [rows, vocab] of each.

        A row sees its sequence's prefix and its ancestors. Its position is the cached length
        plus its depth, so rotary distances are right in any order of the nodes (BASTION
        appendix E). An empty tree makes a plain step. The steps belong to different sequences.
        Under graphs the next forward overwrites the logits.
        """
        blocks = []
        for step in steps:
            self._cache_with_room(step.tree.rows, step.sequence)
            tree, tokens = step.tree, step.tree.row_tokens(step.root)
            visible = visibility(tree.parents) if tree.nodes else None
            offsets = self._bounded(tree.row_depths(), step.sequence)
            blocks.append(RowBlock(step.sequence, tokens, offsets, visible))
        return list(self._forward(blocks).split([block.rows for block in blocks]))

    @torch.inference_mode()
    def extend(self, tokens: Ints, offsets: Ints, visible: Bools, sequence: int = 0) -> Tensor:
        """A forward of rows behind the pending rows, for a growing tree: logits [rows, vocab].

        offsets  [rows]  positions counted from the end of the committed tokens
        visible  [rows, pending + rows]  the pending and new rows that each row sees
        """
        self._cache_with_room(len(tokens), sequence)
        block = RowBlock(sequence, tokens, self._bounded(offsets, sequence), visible)
        return self._forward([block])

    def commit(self, rows: Sequence[int], sequence: int = 0) -> None:
        """Append these pending rows to the prefix and drop the others."""
        with torch.inference_mode():
            self._reserved().commit(rows, sequence)

    def _bounded(self, offsets: Ints, sequence: int) -> Ints:
        """Offsets whose positions the model has; rows behind the last cannot be accepted."""
        rope, positions = self._step.rope, self._step.positions
        if rope is not None and not self._step.long:
            positions = min(positions, rope.switch)
        most = max(positions - 1 - self._reserved().lengths[sequence], 0)
        return offsets if int(offsets.max()) <= most else np.minimum(offsets, most)

    def _cache_with_room(self, rows: int, sequence: int) -> KVCache:
        cache = self._reserved()
        cache.check_room(rows, sequence)
        return cache

    def _reserved(self) -> KVCache:
        if self.cache is None:
            raise InputError("no KV cache is reserved", hint="Call reserve(tokens) first.")
        return self.cache

    def _forward(self, blocks: Sequence[RowBlock]) -> Tensor:
        """Logits [rows, vocab] of one forward of all blocks, whose rows become pending."""
        done = self.runtime.forward(self._reserved(), blocks)
        rows = sum(block.rows for block in blocks)
        self._chosen = None if done.chosen is None else (done.chosen, rows)
        self._add_pending(blocks, done.features)
        return done.logits

    def _add_pending(self, blocks: Sequence[RowBlock], features: Tensor | None) -> None:
        cache, first = self._reserved(), 0
        for block in blocks:
            cache.pending[block.sequence] += block.rows
            if features is not None:
                self._features[block.sequence] = features[first : first + block.rows]
            first += block.rows
