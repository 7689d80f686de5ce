"""The EAGLE-3 drafter: a tree grown level by level from the target's features (Li et al., 2025).

Its passes over a text and its trees are captured where the target's forwards are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from costmodel.statistics import Ints
from decoder.acceptance.drawn import draw_levels
from decoder.device import to_device
from decoder.drafters.base import Drafter, DraftRequest, DraftSession, Draws
from decoder.drafters.blocks import Rotary
from decoder.drafters.caches import (
    ALL_ROWS,
    CAPTURED_ROWS,
    DraftRows,
    PlacedText,
    RowForwards,
    SharedCaches,
    WaitingFeatures,
    check_observed,
)
from decoder.drafters.checkpoint import differences, is_padded, refuse_misfit, stored_model
from decoder.drafters.eagle3.model import Eagle3Config, Eagle3Model, load_eagle3, token_ids
from decoder.drafters.vocabulary import TopChildren, over_vocabulary, softmax
from decoder.model.attention import RowBlock
from decoder.model.kv_cache import CacheShape
from decoder.model.runtime.capture import Capture, Tensors
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
        if isinstance(source, Eagle3Model):
            self.model = source
        else:
            self.model = stored_model(source, target, load_eagle3)
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
        """Embeddings [rows, hidden] of target tokens: the drafter's own, or the target's."""
        own = self.model.config.own_embedding
        return self.model.embed_tokens(ids) if own else self.target.embed(ids)

    def forwards(self) -> LevelForwards:
        """The passes over its texts; captured if the target's forwards are."""
        capture = self.target.runtime.capture
        if self._forwards is None or self._forwards.capture is not capture:
            self._forwards = LevelForwards(self, capture)
        return self._forwards


class Eagle3Session(DraftSession):
    """The drafting of one text: its draft cache, and features that are not yet in it."""

    rewinds = True

    def __init__(self, drafter: Eagle3Drafter, prompt: Ints, features: torch.Tensor | None) -> None:
        """features: of the prompt, [tokens, 3 * hidden]

        The row of the prompt's last token waits for the bonus token, which it embeds.
        """
        self._drafter = drafter
        self._forward = Eagle3Text(drafter.forwards())
        self._waiting = WaitingFeatures("an EAGLE-3 drafter")
        self._narrow: list[torch.Tensor] = []  # of the drafter's width, before the others
        self.observe(prompt.tolist(), features)
        self._take_in(prompt)

    def draft(self, context: Ints, request: DraftRequest) -> CandidateTree:
        """The tree grown by `request.growth`, with probabilities given the parent."""
        drafter = self._drafter
        q = _Eagle3Distributions(self._tree(context), request.temperature)
        children = TopChildren(q, drafter.tokens)
        deepest = min(request.depth, drafter.deepest(request.growth))
        return grow(children, request.growth, deepest)

    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
    ) -> DraftTree:
        drafter = self._drafter
        vocab = drafter.target.architecture.vocab
        q = _Eagle3Distributions(self._tree(context), temperature, drafter.tokens, vocab)
        return draw_levels(shape, q, generator, int(shape.depths.max(initial=0)))

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        self._waiting.add(features)
        if self._waiting.many:
            self._make_narrow()

    def rewind(self, tokens: int) -> None:
        self._forward.cut(tokens)
        self._waiting.clear()
        self._narrow.clear()

    def _tree(self, context: Ints) -> Eagle3Text:
        """The forward with all of the context taken in, ready for a new tree."""
        self._take_in(context)
        check_observed(self._forward.length, len(context))
        return self._forward

    @torch.inference_mode()
    def _make_narrow(self) -> None:
        features = self._waiting.take()
        if features is not None:
            self._narrow.append(self._drafter.model.fc(features))

    @torch.inference_mode()
    def _take_in(self, context: Ints) -> None:
        """Bring every row whose next token is known into the draft cache."""
        self._make_narrow()
        if not self._narrow:
            return
        waiting = torch.cat(self._narrow)
        length = self._forward.length
        rows = max(min(len(waiting), len(context) - 1 - length), 0)
        for first in range(0, rows, CHUNK_ROWS):
            chunk = waiting[first : min(first + CHUNK_ROWS, rows)]
            at = length + first + 1
            self._forward.extend(chunk, context[at : at + len(chunk)])
        self._narrow = [waiting[rows:]] if rows < len(waiting) else []


