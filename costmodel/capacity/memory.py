"""Weights and cached keys and values against a device's memory."""

from __future__ import annotations

import dataclasses

from costmodel.architecture import ModelArchitecture
from costmodel.compose.serving_tables import Precision
from costmodel.errors import InputError

_HEAD_BYTES = 2.0  # embedding and LM head stay in bfloat16


def weight_bytes(
    architecture: ModelArchitecture, precision: Precision, tensor_parallel: int = 1
) -> float:
    """Bytes of the weights on one of `tensor_parallel` devices, embeddings in bfloat16."""
    a = architecture
    embeddings = a.vocab * a.hidden * (1 if a.tied else 2)
    rest = a.parameters - embeddings
    return (rest * precision.weight_bytes + embeddings * _HEAD_BYTES) / tensor_parallel


def cache_bytes_per_token(
    architecture: ModelArchitecture, precision: Precision, tensor_parallel: int = 1
) -> float:
    """Bytes of one token's keys and values on one device; heads are never split."""
    a = architecture
    heads = max(a.kv_heads / tensor_parallel, 1.0)
    return 2.0 * a.layers * heads * a.head_dim * precision.cache_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """What an engine leaves for the cache, and what it counts a request as.

    `fraction` of the memory is used; of what is free after weights and `reserve_bytes` where
    `after_weights`. `whole_answer`: a request is admitted only if its whole answer fits, else
    when its prompt does, and holds half of its answer on average.
    """

    fraction: float
    reserve_bytes: float
    after_weights: bool = False
    whole_answer: bool = False

    def cache_tokens(
        self,
        architecture: ModelArchitecture,
        precision: Precision,
        memory_bytes: float,
        tensor_parallel: int = 1,
    ) -> float:
        """Tokens that fit into the cache. Raises InputError where the weights do not fit."""
        weights = weight_bytes(architecture, precision, tensor_parallel)
        free = self.free_bytes(memory_bytes, weights)
        if free <= 0:
            raise InputError(
                f"{architecture.name} does not fit: {weights / 1e9:.1f} GB of weights on each of"
                f" {tensor_parallel} device(s) with {memory_bytes / 1e9:.1f} GB",
                hint="Use more devices (tensor parallelism) or a smaller precision",
            )
        return free / cache_bytes_per_token(architecture, precision, tensor_parallel)

    def free_bytes(self, memory_bytes: float, weights_bytes: float) -> float:
        """Bytes that are left for the cache beside so many of weights; below 0 for none."""
        if self.after_weights:
            return self.fraction * (memory_bytes - weights_bytes - self.reserve_bytes)
        return self.fraction * memory_bytes - weights_bytes - self.reserve_bytes

    def tokens_held(self, prompt_tokens: float, output_tokens: float) -> float:
        """Tokens of the cache that one running request takes up."""
        return prompt_tokens + output_tokens * (1.0 if self.whole_answer else 0.5)


def largest_concurrency(cache_tokens: float, tokens_held: float) -> float:
    """Requests that run at once with so many tokens of cache; at least one."""
    return max(cache_tokens / tokens_held, 1.0)
