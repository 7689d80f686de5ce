"""The EAGLE-3 drafter: a tree grown level by level from the target's features (Li et al., 2025).

Its passes over a text and its trees are captured where the target's forwards are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from costmodel.statistics import Ints
from decoder.acceptance.drawn import LevelDistributions, draw_levels
from decoder.device import to_device
from decoder.drafters.base import Drafter, DraftRequest, Draws
from decoder.drafters.blocks import Rotary
from decoder.drafters.caches import (
    CAPTURED_ROWS,
    DraftRows,
    FeatureSession,
    PlacedText,
    RowForwards,
    SharedCaches,
    check_observed,
)
from decoder.drafters.checkpoint import is_padded, refuse_misfit, stored_model, token_ids
from decoder.drafters.eagle3.model import Eagle3Config, Eagle3Model, load_eagle3
from decoder.drafters.vocabulary import over_vocabulary, softmax, top_children
from decoder.model.attention import DenseVisible, RowBlock
from decoder.model.kv_cache import CacheShape
from decoder.model.runtime.capture import BudgetedCapture, Tensors
from decoder.model.runtime.linear import pack_layers
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree, DraftTree
from decoder.tree.growth import Frontier, grow

# The published default: the root's children, then as many expansions, one forward each.
EXPANSIONS = 7
CHUNK_ROWS = 512  # of a prompt in one forward


class Eagle3Drafter(Drafter):
    """Drafts trees with one small layer of its own; the embedding is the target's.

    source  a checkpoint's folder or hub id, or a loaded model
    Raises InputError if the checkpoint is damaged or belongs to another target.
    """

    name = "eagle3"
    draws: Draws = "levels"
    max_depth = EXPANSIONS + 1
    deepens = True

    def __init__(self, target: Target, source: str | Path | Eagle3Model) -> None:
        self.model = stored_model(source, target, load_eagle3)
        if self.model is not source:
            pack_layers(self.model)
        config = self.model.config
        check_fit(config, target)
        self.target = target
        self.rotary = Rotary(config.shape, target.device)
        # The hidden states that enter these layers.
        layers = target.architecture.layers
        self.feature_layers = config.features or (2, layers // 2, layers - 3)
        self.architecture_hash = config.hash()
        self.tokens = token_ids(self.model.d2t).cpu().numpy() if config.mapped else None
        vocab = target.architecture.vocab  # with rows of padding that the drafter may lack
        if config.vocab < vocab and not config.mapped:
            self.tokens = np.arange(config.vocab)
        if config.own_embedding:
            table = self.model.embed_tokens
            rows = nn.functional.pad(table.weight, (0, 0, 0, vocab - len(table.weight)))
            table.weight = nn.Parameter(rows, requires_grad=False)
        self._forwards: LevelForwards | None = None

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> Eagle3Session:
        return Eagle3Session(self, prompt, features)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        own = self.model.config.own_embedding
        return self.model.embed_tokens(ids) if own else self.target.embed(ids)

    def forwards(self) -> LevelForwards:
        """The passes over its texts; captured if the target's forwards are."""
        capture = self.target.runtime.capture
        if self._forwards is None or self._forwards.capture is not capture:
            self._forwards = LevelForwards(self, capture)
        return self._forwards


class Eagle3Session(FeatureSession):
    """The drafting of one text: its draft cache, and features that are not yet in it."""

    rewinds = True

    def __init__(self, drafter: Eagle3Drafter, prompt: Ints, features: torch.Tensor | None) -> None:
        """features: of the prompt, [tokens, 3 * hidden]

        The row of the prompt's last token waits for the bonus token, which it embeds.
        """
        super().__init__("an EAGLE-3 drafter")
        self._drafter = drafter
        self._text = Eagle3Text(drafter.forwards())
        self._narrow: list[torch.Tensor] = []  # of the drafter's width, before the others
        self.observe(prompt.tolist(), features)
        self._extend(prompt)

    def draft(self, context: Ints, request: DraftRequest) -> CandidateTree:
        """The tree grown by `request.growth`, with probabilities given the parent."""
        drafter = self._drafter
        q = self._distributions(context, request.temperature)
        deepest = min(request.depth, drafter.deepest(request.growth))
        return grow(top_children(q, drafter.tokens), request.growth, deepest)

    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
    ) -> DraftTree:
        drafter, q = self._drafter, self._distributions(context, temperature)
        vocab = drafter.target.architecture.vocab

        def whole(frontier: Frontier) -> torch.Tensor:
            return over_vocabulary(q(frontier), drafter.tokens, vocab)

        return draw_levels(shape, whole, generator, int(shape.depths.max(initial=0)))

    def rewind(self, tokens: int) -> None:
        self._text.cut(tokens)
        self._waiting.clear()
        self._narrow.clear()

    def take_in(self, features: torch.Tensor) -> None:
        self._narrow.append(self._drafter.model.fc(features))

    def _distributions(self, context: Ints, temperature: float) -> LevelDistributions:
        """q of the drafter's tokens below the nodes of a tree behind the context."""
        self._extend(context)
        check_observed(self._text.length, len(context))
        return lambda frontier: softmax(self._text.below(frontier), temperature)

    @torch.inference_mode()
    def _extend(self, context: Ints) -> None:
        """Bring every row whose next token is known into the draft cache."""
        self.take_in_waiting()
        if not self._narrow:
            return
        waiting = torch.cat(self._narrow)
        length = self._text.length
        rows = max(min(len(waiting), len(context) - 1 - length), 0)
        for first in range(0, rows, CHUNK_ROWS):
            chunk = waiting[first : min(first + CHUNK_ROWS, rows)]
            at = length + first + 1
            self._text.extend(chunk, context[at : at + len(chunk)])
        self._narrow = [waiting[rows:]] if rows < len(waiting) else []


