"""The SpecBlock drafter: a tree of a few blocks of dependent positions (Shi et al., 2026).

One forward a round of blocks, M in all (appendix A.2). The rank head gives trees their shape,
whatever rule of growth the policy has; the policy verifies as much of a tree as pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from costmodel.errors import InputError
from costmodel.statistics import Array, Ints
from decoder.acceptance.drawn import draw_levels
from decoder.drafters.base import Drafter, DraftRequest, Draws
from decoder.drafters.blocks import Rotary
from decoder.drafters.caches import FeatureSession, check_observed
from decoder.drafters.checkpoint import refuse_misfit, stored_model
from decoder.drafters.vocabulary import softmax
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree, DraftTree
from decoder.tree.growth import Frontier
from lab.papers.specblock.cache import DraftCache, span
from lab.papers.specblock.model import (
    SpecBlockConfig,
    SpecBlockModel,
    is_specblock,
    load_specblock,
    pack_specblock,
)
from lab.papers.specblock.tree import GROWTHS, UNIFORM_WIDTH, BlockGrowth, BlockTree, uniform

CHUNK_ROWS = 512  # of a prompt in one forward


class SpecBlockDrafter(Drafter):
    """Drafts trees of blocks, with the target's embedding and an LM head of its own.

    source  a checkpoint's folder or hub id, or a loaded model
    growth  None for that which the checkpoint's config names: the paper's, if none
    Raises InputError if the checkpoint is damaged or belongs to another target.
    """

    draws: Draws = "levels"

    def __init__(
        self, target: Target, source: str | Path | SpecBlockModel, growth: BlockGrowth | None = None
    ) -> None:
        self.model = stored_model(source, target, load_specblock)
        if self.model is not source:
            pack_specblock(self.model)
        config = self.model.config
        check_fit(config, target)
        self.growth = growth or default_growth(self.model)
        self.target = target
        self.name = self.model.name
        self.rotary = Rotary(config.shape, target.device)
        self.max_depth = config.block_length * self.growth.blocks
        self.feature_layers = config.features_of(target.architecture.layers)
        counts = (self.growth.blocks, self.growth.beam, self.growth.widest)
        self.architecture_hash = config.hash({"growth": counts})
        self.tokens = self.model.tokens.cpu().numpy()

    @staticmethod
    def recognises(published: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of a SpecBlock drafter."""
        return is_specblock(published)

    @classmethod
    def from_pretrained(cls, name: str, target: Target) -> SpecBlockDrafter:
        """The drafter of a folder or hub id. Raises InputError."""
        return cls(target, name)

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> SpecBlockSession:
        return SpecBlockSession(self, prompt, features)

    def embed(self, tokens: Ints) -> torch.Tensor:
        """Embeddings [rows, hidden] of target tokens."""
        ids = torch.from_numpy(np.array(tokens))
        return self.target.embed(ids.to(self.target.device))


