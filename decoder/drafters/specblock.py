"""The SpecBlock drafter: a tree of a few blocks of dependent positions (Shi et al., 2026).

One forward a block round, M in all. Trees have the shape that the rank head gives them, whatever
rule of growth a policy has, and the policy verifies as much of them as pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.acceptance.drawn_levels import draw_levels
from decoder.drafters.base import DraftRequest, Draws
from decoder.drafters.blocks import DraftCache, Rotary
from decoder.drafters.checkpoint import checkpoint_folder, read_config
from decoder.drafters.specblock_model import SpecBlockConfig, SpecBlockModel, load_specblock
from decoder.drafters.specblock_passes import Blocks, add_prefix
from decoder.drafters.specblock_tree import UNIFORM_WIDTH, BlockGrowth, BlockTree, uniform
from decoder.drafters.topk import softmax
from decoder.growth import Frontier
from decoder.target import Target
from decoder.tree import CandidateTree, DraftTree

CHUNK_ROWS = 512  # of a prompt in one forward
WAITING_ROWS = 256  # features kept of plain rounds before they are made narrower


class SpecBlockDrafter:
    """Drafts trees of blocks; the embedding is the target's, and usually the head's rows too.

    Takes a checkpoint's folder or hub id, or a model that is already there.
    Raises InputError where the checkpoint is damaged or belongs to another target.
    """

    draws: Draws = "levels"

    def __init__(
        self,
        target: Target,
        source: str | Path | SpecBlockModel,
        growth: BlockGrowth | None = None,
    ) -> None:
        """growth: None for the checkpoint's branching, two blocks and 60 nodes."""
        if isinstance(source, SpecBlockModel):
            self.model = source
        else:
            folder = checkpoint_folder(source)
            like = torch.empty(0, dtype=target.dtype, device=target.device)
            head = target.model.get_output_embeddings().weight
            self.model = load_specblock(folder, read_config(folder), like, head)
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

    def session(self) -> SpecBlockSession:
        return SpecBlockSession(self)

    def embed(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Embeddings [rows, hidden] of target tokens."""
        ids = torch.from_numpy(np.ascontiguousarray(tokens))
        return self.target.embed(ids.to(self.target.device))


class SpecBlockSession:
    """One sequence: the cache of its prefix, and rows that are not yet in it.

    The prefix's row t is of the features of token t and the embedding of token t + 1; the
    newest row waits for the bonus token and is the first position of the first block.
    """

    def __init__(self, drafter: SpecBlockDrafter) -> None:
        self._drafter = drafter
        config = drafter.model.config
        self._like = drafter.model.queries  # in training, of another type than the target
        self._cache = DraftCache(
            config.shape, config.layers, self._like.dtype, drafter.target.device
        )
        self._waiting: list[torch.Tensor] = []  # features as the target gives them
        self._conditions = torch.empty(0)  # those of the drafter's width before them
        self._drafted = 0  # rows behind the cache's length that the last draft wrote for good

    def start(self, prompt: NDArray[np.int64], features: torch.Tensor | None) -> None:
        """Begin with the prompt's features [tokens, 3 * hidden], the target's own."""
        self._cache.length = self._drafted = 0
        self._waiting.clear()
        self._conditions = torch.empty_like(self._like[:0])
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

        Within a block q does not depend on the tokens above; every node that has children at
        the end of one starts a block of its own, so there are as many forwards as blocks.
        """
        drafter = self._drafter
        q = _Distributions(drafter, self._blocks(context), temperature)
        return draw_levels(shape, q, generator, drafter.max_depth)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Keep the features of the rows that were committed; drafting takes them in."""
        if features is None:
            raise InputError("a SpecBlock drafter needs the target's features, and got none")
        # Rows that a draft has run are of committed tokens now, the bonus token's included.
        self._cache.length += self._drafted
        self._conditions = self._conditions[self._drafted :]
        self._drafted = 0
        self._waiting.append(features)
        if sum(len(rows) for rows in self._waiting) >= WAITING_ROWS:
            self._make_narrow()

    def _blocks(self, context: NDArray[np.int64]) -> Blocks:
        """The forwards of one draft behind the context, whose last token is the bonus."""
        self._take_in(context, most=CHUNK_ROWS)
        rows, known = len(self._conditions), self._cache.length + len(self._conditions)
        if rows == 0 or known != len(context) - 1:
            raise InputError(
                f"the drafter has features of {known} tokens and the context has {len(context)}",
                hint="Every round must be observed, a plain step too.",
            )
        self._drafted = rows
        drafter = self._drafter
        embeddings = drafter.embed(context[-rows:])
        return Blocks(drafter, self._cache, self._conditions, embeddings)

    @torch.inference_mode()
    def _make_narrow(self) -> None:
        if self._waiting:
            waiting = torch.cat(self._waiting).to(self._like.dtype)
            narrow = self._drafter.model.condition(waiting)
            self._conditions = torch.cat((self._conditions, narrow))
            self._waiting.clear()

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
        """What `BlockTree.attach` takes, of the forward that gave these rows [S, K].

        One copy from the device: ids and buckets are exact as float64 beside probabilities.
        """
        drafter = self._drafter
        logits, ranks = blocks.logits, blocks.ranks
        width = min(drafter.growth.widest, logits.shape[-1])
        best = softmax(logits, temperature).topk(width)
        parts = [best.indices.double(), best.values.double()]
        if ranks is not None:
            parts.append(ranks.argmax(-1, keepdim=True).double())
        found = torch.cat(parts, dim=-1).cpu().numpy().reshape(*rows.shape, -1)
        buckets = np.zeros(rows.shape) if ranks is None else found[..., 2 * width]
        ids = found[..., :width].astype(np.int64)
        return drafter.tokens[ids], found[..., width : 2 * width], buckets.astype(np.int64)


class _Distributions:
    """q over the target's vocabulary, level by level; zero where the drafter has no such token."""

    def __init__(self, drafter: SpecBlockDrafter, blocks: Blocks, temperature: float) -> None:
        self._drafter, self._blocks, self._temperature = drafter, blocks, temperature
        self._places = np.zeros(0, np.int64)  # rows that gave the last answer
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

    def _run(self, rows: NDArray[np.int64]) -> None:
        drafted = softmax(self._blocks.logits, self._temperature)
        self._rows = rows
        self._q = drafted.new_zeros(len(drafted), self._drafter.target.architecture.vocab)
        self._q[:, self._drafter.model.tokens] = drafted

    def _answer(self) -> torch.Tensor:
        places = torch.from_numpy(self._places - self._rows[0, 0])
        return self._q[places.to(self._q.device)]


def default_growth(model: SpecBlockModel) -> BlockGrowth:
    """The tree's form that a checkpoint asks for: the paper's, or without ranks a uniform one."""
    growth = BlockGrowth()
    if model.ranked:
        return replace(growth, branching=model.config.branching)
    return uniform(UNIFORM_WIDTH, growth)


def check_fit(config: SpecBlockConfig, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    own = target.architecture
    found = {
        "hidden size": (config.shape.hidden, own.hidden),
        "vocabulary": (config.vocab, own.vocab),
    }
    problems = [
        f"its {what} is {drafted}, the target's is {real}"
        for what, (drafted, real) in found.items()
        if drafted != real
    ]
    # The last layer's output is not among the features: transformers gives it behind the norm.
    deepest = max(config.feature_layers)
    if deepest > own.layers - 1:
        problems.append(f"it reads hidden state {deepest} of a target of {own.layers} layers")
    if problems:
        raise InputError(
            f"the drafter does not fit {target.loaded.name}: {'; '.join(problems)}",
            hint="Use the drafter that was trained for this target.",
        )
