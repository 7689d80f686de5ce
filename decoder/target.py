"""The target model: prefill, verify a tree, commit a path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.attention import ATTENTION_NAME, plan_forward
from decoder.kv_cache import KVCache
from decoder.loading import LoadedModel
from decoder.tree import EMPTY, DraftTree

PREFILL_CHUNK = 512


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
        self._base = loaded.model.base_model
        self._head = loaded.model.get_output_embeddings()
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

    def reserve(self, tokens: int, batch: int = 1) -> KVCache:
        """An empty cache for `tokens` tokens, reused when the present one is large enough."""
        cache = self.cache
        if cache is None or cache.capacity < tokens or cache.batch != batch:
            cache = KVCache(
                self.architecture,
                capacity=tokens,
                batch=batch,
                dtype=self.dtype,
                device=self.device,
            )
            self.cache = cache
        cache.truncate(0)
        return cache

    @torch.inference_mode()
    def prefill(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Append prompt tokens to the cache, in chunks; logits of the last one.

        token_ids  [batch, tokens]; returns [batch, vocab]
        """
        cache = self._cache_with_room(token_ids.shape[1])
        hidden = None
        for chunk in token_ids.split(PREFILL_CHUNK, dim=1):
            rows = chunk.shape[1]
            offsets = torch.arange(rows, device=self.device)
            visible = offsets[None, :] <= offsets[:, None]
            hidden = self._forward(chunk, offsets, visible if rows > 1 else None)
            cache.length += rows
        if hidden is None:
            raise InputError("the prompt is empty", hint="Give at least one token.")
        return self._head(hidden[:, -1])

    @torch.inference_mode()
    def verify(self, root: int, tree: DraftTree = EMPTY) -> torch.Tensor:
        """One forward over the root and all nodes, each seeing the prefix and its ancestors.

        Positions are the cache's length plus the depth, so that rotary embeddings
        see the right distance in any order of the nodes (BASTION appendix E).
        With an empty tree this is the plain step. Returns logits [batch, rows, vocab].
        """
        self._cache_with_room(tree.rows)
        tokens = self._to_device(tree.row_tokens(root))
        depths = self._to_device(tree.row_depths())
        visible = None
        if tree.nodes:
            visible = torch.from_numpy(tree.visibility()).to(self.device)
        batch = self.cache.batch if self.cache else 1
        return self._head(self._forward(tokens.expand(batch, -1), depths, visible))

    def commit(self, accepted_rows: Sequence[int]) -> None:
        """Keep the root and the accepted rows of the last forward as the new prefix."""
        cache = self._cache_with_room(0)
        with torch.inference_mode():
            cache.commit([0, *accepted_rows])

    def _cache_with_room(self, rows: int) -> KVCache:
        if self.cache is None:
            raise InputError("no KV cache is reserved", hint="Call reserve(tokens) first.")
        self.cache.check_room(rows)
        return self.cache

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _forward(
        self, tokens: torch.Tensor, offsets: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states [batch, rows, hidden] of tokens at position length + offset."""
        cache = self.cache
        if cache is None:
            raise InputError("no KV cache is reserved", hint="Call reserve(tokens) first.")
        with self._split_attention():
            output = self._base(
                input_ids=tokens,
                position_ids=(offsets + cache.length)[None],
                use_cache=False,
                plan=plan_forward(cache, tokens.shape[1], visible, self._group),
            )
        return output.last_hidden_state

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