class SpecBlockSession(FeatureSession):
    """The drafting of one text: the cache of its prefix, K rows a token, and tokens not yet in it.

    The rows of token t join its features and the embedding of token t + 1; the newest token's
    wait for the bonus token and are the first block. (The authors' loop enters that token twice
    and lets rotary positions run ahead of the text, unlike their training, which this follows.)
    """

    def __init__(
        self, drafter: SpecBlockDrafter, prompt: Ints, features: torch.Tensor | None
    ) -> None:
        """features: of the prompt, [tokens, 3 * hidden]"""
        super().__init__("a SpecBlock drafter")
        self._drafter = drafter
        config = drafter.model.config
        self._length = config.block_length
        self._chunk = max(1, CHUNK_ROWS // self._length)
        self._like = drafter.model.norm.weight  # in training, of another dtype than the target
        self._cache = DraftCache(
            config.shape, config.layers, self._like.dtype, drafter.target.device
        )
        self._conditions = self._like.new_empty(0, config.shape.hidden)
        self._drafted = 0  # tokens after the cache's context whose rows the last draft wrote
        self.observe(prompt.tolist(), features)
        self._take_in(prompt, most=1)

    @torch.inference_mode()
    def draft(self, context: Ints, request: DraftRequest) -> CandidateTree:
        """The tree of Algorithm 2, with probabilities given the parent."""
        drafter = self._drafter
        growth = drafter.growth
        blocks = self._blocks(context)
        tree = BlockTree(growth, min(request.depth, drafter.max_depth), request.width)
        rows = blocks.first()
        for number in range(growth.blocks):
            if number:
                starts = tree.starts
                rows = blocks.more(rows[starts.blocks, starts.positions], starts.tokens)
            tree.attach(*self._best(blocks, rows, request.temperature))
            if not len(tree.starts):
                break
        return tree.candidates()

    @torch.inference_mode()
    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
    ) -> DraftTree:
        """Within a block q does not depend on the tokens above. Every node with children at the end
        of a block starts one of its own, so there are as many forwards as rounds of blocks. The
        rank head bounds the children of every node but the root.
        """
        drafter = self._drafter
        q = _BlockDistributions(drafter, self._blocks(context), temperature)
        most = q.children if drafter.model.ranked else None
        return draw_levels(shape, q, generator, drafter.max_depth, most)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        # Rows that the draft has run belong to committed tokens now, the bonus included.
        self._cache.length += self._drafted * self._length
        self._conditions = self._conditions[self._drafted :]
        self._drafted = 0
        super().observe(emitted, features)

    def _blocks(self, context: Ints) -> Blocks:
        """The forwards of one draft after the context, whose last token is the bonus."""
        self._take_in(context, most=self._chunk)
        count = len(self._conditions)
        check_observed(self._cache.length // self._length + count, len(context))
        self._drafted = count
        drafter = self._drafter
        embeddings = drafter.embed(context[-count:])
        return Blocks(drafter, self._cache, self._conditions, embeddings)

    def take_in(self, features: torch.Tensor) -> None:
        narrow = self._drafter.model.condition(features.to(self._like.dtype))
        self._conditions = torch.cat((self._conditions, narrow))

    @torch.inference_mode()
    def _take_in(self, context: Ints, most: int) -> None:
        """Bring tokens into the cache until at most `most` of them wait for the next draft."""
        self.take_in_waiting()
        cache, drafter = self._cache, self._drafter
        while len(self._conditions) > most:
            count = min(len(self._conditions) - most, self._chunk)
            at = cache.length // self._length + 1
            embeddings = drafter.embed(context[at : at + count])
            conditions = self._conditions[:count]
            drafter.model.first_blocks(drafter.rotary, cache, conditions, embeddings)
            cache.length += count * self._length
            self._conditions = self._conditions[count:]

    def _best(self, blocks: Blocks, rows: Ints, temperature: float) -> tuple[Ints, Array, Ints]:
        """The arguments of `BlockTree.attach` from the forward that gave these rows [S, K].

        One copy from the device serves all: float64 holds ids and buckets exactly.
        """
        drafter = self._drafter
        logits, ranks = blocks.logits, blocks.ranks
        width = min(drafter.growth.widest, logits.shape[-1])
        best = softmax(logits, temperature).topk(width)
        parts = [best.indices.double(), best.values.double()]
        if ranks is not None:
            parts.append(ranks.argmax(-1, keepdim=True).double())
        columns = torch.cat(parts, dim=-1).cpu().numpy().reshape(*rows.shape, -1)
        buckets = np.zeros(rows.shape) if ranks is None else columns[..., 2 * width]
        ids = columns[..., :width].astype(np.int64)
        return drafter.tokens[ids], columns[..., width : 2 * width], buckets.astype(np.int64)


class _BlockDistributions:
    """q over the target's vocabulary, level by level; zero for tokens that the drafter lacks."""

    def __init__(self, drafter: SpecBlockDrafter, blocks: Blocks, temperature: float) -> None:
        self._drafter, self._blocks, self._temperature = drafter, blocks, temperature
        self._places = np.zeros(0, np.int64)  # rows of the last level
        self._rows = np.zeros((0, 0), np.int64)  # rows of the last forward
        self._q = torch.empty(0)

    def __call__(self, frontier: Frontier) -> torch.Tensor:
        if not frontier.depth:
            self._run(self._blocks.first())
        elif frontier.depth % self._drafter.model.config.block_length:
            self._places = self._places[frontier.above] + 1
        else:
            self._run(self._blocks.more(self._places[frontier.above], frontier.tokens))
        places = torch.from_numpy(self._places - self._rows[0, 0])
        return self._q[places.to(self._q.device)]

    def children(self) -> Ints:
        """The most children of each node of the last level, by its bucket."""
        ranks = self._blocks.ranks
        if ranks is None:
            raise InputError("the drafter has no rank head")
        buckets = ranks.argmax(-1).cpu().numpy()[self._places - self._rows[0, 0]]
        return np.maximum(self._drafter.growth.branching, 1)[buckets]

    def _run(self, rows: Ints) -> None:
        drafted = softmax(self._blocks.logits, self._temperature)
        self._rows, self._places = rows, rows[:, 0]
        self._q = drafted.new_zeros(len(drafted), self._drafter.target.architecture.vocab)
        self._q[:, self._drafter.model.tokens] = drafted


def default_growth(model: SpecBlockModel) -> BlockGrowth:
    """The growth that a checkpoint's config names, or a uniform one without a rank head."""
    growth = GROWTHS[model.config.tree]
    if model.ranked:
        return replace(growth, branching=model.config.branching or growth.branching)
    return uniform(UNIFORM_WIDTH, growth)


def check_fit(config: SpecBlockConfig, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    architecture, layers = target.architecture, target.architecture.layers
    fields = {
        "hidden size": (config.shape.hidden, architecture.hidden),
        "vocabulary": (config.vocab, architecture.vocab),
    }
    # The last layer's output is not among the features: transformers gives it after the norm.
    deepest = max(config.features_of(layers))
    reads = f"it reads hidden state {deepest} of a target of {layers} layers"
    refuse_misfit(target, fields, [reads] if deepest > layers - 1 else [])


class Blocks:
    """The forwards of one draft: the first block, then batches of further blocks.

    Rows are numbered from the first block's first position; those of block b begin at K * b. A
    row sees the prefix, its own block up to itself, and the rows that the block's start saw. The
    first forward also runs the prefix rows that are not in the cache; the cache's context stays
    the same.
    """

    def __init__(
        self,
        drafter: SpecBlockDrafter,
        cache: DraftCache,
        conditions: torch.Tensor,
        embeddings: torch.Tensor,
    ) -> None:
        """conditions, embeddings: [tokens, hidden] of waiting tokens, that of the bonus last"""
        self._drafter, self._cache = drafter, cache
        self._conditions, self._embeddings = conditions, embeddings
        self._length = drafter.model.config.block_length
        self._hidden = conditions[:0]
        self._visible = np.tri(self._length, dtype=np.bool_)
        self._prefix = cache.length + (len(conditions) - 1) * self._length  # rows that all see
        self.logits = conditions[:0]  # of the last forward's block rows, [S * K, draft_vocab]
        self.ranks: torch.Tensor | None = None  # and its buckets, [S * K, 4]

    def first(self) -> Ints:
        """Run the first block; returns its rows [1, K]."""
        drafter = self._drafter
        given = (self._conditions, self._embeddings)
        self._hidden = drafter.model.first_blocks(drafter.rotary, self._cache, *given)[0]
        return self._read(self._hidden)

    def more(self, starts: Ints, tokens: Ints) -> Ints:
        """Run a block from each of these rows [S] and the tokens they proposed; rows [S, K]."""
        model, cache, length = self._drafter.model, self._cache, self._length
        device = self._hidden.device
        conditions = self._hidden[torch.from_numpy(starts).to(device)]
        rows = model.inputs(conditions, self._drafter.embed(tokens)).flatten(0, 1)
        within = np.kron(np.eye(len(starts), dtype=np.bool_), np.tri(length, dtype=np.bool_))
        path = np.repeat(self._visible[starts], length, axis=0)
        visible = np.concatenate((path, within), axis=1)
        end = self._prefix + len(self._hidden) + len(rows)
        cache.make_room(end - cache.length)
        mask = torch.from_numpy(visible).to(device)
        seen = span(model.config.shape, (0, end), mask, rows.dtype)
        token = torch.full((len(starts),), self._prefix // length, device=device)
        rope = self._drafter.rotary(model.positions(token).flatten(), rows.dtype)
        hidden = model(rows, rope, cache, seen)
        self._hidden = torch.cat((self._hidden, hidden))
        self._visible = np.concatenate((np.pad(self._visible, ((0, 0), (0, len(rows)))), visible))
        return self._read(hidden)

    def _read(self, hidden: torch.Tensor) -> Ints:
        self.logits, self.ranks = self._drafter.model.read(hidden)
        first = len(self._hidden) - len(hidden)
        return np.arange(first, len(self._hidden)).reshape(-1, self._length)
