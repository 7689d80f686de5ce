"""One generation in progress: the rounds of the decode loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.acceptance import walk
from decoder.device import synchronise
from decoder.policies import Limits
from decoder.sampling import Picker, Sampling
from decoder.statistics import Laps, Statistics
from decoder.text import StopStrings, TextStream
from decoder.tree import EMPTY, DraftTree

if TYPE_CHECKING:
    from decoder.engine import TreeDecoder


class DecodeRun:
    """One generation in progress; iterate over it for text pieces."""

    def __init__(
        self,
        decoder: TreeDecoder,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        text: tuple[TextStream | None, StopStrings],
    ) -> None:
        self.token_ids: list[int] = []
        self.stats = Statistics(policy=decoder.policy.name, profile=decoder.profile_line)
        self._decoder = decoder
        self._prompt = prompt
        self._wanted = max_new_tokens
        self._pick = Picker(sampling, decoder.target.device)
        self._stream, self._stops = text
        self._ends = end_tokens(decoder.target.model)

    @property
    def has_text(self) -> bool:
        return self._stream is not None

    def __iter__(self) -> Iterator[str]:
        for token in self._tokens():
            self.token_ids.append(token)
            ended = self._ended(token)
            if self._stream is not None:
                piece = self._stops.add(self._stream.add(token))
                if self._stops.hit:
                    self.stats.finish = ended = "stop"
                if piece:
                    yield piece
            if ended:
                break
        self.stats.new_tokens = len(self.token_ids)
        if self._stream is not None and not self._stops.hit:
            rest = self._stops.add(self._stream.finish()) + self._stops.finish()
            if rest:
                yield rest

    def _ended(self, token: int) -> str:
        if token in self._ends:
            self.stats.finish = "eos"
        elif len(self.token_ids) >= self._wanted:
            self.stats.finish = "length"
        return self.stats.finish

    def _tokens(self) -> Iterator[int]:
        """Every emitted token in order; the caller stops when it has enough."""
        decoder, stats = self._decoder, self.stats
        target, drafter = decoder.target, decoder.drafter
        target.reserve(len(self._prompt) + self._wanted + decoder.policy.max_nodes + 1)
        context = np.empty(len(self._prompt) + self._wanted + 1, dtype=np.int64)
        context[: len(self._prompt)] = self._prompt
        length = len(self._prompt)
        started = perf_counter()
        logits = target.prefill(torch.tensor([self._prompt], device=target.device))
        bonus = self._pick(logits[0])
        stats.prompt_tokens = length
        stats.prefill_s = perf_counter() - started
        drafter.start(context[:length])
        while True:
            context[length] = bonus
            length += 1
            yield bonus
            started = perf_counter()
            emitted = self._round(context[:length])
            bonus = emitted.pop()
            stats.decode_s += perf_counter() - started
            for token in emitted:
                context[length] = token
                length += 1
                yield token

    def _round(self, context: NDArray[np.int64]) -> list[int]:
        """One cycle after `context`, whose last token is the bonus; the tokens it emits."""
        decoder, stats = self._decoder, self.stats
        laps = Laps(stats.stages)
        tree = self._choose_tree(context, laps)
        logits = decoder.target.verify(int(context[-1]), tree)
        self._observe_cost(tree, len(context) - 1, laps)
        outcome = walk(tree, logits[0], self._pick)
        laps.end("accept_s")
        decoder.target.commit(outcome.rows)
        emitted = [*outcome.tokens, outcome.bonus]
        decoder.policy.observe(tree, outcome.rows, len(context) - 1)
        decoder.drafter.observe(emitted)
        laps.end("commit_s")
        stats.rounds += 1
        stats.drafted_rounds += tree.nodes > 0
        stats.drafted_tokens += tree.nodes
        stats.accepted_tokens += len(outcome.rows)
        stats.tree_nodes.append(tree.nodes)
        stats.accepted_depths.append(len(outcome.rows))
        return emitted

    def _choose_tree(self, context: NDArray[np.int64], laps: Laps) -> DraftTree:
        """What to verify this round; the empty tree where drafting does not pay."""
        policy, drafter = self._decoder.policy, self._decoder.drafter
        cached = len(context) - 1
        # The round itself gives one token, so drafting pays only for what is wanted beyond it.
        depth = min(drafter.max_depth, self._wanted - len(self.token_ids) - 1)
        if depth < 1 or not policy.wants_draft(cached):
            return EMPTY
        candidates = drafter.draft(context, depth)
        laps.end("draft_s")
        # Behind the root there is always room for the policy's largest tree.
        limits = Limits(nodes=max(policy.max_nodes, 1), depth=depth)
        tree = policy.choose(candidates, cached, limits)
        laps.end("build_s")
        return tree

    def _observe_cost(self, tree: DraftTree, cached: int, laps: Laps) -> None:
        source = self._decoder.cost_source
        if source is None:
            laps.end("verify_s")
            return
        synchronise(self._decoder.target.device)
        verify_s = laps.end("verify_s")
        known = source.cost.drift_warning
        source.cost.observe(tree.rows, cached, verify_s)
        warning = source.cost.drift_warning
        if warning is not None and known is None:
            self.stats.warnings.append(warning)
            logging.getLogger(__name__).warning(warning)


def end_tokens(model: Any) -> frozenset[int]:
    """The ids that end a text: the generation config's, else the config's."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
