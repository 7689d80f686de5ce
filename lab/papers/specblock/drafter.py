"""The SpecBlock drafter: a tree of a few blocks of dependent positions (Shi et al., 2026).

One forward a round of blocks, M in all (appendix A.2). The rank head gives trees their shape,
whatever rule of growth the policy has; the policy verifies as much of a tree as pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.acceptance.drawn import draw_levels
from decoder.drafters.base import Drafter, DraftRequest, DraftSession, Draws
from decoder.drafters.blocks import DraftCache, Rotary, Span, span
from decoder.drafters.caches import WaitingFeatures, check_observed
from decoder.drafters.checkpoint import differences, find_config, refuse_misfit, stored_model
from decoder.drafters.vocabulary import softmax
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree, DraftTree
from decoder.tree.growth import Frontier
from lab.papers.specblock.model import (
    SpecBlockConfig,
    SpecBlockModel,
    Wanted,
    is_released,
    is_specblock,
    load_specblock,
    pack_specblock,
)
from lab.papers.specblock.tree import UNIFORM_WIDTH, BlockGrowth, BlockTree, uniform

CHUNK_ROWS = 512  # of a prompt in one forward


class SpecBlockDrafter(Drafter):
    """Drafts trees of blocks; the embedding is the target's, and usually the head's rows too.

    source  a checkpoint's folder or hub id, or a loaded model
    growth  None for the checkpoint's branching, two blocks and 60 nodes
    Raises InputError if the checkpoint is damaged or belongs to another target.
    """

    draws: Draws = "levels"

    def __init__(
        self, target: Target, source: str | Path | SpecBlockModel, growth: BlockGrowth | None = None
    ) -> None:
        if isinstance(source, SpecBlockModel):
            self.model = source
        else:
            load = partial(load_specblock, head=target.head_weight())
            self.model = stored_model(source, target, load)
            pack_specblock(self.model)
        config = self.model.config
        check_fit(config, target)
        self.growth = growth or default_growth(self.model)
        self.target = target
        self.name = self.model.name
        self.rotary = Rotary(config.shape, target.device)
        self.max_depth = config.block_length * self.growth.blocks
        self.feature_layers = config.feature_layers
        self.architecture_hash = config.hash(
            {"blocks": self.growth.blocks, "starts": self.growth.starts}
        )
        self.tokens = self.model.tokens.cpu().numpy()

    @staticmethod
    def recognises(published: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of a SpecBlock drafter, or of one its authors released."""
        return is_specblock(published) or is_released(published)

    @classmethod
    def from_pretrained(cls, name: str, target: Target) -> SpecBlockDrafter:
        """The drafter of a folder or hub id. Raises InputError for the authors' own format."""
        if is_released(find_config(name)):
            raise InputError(
                f"'{name}' is a SpecBlock checkpoint in its authors' format, which is not read: "
                "it has K prefix rows a token and another rank head",
                hint="`rooftree train-drafter --kind specblock` trains one for this decoder.",
            )
        return cls(target, name)

    def start(
        self,
        prompt: NDArray[np.int64],
        features: torch.Tensor | None,
        logits: torch.Tensor | None = None,
    ) -> SpecBlockSession:
        return SpecBlockSession(self, prompt, features)

    def embed(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Embeddings [rows, hidden] of target tokens."""
        ids = torch.from_numpy(np.array(tokens))
        return self.target.embed(ids.to(self.target.device))


class SpecBlockSession(DraftSession):
    """The drafting of one text: the cache of its prefix, and rows that are not yet in it.

    The prefix's row t joins the features of token t and the embedding of token t + 1; the newest
    row waits for the bonus token and is the first position of the first block.
    """

    def __init__(
        self, drafter: SpecBlockDrafter, prompt: NDArray[np.int64], features: torch.Tensor | None
    ) -> None:
        """features: of the prompt, [tokens, 3 * hidden]"""
        self._drafter = drafter
        config = drafter.model.config
        self._like = drafter.model.queries  # in training, of another dtype than the target
        self._cache = DraftCache(
            config.shape, config.layers, self._like.dtype, drafter.target.device
        )
        self._waiting = WaitingFeatures("a SpecBlock drafter")
        self._conditions = torch.empty_like(self._like[:0])  # those of the drafter's width before
        self._drafted = 0  # prefix rows after the cache's length that the last draft wrote
        self.observe(prompt.tolist(), features)
        self._take_in(prompt, most=1)

    @torch.inference_mode()
    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> CandidateTree:
        """The tree of Algorithm 2, with probabilities given the parent."""
        drafter = self._drafter
        growth = drafter.growth
        blocks = self._blocks(context)
        tree = BlockTree(growth, min(request.depth, drafter.max_depth), request.width)
        rows = blocks.first()
        for number in range(growth.blocks):
            if number:
                starts = tree.starts
                places = np.array([rows[start.block, start.position] for start in starts])
                rows = blocks.more(places, np.array([start.token for start in starts]))
            tree.attach(*self._best(blocks, rows, request.temperature))
            if not tree.starts:
                break
        return tree.candidates()

    @torch.inference_mode()
    def draw(
        self,
        context: NDArray[np.int64],
        shape: DraftTree,
        temperature: float,
        generator: torch.Generator,
    ) -> DraftTree:
        """A `DrawnTree` of this shape, drawn level by level from q at this temperature.

        Within a block q does not depend on the tokens above. Every node with children at the end
        of a block starts one of its own, so there are as many forwards as rounds of blocks. The
        rank head bounds the children of every node, as it does in candidate trees.
        """
        drafter = self._drafter
        q = _BlockDistributions(drafter, self._blocks(context), temperature)
        most = q.children if drafter.model.ranked else None
        return draw_levels(shape, q, generator, drafter.max_depth, most)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Keep the features of the committed rows for the next draft."""
        self._waiting.add(features)
        # Prefix rows that the draft has run belong to committed tokens now, the bonus included.
        self._cache.length += self._drafted
        self._conditions = self._conditions[self._drafted :]
        self._drafted = 0
        if self._waiting.many:
            self._make_narrow()

    def _blocks(self, context: NDArray[np.int64]) -> Blocks:
        """The forwards of one draft after the context, whose last token is the bonus."""
        self._take_in(context, most=CHUNK_ROWS)
        rows = len(self._conditions)
        check_observed(self._cache.length + rows, len(context))
        self._drafted = rows
        drafter = self._drafter
        embeddings = drafter.embed(context[-rows:])
        return Blocks(drafter, self._cache, self._conditions, embeddings)

    @torch.inference_mode()
    def _make_narrow(self) -> None:
        features = self._waiting.take()
        if features is not None:
            narrow = self._drafter.model.condition(features.to(self._like.dtype))
            self._conditions = torch.cat((self._conditions, narrow))

    @torch.inference_mode()
    def _take_in(self, context: NDArray[np.int64], most: int) -> None:
        """Bring rows into the cache until at most `most` of them wait for the next draft."""
        self._make_narrow()
        while len(self._conditions) > most:
            count = min(len(self._conditions) - most, CHUNK_ROWS)
            at = self._cache.length + 1
            embeddings = self._drafter.embed(context[at : at + count])
            add_prefix(self._drafter, self._cache, self._conditions[:count], embeddings)
            self._conditions = self._conditions[count:]

    def _best(
        self, blocks: Blocks, rows: NDArray[np.int64], temperature: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
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

    def root(self) -> torch.Tensor:
        self._run(self._blocks.first())
        self._places = self._rows[:, 0]
        return self._answer()

    def expand(self, frontier: Frontier) -> torch.Tensor:
        self._places = self._places[frontier.above]
        if frontier.depth % self._drafter.model.config.block_length:
            self._places = self._places + 1
        else:
            self._run(self._blocks.more(self._places, frontier.tokens))
            self._places = self._rows[:, 0]
        return self._answer()

    def children(self) -> NDArray[np.int64]:
        """The most children of each node of the last level, by its bucket."""
        ranks = self._blocks.ranks
        if ranks is None:
            raise InputError("the drafter has no rank head")
        buckets = ranks.argmax(-1).cpu().numpy()[self._places - self._rows[0, 0]]
        return np.array(self._drafter.growth.branching, np.int64)[buckets]

    def _run(self, rows: NDArray[np.int64]) -> None:
        drafted = softmax(self._blocks.logits, self._temperature)
        self._rows = rows
        self._q = drafted.new_zeros(len(drafted), self._drafter.target.architecture.vocab)
        self._q[:, self._drafter.model.tokens] = drafted

    def _answer(self) -> torch.Tensor:
        places = torch.from_numpy(self._places - self._rows[0, 0])
        return self._q[places.to(self._q.device)]


def default_growth(model: SpecBlockModel) -> BlockGrowth:
    """The growth of a checkpoint's trees: the paper's, or a uniform one without a rank head."""
    growth = BlockGrowth()
    if model.ranked:
        return replace(growth, branching=model.config.branching)
    return uniform(UNIFORM_WIDTH, growth)


def check_fit(config: SpecBlockConfig, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    architecture = target.architecture
    problems = differences(
        {
            "hidden size": (config.shape.hidden, architecture.hidden),
            "vocabulary": (config.vocab, architecture.vocab),
        }
    )
    # The last layer's output is not among the features: transformers gives it after the norm.
    deepest, layers = max(config.feature_layers), architecture.layers
    if deepest > layers - 1:
        problems.append(f"it reads hidden state {deepest} of a target of {layers} layers")
    refuse_misfit(problems, target)


class BlockModel(Protocol):
    """The part of a drafter that its forwards need."""

    model: SpecBlockModel
    rotary: Rotary

    def embed(self, tokens: NDArray[np.int64]) -> torch.Tensor: ...


def add_prefix(
    drafter: BlockModel, cache: DraftCache, conditions: torch.Tensor, embeddings: torch.Tensor
) -> None:
    """Append rows of the verified prefix to the cache.

    conditions, embeddings  [rows, hidden]
    """
    model, count = drafter.model, len(conditions)
    cache.make_room(count)
    start, end = cache.length, cache.length + count
    rows = model.inputs(conditions, embeddings)[:, 0]
    visible = torch.ones(count, count, dtype=torch.bool, device=rows.device).tril()
    seen = span(model.config.shape, (0, end), visible, rows.dtype)
    positions = torch.arange(start, end, device=rows.device)
    rope = drafter.rotary(positions, rows.dtype)
    # Only keys and values are kept, so the last layer computes one row alone.
    one = Wanted(positions[-1:] - start, Span(0, end, None))
    model(rows, positions - start, rope, cache, seen, one)
    cache.length = end


class Blocks:
    """The forwards of one draft: the first block, then batches of further blocks.

    Rows are numbered from the first block's first position; those of block b begin at K * b. A
    row sees the prefix, its own block up to itself, and the rows that the block's start saw. The
    first forward also runs the prefix rows that are not in the cache; the cache's context stays
    the same.
    """

    def __init__(
        self,
        drafter: BlockModel,
        cache: DraftCache,
        conditions: torch.Tensor,
        embeddings: torch.Tensor,
    ) -> None:
        """conditions, embeddings: [R, hidden] of prefix rows, that of the bonus token last"""
        self._drafter, self._cache = drafter, cache
        self._conditions, self._embeddings = conditions, embeddings
        self._length = drafter.model.config.block_length
        self._hidden = conditions[:0]
        self._visible = np.zeros((0, 0), np.bool_)
        self._positions = np.zeros(0, np.int64)
        self.logits = conditions[:0]  # of the last forward's block rows, [S * K, draft_vocab]
        self.ranks: torch.Tensor | None = None  # and its buckets, [S * K, 4]

    def first(self) -> NDArray[np.int64]:
        """Run the first block; returns its rows [1, K]."""
        model, cache, length = self._drafter.model, self._cache, self._length
        fused = model.inputs(self._conditions, self._embeddings)  # [R, K, hidden]
        rows = torch.cat((fused[:-1, 0], fused[-1]))
        prefix, device = len(fused) - 1, rows.device
        cache.make_room(len(rows))
        positions = torch.arange(cache.length, cache.length + len(rows), device=device)
        before = torch.arange(len(rows), device=device)
        before[prefix + 1 :] -= 1
        visible = torch.ones(len(rows), len(rows), dtype=torch.bool, device=device).tril()
        ends = (0, cache.length + len(rows))
        seen = span(model.config.shape, ends, visible, rows.dtype)
        rope = self._drafter.rotary(positions, rows.dtype)
        self._hidden = model(rows, before, rope, cache, seen)[prefix:]
        self._visible = np.tri(length, dtype=np.bool_)
        self._positions = cache.length + prefix + np.arange(length)
        return self._read(self._hidden)

    def more(self, starts: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Run a block from each of these rows [S] and the tokens they proposed; rows [S, K]."""
        model, cache, length = self._drafter.model, self._cache, self._length
        blocks, drafted = len(starts), len(self._hidden)
        device = self._hidden.device
        conditions = self._hidden[torch.from_numpy(starts).to(device)]
        rows = model.inputs(conditions, self._drafter.embed(tokens)).flatten(0, 1)
        offsets = np.arange(length)
        before = np.maximum(offsets - 1, 0) + length * np.arange(blocks)[:, None]
        positions = self._positions[starts][:, None] + 1 + offsets
        within = np.kron(np.eye(blocks, dtype=np.bool_), np.tri(length, dtype=np.bool_))
        path = np.repeat(self._visible[starts], length, axis=0)
        visible = np.concatenate((path, within), axis=1)
        # After the prefix, whose last row is the first block's first.
        pending = len(self._conditions) - 1
        cache.make_room(pending + drafted + len(rows))
        ends = (0, cache.length + pending + drafted + len(rows))
        mask = torch.from_numpy(visible).to(device)
        seen = span(model.config.shape, ends, mask, rows.dtype)
        rope = self._drafter.rotary(torch.from_numpy(positions.ravel()).to(device), rows.dtype)
        index = torch.from_numpy(before.ravel()).to(device)
        hidden = model(rows, index, rope, cache, seen)
        self._hidden = torch.cat((self._hidden, hidden))
        self._visible = np.concatenate((np.pad(self._visible, ((0, 0), (0, len(rows)))), visible))
        self._positions = np.concatenate((self._positions, positions.ravel()))
        return self._read(hidden)

    def _read(self, hidden: torch.Tensor) -> NDArray[np.int64]:
        self.logits, self.ranks = self._drafter.model.read(hidden)
        first = len(self._hidden) - len(hidden)
        return np.arange(first, len(self._hidden)).reshape(-1, self._length)
