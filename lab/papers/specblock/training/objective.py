"""The training objective of SpecBlock drafters (Shi et al., section 3.3).

All first blocks of a text are one forward, each further round of blocks another. They run the
drafter's modules over a cache that stays in the autograd graph. README.md has the choices made
where the paper leaves one open. `measure_trees` drafts the trees of held-out texts as in decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch.nn import functional

from costmodel.errors import InputError
from costmodel.statistics import Ints
from decoder.drafters.base import DraftRequest
from decoder.drafters.blocks import Rotary
from decoder.model.loading import LoadedModel
from decoder.model.making import make_target
from decoder.tree.draft_tree import CandidateTree, best_first
from decoder.tree.growth import TopPaths
from lab.papers.specblock.cache import DraftCache, span
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import BUCKETS, SpecBlockModel, buckets_of, ranks_of
from lab.training.features import Example, FrozenHead
from lab.training.loop import accepted_depth


class GraphCache(DraftCache):
    """A draft cache with gradients, to which rows are only appended.

    Rows are float32, as queries are: under autocast keys and values have different dtypes.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(layers)]

    def make_room(self, rows: int) -> None:
        return

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._parts[layer].append((key.float(), value.float()))

    def read(self, layer: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = zip(*self._parts[layer], strict=True)
        return (
            torch.cat(keys, dim=1)[None, :, first:end],
            torch.cat(values, dim=1)[None, :, first:end],
        )


@dataclass(frozen=True, slots=True)
class Passage:
    """A text as the drafter reads it, on the drafter's device.

    tokens      int64 [L]
    features    [L, 3 * hidden]
    embeddings  [L, hidden]
    """

    tokens: torch.Tensor
    features: torch.Tensor
    embeddings: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftedBlocks:
    """One block from every anchor.

    hidden  h^(L), [A, K, hidden]
    after   int64 [A]: position k = 1..K proposes the text's token at index after + k
    """

    hidden: torch.Tensor
    after: torch.Tensor


def run_blocks(
    model: SpecBlockModel,
    rotary: Rotary,
    passage: Passage,
    anchors: torch.Tensor,
    cuts: torch.Tensor,
    chained: torch.Tensor | None = None,
) -> list[DraftedBlocks]:
    """A first block from each anchor, and chains of blocks behind some of them.

    anchors  int64 [A]: tokens t of the text, whose first block proposes the tokens behind t + 1
    cuts     int64 [M - 1, C], 1..K: the position of the last block at which the next starts
    chained  int64 [C]: places among the anchors of those with a chain; None for all
    A start past the text's end repeats its last token; nothing there is supervised.
    """
    first, count = int(anchors.min()), int(anchors.max()) + 1
    length, cache = model.config.block_length, GraphCache(model.config.layers)
    conditions = model.condition(passage.features[:count])
    embeddings = passage.embeddings[1 : count + 1]
    hidden = model.first_blocks(rotary, cache, conditions, embeddings, count - first)
    cache.length = count * length
    drafted = [DraftedBlocks(hidden[anchors - first], anchors + 1)]
    if chained is None:
        chained = torch.arange(len(anchors), device=anchors.device)
    # The rows that a chain's newest block sees: those of earlier tokens, and its own blocks'.
    own = anchors[chained, None] * length + torch.arange(length, device=anchors.device)
    visible = torch.arange(cache.length, device=anchors.device) <= own[..., None]
    last = DraftedBlocks(drafted[0].hidden[chained], anchors[chained] + 1)
    rope = rotary(model.positions(anchors[chained]).flatten(), model.dtype)
    for cut in cuts:
        each, after = torch.arange(len(cut), device=cut.device), last.after + cut
        embeddings = passage.embeddings[after.clamp_max(len(passage.tokens) - 1)]
        rows = model.inputs(last.hidden[each, cut - 1], embeddings).flatten(0, 1)
        within = torch.block_diag(*[torch.ones(length, length).tril()] * len(cut)).bool()
        path = visible[each, cut - 1].repeat_interleave(length, dim=0)
        mask = torch.cat((path, within.to(cut.device)), dim=1)
        end = cache.length + len(rows)
        seen = span(model.config.shape, (0, end), mask, rows.dtype)
        hidden = model(rows, rope, cache, seen).unflatten(0, (-1, length))
        cache.length = end
        visible = mask.unflatten(0, (-1, length))
        last = DraftedBlocks(hidden, after)
        drafted.append(last)
    return drafted


STRIDE = 16  # tokens from one draft to the next


UNKNOWN = -1  # the draft id of a token that the drafter lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecBlockSettings:
    """The sizes of a new drafter, and the settings of its loss; small by default.

    The paper's are vocabulary=32000, from_scratch, blocks=3 and more anchors than a text has.

    vocabulary      size of the reduced vocabulary, which the texts' most frequent tokens make
    tokens          that vocabulary; empty for all of the target's tokens
    feature_layers  indices into `hidden_states`; None for EAGLE-3's low, mid and top
    tree            growth of its trees: the paper's or that of the authors' code
    branching       children at a position of each bucket; None for that growth's
    without         names of table 2's ablations: no-broadcast, no-shift, no-mask, no-rank-head
    own_head        whether to train the LM head too, whose rows are the target's at first
    from_scratch    whether layers and LM head are random at first and both trained, as in the
                    paper; otherwise the layers are copies of the target's last ones
    anchors         first blocks of one example that further blocks are chained to
    blocks          M, chained at uniformly drawn cuts
    rank_from_step  the first step at which the rank head is trained too
    """

    layers: Annotated[int, Field(ge=1, le=16)] = 2
    block_length: Annotated[int, Field(ge=2, le=64)] = 4
    vocabulary: PositiveInt = 8192
    tokens: Sequence[int] = ()
    feature_layers: tuple[NonNegativeInt, ...] | None = None
    tree: Literal["paper", "repository"] = "paper"
    branching: tuple[int, ...] | None = None
    without: frozenset[str] = frozenset()
    own_head: bool = False
    from_scratch: bool = False
    anchors: PositiveInt = 32
    blocks: PositiveInt = 2
    rank_from_step: NonNegativeInt = 2000


@dataclass(frozen=True, slots=True)
class Scored:
    """A round of blocks from A anchors with its labels.

    logits  [A, K, draft_vocab]
    ranks   [A, K, 4] bucket logits; None without a rank head
    wanted  [A, K, draft_vocab] the target's distribution p*
    ids     int64 [A, K] draft ids of y*; `UNKNOWN` for a token that the drafter lacks
    inside  bool [A, K] whether the text reaches the position
    """

    logits: torch.Tensor
    ranks: torch.Tensor | None
    wanted: torch.Tensor
    ids: torch.Tensor
    inside: torch.Tensor

    def matches(self) -> torch.Tensor:
        """Whether the most probable token is the target's, bool [A, K]."""
        return self.logits.argmax(-1) == self.ids


def valid_prefix(matches: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The mask m of equation (5), bool [A, K]: all earlier positions of the block were right."""
    right = torch.ones_like(matches)
    right[:, 1:] = matches[:, :-1].cumprod(dim=1).bool()
    return right & inside


def draft_losses(scored: Scored, mask: torch.Tensor) -> torch.Tensor:
    """Equation (6) with N_k = A, [K]; 0 for a position that no anchor reaches."""
    losses = -(scored.wanted * scored.logits.float().log_softmax(-1)).sum(-1)
    mask = mask & (scored.ids != UNKNOWN)
    # Not a product: masked losses may be infinite.
    sums = torch.where(mask, losses, 0.0).sum(0)
    return sums / len(mask)


def rank_labels(scored: Scored) -> torch.Tensor:
    """The bucket of y* within p, int64 [A, K]."""
    logits = scored.logits.detach().flatten(0, 1)
    return buckets_of(ranks_of(logits, scored.ids.flatten())).view_as(scored.ids)


@dataclass(slots=True)
class Measured:
    """Counts of blocks that are chained along texts, each from the end of the last.

    reached, matched  [M, K] positions whose earlier tokens were right, and those right too
    ranks             [4, 4] reached positions by the bucket of the target's token and the bucket
                      that the rank head gave
    """

    reached: torch.Tensor
    matched: torch.Tensor
    anchors: int = 0
    ranks: torch.Tensor = field(
        default_factory=lambda: torch.zeros(BUCKETS, BUCKETS, dtype=torch.int64)
    )

    def figures(self) -> dict[str, float]:
        """See `SpecBlockObjective.validate`."""
        figures = {
            f"alpha_{block + 1}_{position + 1}": float(self.matched[block, position] / count)
            for block, counts in enumerate(self.reached)
            for position, count in enumerate(counts)
            if count
        }
        if self.anchors:
            figures["chain"] = 1.0 + float(self.matched.sum() / self.anchors)
        if self.ranks.any():
            figures["rank_accuracy"] = float(self.ranks.trace() / self.ranks.sum())
        return figures


class SpecBlockObjective:
    """The loss of one text, with random anchors and cuts (an `Objective` of the loop)."""

    def __init__(
        self, target: LoadedModel, settings: SpecBlockSettings, model: SpecBlockModel
    ) -> None:
        self.model = model
        self.settings = settings
        config = model.config
        self.layers = config.features_of(target.architecture.layers)  # of the examples' features
        self._target, self._device = target, target.model.device
        self._embedding = target.model.get_input_embeddings()
        self._rotary = Rotary(model.config.shape, self._device)
        head = target.model.get_output_embeddings().weight
        self._wanted = FrozenHead(head[model.tokens])
        trained = settings.own_head or settings.from_scratch
        self._head = None if trained else FrozenHead(model.lm_head.weight)
        self._ids = torch.full((config.vocab,), UNKNOWN, device=self._device)
        self._ids[model.tokens] = torch.arange(config.draft_vocab, device=self._device)

    def loss(
        self, example: Example, generator: torch.Generator, step: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Equation (7) of one text, with a gradient, and figures to log.

        From `rank_from_step` on, when the trunk has settled, the rank head is trained too.
        Raises InputError for a text with nothing to draft.
        """
        anchors, chained = self._anchors(example, generator)
        if len(anchors) == 0:
            raise InputError("a text has fewer than two tokens behind its prompt")
        shape = (self.settings.blocks - 1, len(chained))
        length = self.model.config.block_length
        cuts = torch.randint(1, length + 1, shape, generator=generator, device=generator.device).to(
            anchors.device
        )
        settled = self.model.ranked or step >= self.settings.rank_from_step
        ranked = self.model.rank_head is not None and settled
        self.model.examples += torch.tensor([1, int(ranked)], device=self._device)
        rounds = self._rounds(example, anchors, cuts, chained)
        masks = [self._mask(scored) for scored in rounds]
        losses = [draft_losses(scored, mask) for scored, mask in zip(rounds, masks, strict=True)]
        total = torch.cat(losses).sum()
        # Sums of later positions grow as more of them are reached, so the first are logged.
        figures = {f"first_loss_{i}": float(loss[0].detach()) for i, loss in enumerate(losses, 1)}
        if ranked:
            rank_loss = self._rank_loss(rounds, masks)
            figures["rank_loss"] = float(rank_loss.detach())
            total = total + rank_loss
        return total, figures

    def validate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Acceptance along the greedy chain, where each block starts at the end of the last.

        alpha_m_k      share of matches at position k of block m after all before matched
                       (appendix C)
        chain          tokens a verification with this chain, bonus token included
        tree           the same with the tree that is drafted in decoding
        rank_accuracy  of the rank head at positions that are reached
        A figure without any position is left out.
        """
        tree = measure_trees(self._target, self.model, examples).tokens
        return self.measure(examples).figures() | ({} if tree is None else {"tree": tree})

    @torch.no_grad()
    def measure(self, examples: Sequence[Example]) -> Measured:
        """Matches and rank labels of the blocks that are chained along these texts."""
        length, blocks = self.model.config.block_length, self.settings.blocks
        measured = Measured(torch.zeros(blocks, length), torch.zeros(blocks, length))
        for example in examples:
            every, chained = self._anchors(example, None)
            if len(every) == 0:
                continue
            anchors = every[chained]
            cuts = torch.full((blocks - 1, len(anchors)), length, device=anchors.device)
            path = torch.ones(len(anchors), 1, dtype=torch.bool, device=anchors.device)
            measured.anchors += len(anchors)
            for number, scored in enumerate(self._rounds(example, anchors, cuts, None)):
                mask = valid_prefix(scored.matches(), scored.inside) & path
                hits = mask & scored.matches()
                measured.reached[number] += mask.sum(0).cpu()
                measured.matched[number] += hits.sum(0).cpu()
                path = hits[:, -1:]
                if scored.ranks is not None:
                    pairs = BUCKETS * rank_labels(scored) + scored.ranks.argmax(-1)
                    counts = pairs[mask].bincount(minlength=BUCKETS**2).cpu()
                    measured.ranks += counts.view(BUCKETS, BUCKETS)
        return measured

    def _rank_loss(self, rounds: list[Scored], masks: list[torch.Tensor]) -> torch.Tensor:
        chosen = [
            (scored.ranks[mask], rank_labels(scored)[mask])
            for scored, mask in zip(rounds, masks, strict=True)
            if scored.ranks is not None
        ]
        logits, labels = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        return functional.cross_entropy(logits.float(), labels)

    def _mask(self, scored: Scored) -> torch.Tensor:
        if "valid_prefix_mask" not in self.model.config.parts:
            return scored.inside
        return valid_prefix(scored.matches(), scored.inside)

    def _anchors(
        self, example: Example, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of a text to draft behind, ascending, and places of those with chains.

        The first draft of a text follows its first new token; the last has one token to propose.
        Chains are drawn, or evenly spaced without a generator.
        """
        first, end = max(example.prompt_tokens - 1, 0), len(example.tokens) - 2
        places, count = max(end - first, 0), self.settings.anchors
        if places <= count:
            chosen = torch.arange(places)
        elif generator is None:
            chosen = torch.arange(count) * places // count
        else:
            drawn = torch.randperm(places, generator=generator, device=generator.device)
            chosen = drawn[:count].sort().values
        return torch.arange(first, first + places, device=self._device), chosen.to(self._device)

    def _rounds(
        self,
        example: Example,
        anchors: torch.Tensor,
        cuts: torch.Tensor,
        chained: torch.Tensor | None,
    ) -> list[Scored]:
        tokens = example.tokens.to(self._device)
        with torch.no_grad():
            embeddings = self._embedding(tokens)
        passage = Passage(tokens, self._plain(example.features), self._plain(embeddings))
        drafted = run_blocks(self.model, self._rotary, passage, anchors, cuts, chained)
        final = self._plain(example.final)
        return [self._score(block, tokens, final) for block in drafted]

    def _score(self, block: DraftedBlocks, tokens: torch.Tensor, final: torch.Tensor) -> Scored:
        length = block.hidden.shape[1]
        index = block.after[:, None] + torch.arange(1, length + 1, device=tokens.device)
        inside = index < len(tokens)
        index = index.clamp_max(len(tokens) - 1)
        logits, ranks = self.model.read(block.hidden.flatten(0, 1), self._head)
        with torch.no_grad():
            wanted = self._wanted(final[index - 1]).float().softmax(-1)
        return Scored(
            logits.unflatten(0, inside.shape),
            None if ranks is None else ranks.unflatten(0, inside.shape),
            wanted,
            torch.where(inside, self._ids[tokens[index]], UNKNOWN),
            inside,
        )

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in float32 on the device, copied if autograd could not keep it."""
        moved = tensor.to(self._device, torch.float32)
        return moved.clone() if moved.is_inference() else moved


@dataclass(slots=True)
class Trees:
    """The trees that were drafted along texts, as in decoding.

    accepted          tokens of all of them, bonus tokens left out
    reached, matched  [depths] positions of the greedy chain whose earlier tokens were right, and
                      those that were right too
    """

    reached: Ints
    matched: Ints
    accepted: int = 0
    drafts: int = 0

    @property
    def tokens(self) -> float | None:
        """Tokens a verification with the whole tree, bonus token included; None without a draft."""
        return 1.0 + self.accepted / self.drafts if self.drafts else None

    def follow(self, tree: CandidateTree, truth: Sequence[int]) -> None:
        """Count the greedy chain: from node to node, the most probable child."""
        row = 0
        for place, token in enumerate(truth[: len(self.reached)]):
            children = np.flatnonzero(tree.parents == row)
            if len(children) == 0:
                break
            best = children[tree.probabilities[children].argmax()]
            self.reached[place] += 1
            if tree.tokens[best] != token:
                break
            self.matched[place] += 1
            row = best + 1


def measure_trees(loaded: LoadedModel, model: SpecBlockModel, examples: Sequence[Example]) -> Trees:
    """The trees along these texts. A greedy text stands for the target: figures are decoding's."""
    drafter = SpecBlockDrafter(make_target(loaded, owned=False), model)
    nodes, width = drafter.growth.nodes, loaded.architecture.vocab
    request = DraftRequest(depth=drafter.max_depth, width=width, growth=TopPaths())
    trees = Trees(*np.zeros((2, drafter.max_depth), np.int64))
    for example in examples:
        tokens, at = example.tokens.cpu().numpy(), example.prompt_tokens
        session = drafter.start(tokens[:at], example.features[:at])
        while at < len(tokens) - 1:
            tree, truth = session.draft(tokens[: at + 1], request), tokens[at + 1 :].tolist()
            trees.follow(tree, truth)
            trees.accepted += accepted_depth(best_first(tree, nodes), truth)
            trees.drafts += 1
            emitted = tokens[at + 1 : at + 1 + STRIDE]
            session.observe(emitted.tolist(), example.features[at : at + len(emitted)])
            at += len(emitted)
    return trees