@dataclass(frozen=True, slots=True)
class _Eagle3Distributions:
    """q at the bonus token and at nodes.

    vocab  of the target, to spread q over, with `tokens` of q's columns; None: as they are
    """

    forward: Eagle3Text
    temperature: float
    tokens: Ints | None = None
    vocab: int | None = None

    def root(self) -> torch.Tensor:
        return self._q(self.forward.root())

    def expand(self, frontier: Frontier) -> torch.Tensor:
        return self._q(self.forward.expand(frontier))

    def _q(self, logits: torch.Tensor) -> torch.Tensor:
        q = softmax(logits, self.temperature)
        return q if self.vocab is None else over_vocabulary(q, self.tokens, self.vocab)


def check_fit(config: Eagle3Config, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    hidden, layers = target.architecture.hidden, target.architecture.layers
    vocab = target.architecture.vocab
    problems = differences(
        {
            "target hidden size": (config.target_hidden, hidden),
            "vocabulary": (None if is_padded(config.vocab, vocab) else config.vocab, vocab),
        }
    )
    if config.shape.hidden != hidden and not config.own_embedding:
        problems.append(
            f"it is {config.shape.hidden} wide and brings no embedding, and the target's is "
            f"{hidden} wide"
        )
    if layers < 3:
        problems.append(f"it reads the inputs of three layers, and the target has {layers}")
    refuse_misfit(problems, target)


class LevelForwards:
    """The passes of a drafter over all its texts: rows of a round, and levels of a tree.

    Narrowing the features (one product) and choosing the best children, whose number and
    temperature change by round, are outside of what may be captured.
    """

    def __init__(self, drafter: Eagle3Drafter, capture: Capture | None) -> None:
        self._model, self._rotary, self._embed = drafter.model, drafter.rotary, drafter.embed
        shape, target = drafter.model.config.shape, drafter.target
        self._dtype, self.capture, self.device = target.dtype, capture, target.device
        sizes = CacheShape(layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self.caches = SharedCaches(sizes, target.dtype, target.device, target)
        # The layer's output at the last frontier, which the next level reads. One for all texts,
        # since a draft is finished before another begins.
        self._hidden = self._new_hidden(CAPTURED_ROWS)
        self.extend = RowForwards("taking in a round's rows", self._extend, shape.group, capture)
        self.expand = RowForwards("the draft of a level", self._level, shape.group, capture)

    def begin(self, root: torch.Tensor) -> None:
        """Begin a tree at the root, whose output is [1, hidden]."""
        self._hidden[:1].copy_(root)

    def keep(self, hidden: torch.Tensor) -> None:
        """Keep the last level's output [rows, hidden] for the next one."""
        if len(hidden) > len(self._hidden):  # captured levels read the old tensor and are dropped
            self._hidden = self._new_hidden(2 * len(hidden))
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
        return self._model(embedded, hidden, rope, rows, ALL_ROWS)

    def _new_hidden(self, rows: int) -> torch.Tensor:
        width = self._model.config.shape.hidden
        return torch.zeros(rows, width, dtype=self._dtype, device=self.device)


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
        block = RowBlock(self.sequence, next_tokens, np.arange(rows), None)
        output, logits = self._forwards.extend(self.cache, block, hidden)
        self.cache.lengths[self.sequence] += rows
        self._root = output.clone(), logits.clone()  # the next rows overwrite them

    @torch.inference_mode()
    def root(self) -> torch.Tensor:
        """Logits [1, draft_vocab] below the bonus token; starts a new tree."""
        output, logits = self._root
        self.cut(self.length)
        self._ancestors = np.zeros((1, 0), np.bool_)
        self._forwards.begin(output)
        return logits

    @torch.inference_mode()
    def expand(self, frontier: Frontier) -> torch.Tensor:
        """Logits [F, draft_vocab] below the frontier's nodes."""
        rows = len(frontier.rows)
        self.make_room(rows)
        themselves = np.eye(rows, dtype=np.bool_)
        visible = np.concatenate((self._ancestors[frontier.above], themselves), axis=1)
        offsets = np.full(rows, frontier.depth - 1)  # children of the root follow the context
        block = RowBlock(self.sequence, frontier.tokens, offsets, visible)
        above = to_device(frontier.above, self._forwards.device)
        hidden, logits = self._forwards.expand(self.cache, block, above)
        self._forwards.keep(hidden[:rows])
        self.cache.pending[self.sequence] += rows
        self._ancestors = visible
        return logits[:rows]