def check_fit(config: Eagle3Config, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    hidden, layers = target.architecture.hidden, target.architecture.layers
    vocab, width = target.architecture.vocab, config.shape.hidden
    fields = {
        "target hidden size": (config.target_hidden, hidden),
        "vocabulary": (None if is_padded(config.vocab, vocab) else config.vocab, vocab),
    }
    problems = []
    if width != hidden and not config.own_embedding:
        problems.append(
            f"it is {width} wide and brings no embedding, and the target's is {hidden} wide"
        )
    if layers < 3:
        problems.append(f"it reads the inputs of three layers, and the target has {layers}")
    refuse_misfit(target, fields, problems)


class LevelForwards:
    """The passes of a drafter over all its texts: rows of a round, and levels of a tree.

    Narrowing the features (one product) and choosing the best children, whose number and
    temperature change by round, are outside of what may be captured.
    """

    def __init__(self, drafter: Eagle3Drafter, capture: BudgetedCapture | None) -> None:
        self._model, self._rotary, self._embed = drafter.model, drafter.rotary, drafter.embed
        shape, target = drafter.model.config.shape, drafter.target
        self._dtype, self.capture, self.device = target.dtype, capture, target.device
        sizes = CacheShape(layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self.caches = SharedCaches(sizes, target.dtype, target.device, target)
        # The layer's output at the last frontier, which the next level reads. One for all texts,
        # since a draft is finished before another begins.
        rows = torch.zeros(CAPTURED_ROWS, shape.hidden, dtype=target.dtype, device=target.device)
        self._hidden = rows
        self.extend = RowForwards("taking in a round's rows", self._extend, shape.group, capture)
        self.expand = RowForwards("the draft of a level", self._level, shape.group, capture)

    def keep(self, hidden: torch.Tensor) -> None:
        """Keep the output [rows, hidden] of the root, or of the last level, for the next one."""
        if len(hidden) > len(self._hidden):  # captured levels read the old tensor and are dropped
            self._hidden = hidden.new_zeros(2 * len(hidden), hidden.shape[1])
            self.expand.forget()
        self._hidden[: len(hidden)].copy_(hidden)

    def _extend(self, rows: DraftRows, hidden: torch.Tensor) -> Tensors:
        """Output [1, hidden] and logits [1, draft_vocab] of the last row before the padding."""
        last = self._run(rows, hidden)[rows.last]
        return last, self._model.logits(last)

    def _level(self, rows: DraftRows, above: torch.Tensor) -> Tensors:
        output = self._run(rows, self._hidden.index_select(0, above))
        return output, self._model.logits(output)

    def _run(self, rows: DraftRows, hidden: torch.Tensor) -> torch.Tensor:
        rope, embedded = rows.rope(self._rotary, self._dtype), self._embed(rows.tokens)
        return self._model(embedded, hidden, rope, rows)


class Eagle3Text(PlacedText):
    """The passes over one text: its context, and the rows of its tree, which are pending."""

    def __init__(self, forwards: LevelForwards) -> None:
        super().__init__(forwards.caches)
        self._forwards = forwards
        self._root = (torch.empty(0), torch.empty(0))  # output and logits at the newest row
        self._ancestors = np.zeros((1, 0), np.bool_)  # of the last frontier's nodes

    @torch.inference_mode()
    def extend(self, hidden: torch.Tensor, next_tokens: Ints) -> None:
        """Append rows of narrowed features [rows, hidden] and the tokens after them."""
        rows = len(hidden)
        self.cut(self.length)  # the rows of the last tree
        self.make_room(rows)
        visible = DenseVisible(np.tri(rows, dtype=np.bool_))
        block = RowBlock(self.sequence, next_tokens, np.arange(rows), visible)
        output, logits = self._forwards.extend(self.cache, block, hidden)
        self.cache.lengths[self.sequence] += rows
        self._root = output.clone(), logits.clone()  # the next rows overwrite them

    @torch.inference_mode()
    def below(self, frontier: Frontier) -> torch.Tensor:
        """Logits [F, draft_vocab] below the frontier's nodes; `ROOT` begins a new tree."""
        if not frontier.depth:
            output, logits = self._root
            self.cut(self.length)
            self._ancestors = np.zeros((1, 0), np.bool_)
            self._forwards.keep(output)
            return logits
        rows = len(frontier.rows)
        self.make_room(rows)
        themselves = np.eye(rows, dtype=np.bool_)
        visible = np.concatenate((self._ancestors[frontier.above], themselves), axis=1)
        offsets = np.full(rows, frontier.depth - 1)  # children of the root follow the context
        block = RowBlock(self.sequence, frontier.tokens, offsets, DenseVisible(visible))
        above = to_device(frontier.above, self._forwards.device)
        hidden, logits = self._forwards.expand(self.cache, block, above)
        self._forwards.keep(hidden[:rows])
        self.cache.pending[self.sequence] += rows
        self._ancestors = visible
        return logits[:rows]
