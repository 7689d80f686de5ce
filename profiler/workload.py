"""What is timed: the decoder's own functions, at chosen rows, contexts and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from costmodel.errors import InputError
from decoder.acceptance import walk
from decoder.drafters.base import Drafter
from decoder.drafters.timing import steady_draft
from decoder.kv_cache import KVCache
from decoder.sampling import Picker, Sampling
from decoder.target import Step, Target
from decoder.tree import EMPTY, DraftTree, Lattice, best_first

LATTICE_DEPTH = 15  # gamma of a block of 16
ACCEPTED_DEPTH = 3  # rows that a timed acceptance walks, a usual committed length


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Task:
    """One thing to time.

    kind     `verify`, `held_out`, `prefill`, `draft`, `build`, `accept` or `commit`
    size     rows of a forward, tokens of a prefill or commit, nodes of a build or accept
    context  cached tokens (0 where the kind has none)
    """

    kind: str
    size: int
    context: int = 0
    batch: int = 1

    def key(self) -> dict[str, Any]:
        return asdict(self)


class Workload:
    """Binds tasks to calls of the decoder's functions on one target and drafter."""

    def __init__(self, target: Target, drafter: Drafter, *, capacity: int, seed: int = 0) -> None:
        if capacity > target.max_context:
            raise InputError(
                f"a context of {capacity} tokens, rows included, exceeds the "
                f"{target.max_context} positions of {target.loaded.name}",
                hint="Choose smaller --contexts or --max-nodes.",
            )
        self._target = target
        self._drafter = drafter
        self._capacity = capacity
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._caches: dict[int, KVCache] = {}

    @property
    def device(self) -> torch.device:
        return self._target.device

    def call(self, task: Task) -> Callable[[], object]:
        """A function of no arguments that does the task once, from the same state each time."""
        if task.kind in ("verify", "held_out"):
            return self._verify(task)
        return {
            "prefill": self._prefill,
            "draft": self._draft,
            "build": self._build,
            "accept": self._accept,
            "commit": self._commit,
        }[task.kind](task)

    def _verify(self, task: Task) -> Callable[[], object]:
        target, tree = self._target, self._tree(task.size - 1)
        steps = [Step(1, tree, sequence) for sequence in range(task.batch)]

        def run() -> object:
            self._use_cache(task.batch).truncate(task.context)
            return target.verify(steps)

        return run

    def _prefill(self, task: Task) -> Callable[[], object]:
        target = self._target
        prompt = self._tokens(task.size)

        def run() -> object:
            self._use_cache(task.batch).truncate(0)
            return [target.prefill(prompt, sequence) for sequence in range(task.batch)]

        return run

    def _draft(self, task: Task) -> Callable[[], object]:
        return steady_draft(self._drafter, self._target, task.context, self._seed)

    def _build(self, task: Task) -> Callable[[], object]:
        lattice = self._lattice(task.size)
        return lambda: best_first(lattice, task.size)

    def _accept(self, task: Task) -> Callable[[], object]:
        target, tree = self._target, self._tree(task.size)
        logits = torch.zeros(
            tree.rows, target.architecture.vocab, dtype=target.dtype, device=target.device
        )
        row = 0
        for _ in range(ACCEPTED_DEPTH):  # the target agrees with a path, then leaves the tree
            children = np.flatnonzero(tree.parents == row)
            if len(children) == 0:
                break
            logits[row, int(tree.tokens[children[0]])] = 1.0
            row = int(children[0]) + 1
        pick = Picker(Sampling(), target.device)
        return lambda: walk(tree, logits, pick)

    def _commit(self, task: Task) -> Callable[[], object]:
        target = self._target
        rows = [0, *range(2, 2 * task.size + 1, 2)]  # every one but the root has to be moved

        def run() -> object:
            cache = self._use_cache(task.batch)
            cache.truncate(task.context)
            for sequence in range(task.batch):
                target.commit(rows, sequence)

        return run

    def _use_cache(self, batch: int) -> KVCache:
        """The cache of this batch size, filled with noise, since zeros can run faster."""
        cache = self._caches.get(batch)
        if cache is None:
            self._target.cache = None
            cache = self._target.reserve(self._capacity, batch)
            with torch.inference_mode():
                cache.data.normal_()
            self._caches[batch] = cache
        self._target.cache = cache
        return cache

    def _tokens(self, tokens: int) -> torch.Tensor:
        ids = self._random.integers(0, self._target.architecture.vocab, tokens)
        return torch.from_numpy(ids).to(self._target.device)

    def _lattice(self, nodes: int) -> Lattice:
        """Marginals of a usual drafter: 0.7 for the first token, each further one a third of it."""
        width = max(min(nodes, 64), 1)
        row = 0.7 * 3.0 ** -np.arange(width)
        fading = 0.95 ** np.arange(LATTICE_DEPTH)
        tokens = np.arange(LATTICE_DEPTH * width, dtype=np.int64).reshape(LATTICE_DEPTH, width)
        vocab = self._target.architecture.vocab
        return Lattice(tokens % vocab, fading[:, None] * row[None, :])

    def _tree(self, nodes: int) -> DraftTree:
        return best_first(self._lattice(nodes), nodes) if nodes else EMPTY
