"""The EAGLE-3 drafter: a tree grown level by level from the target's features (Li et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.acceptance.drawn_levels import draw_levels
from decoder.device import to_device
from decoder.drafters.base import DraftRequest, Draws
from decoder.drafters.blocks import Rotary
from decoder.drafters.checkpoint import checkpoint_folder, read_config
from decoder.drafters.eagle3_forward import (
    CapturedLevels,
    EagerForward,
    Forward,
    GraphedForward,
)
from decoder.drafters.eagle3_model import Eagle3Config, Eagle3Model, load_eagle3, token_ids
from decoder.drafters.topk import most_probable, softmax
from decoder.growth import Children, Frontier, grow
from decoder.target import Target
from decoder.tree import CandidateTree, DraftTree

# The published default: the root's children, then as many expansions, one forward each.
EXPANSIONS = 7
CHUNK_ROWS = 512  # of a prompt in one forward
WAITING_ROWS = 256  # features kept of plain rounds before they are made narrower


class Eagle3Drafter:
    """Drafts trees with one small layer of its own; the embedding is the target's.

    Takes a published checkpoint's folder or hub id, or a model that is already there.
    Raises InputError where the checkpoint is damaged or belongs to another target.
    """

    name = "eagle3"
    draws: Draws = "levels"
    max_depth = EXPANSIONS + 1

    def __init__(self, target: Target, source: str | Path | Eagle3Model) -> None:
        if isinstance(source, Eagle3Model):
            self.model = source
        else:
            folder = checkpoint_folder(source)
            like = torch.empty(0, dtype=target.dtype, device=target.device)
            self.model = load_eagle3(folder, read_config(folder), like)
        config = self.model.config
        check_fit(config, target)
        self.target = target
        self.rotary = Rotary(config.shape, target.device)
        # The hidden states that enter these layers.
        layers = target.architecture.layers
        self.feature_layers = (2, layers // 2, layers - 3)
        self.architecture_hash = config.hash()
        self.tokens = token_ids(self.model.d2t).cpu().numpy() if config.mapped else None
        self._captured: CapturedLevels | None = None

    def session(self) -> Eagle3Session:
        return Eagle3Session(self)

    def forward(self) -> Forward:
        """The passes over a new text; they are captured where the target's are."""
        capture = self.target.runtime.capture
        if capture is None:
            return EagerForward(self.model, self.target, self.rotary)
        if self._captured is None or self._captured.capture is not capture:
            self._captured = CapturedLevels(self.model, self.target, self.rotary, capture)
        return GraphedForward(self._captured)


class Eagle3Session:
    """One sequence: the stable cache of its context, and features that are not yet in it."""

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self._drafter = drafter
        self._forward = drafter.forward()
        self._waiting: list[torch.Tensor] = []  # as the target gives them
        self._narrow: list[torch.Tensor] = []  # of the drafter's width, before the others

    def start(self, prompt: NDArray[np.int64], features: torch.Tensor | None) -> None:
        """Begin with the prompt's features [tokens, 3 * hidden], the target's own.

        The row of the prompt's last token waits for the bonus token, which belongs to it.
        """
        self._forward.cut(0)
        self._waiting.clear()
        self._narrow.clear()
        self.observe(prompt.tolist(), features)
        self._take_in(prompt)

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> CandidateTree:
        """The tree that `request.growth` makes, with probabilities given the parent."""
        children = _BestChildren(self._tree(context), self._drafter.tokens, request.temperature)
        return grow(children, request.growth, min(request.depth, self._drafter.max_depth))

    def draw(
        self,
        context: NDArray[np.int64],
        shape: DraftTree,
        temperature: float,
        generator: torch.Generator,
    ) -> DraftTree:
        """A `DrawnTree` of this shape, drawn from q at this temperature level by level."""
        drafter = self._drafter
        vocab = drafter.target.architecture.vocab
        q = _Distributions(self._tree(context), drafter.tokens, vocab, temperature)
        return draw_levels(shape, q, generator, drafter.max_depth)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Keep the features of the rows that were committed; drafting takes them in."""
        if features is None:
            raise InputError("an EAGLE-3 drafter needs the target's features, and got none")
        self._waiting.append(features)
        if sum(len(rows) for rows in self._waiting) >= WAITING_ROWS:
            self._make_narrow()

    def rewind(self, tokens: int) -> None:
        """Forget the features behind the first tokens."""
        self._forward.cut(tokens)
        self._waiting.clear()
        self._narrow.clear()

    def _tree(self, context: NDArray[np.int64]) -> Forward:
        """A tree to grow behind the context, whose last token is the bonus."""
        self._take_in(context)
        if self._forward.length != len(context) - 1:
            raise InputError(
                f"the drafter has features of {self._forward.length} tokens and the context has "
                f"{len(context)}",
                hint="Every round must be observed, a plain step too.",
            )
        return self._forward

    @torch.inference_mode()
    def _make_narrow(self) -> None:
        if self._waiting:
            self._narrow.append(self._drafter.model.fc(torch.cat(self._waiting)))
            self._waiting.clear()

    @torch.inference_mode()
    def _take_in(self, context: NDArray[np.int64]) -> None:
        """Bring every row whose next token is known into the stable cache."""
        self._make_narrow()
        if not self._narrow:
            return
        waiting = torch.cat(self._narrow)
        known = self._forward.length
        rows = max(min(len(waiting), len(context) - 1 - known), 0)
        for first in range(0, rows, CHUNK_ROWS):
            chunk = waiting[first : min(first + CHUNK_ROWS, rows)]
            at = known + first + 1
            self._forward.extend(chunk, context[at : at + len(chunk)])
        self._narrow = [waiting[rows:]] if rows < len(waiting) else []


@dataclass(frozen=True, slots=True)
class _BestChildren:
    """The most probable children of each node, as target tokens."""

    tree: Forward
    tokens: NDArray[np.int64] | None
    temperature: float

    def root(self, width: int) -> Children:
        return self._best(self.tree.root(), width)

    def expand(self, frontier: Frontier, width: int) -> Children:
        return self._best(self.tree.expand(frontier), width)

    def _best(self, logits: torch.Tensor, width: int) -> Children:
        ids, probabilities = most_probable(softmax(logits, self.temperature), width)
        return ids if self.tokens is None else self.tokens[ids], probabilities


@dataclass(frozen=True, slots=True)
class _Distributions:
    """q over the target's vocabulary; zero where the drafter has no such token."""

    tree: Forward
    tokens: NDArray[np.int64] | None
    vocab: int
    temperature: float

    def root(self) -> torch.Tensor:
        return self._q(self.tree.root())

    def expand(self, frontier: Frontier) -> torch.Tensor:
        return self._q(self.tree.expand(frontier))

    def _q(self, logits: torch.Tensor) -> torch.Tensor:
        drafted = softmax(logits, self.temperature)
        if self.tokens is None:
            return drafted
        whole = drafted.new_zeros(len(drafted), self.vocab)
        whole.index_copy_(1, to_device(self.tokens, drafted.device), drafted)
        return whole


def check_fit(config: Eagle3Config, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    own = target.architecture
    found = {
        "target hidden size": (config.target_hidden, own.hidden),
        "vocabulary": (config.vocab, own.vocab),
    }
    problems = [
        f"its {what} is {drafted}, the target's is {real}"
        for what, (drafted, real) in found.items()
        if drafted != real
    ]
    if config.shape.hidden != own.hidden and not config.own_embedding:
        problems.append(
            f"it is {config.shape.hidden} wide and brings no embedding, and the target's is "
            f"{own.hidden} wide"
        )
    if own.layers < 3:
        problems.append(f"it reads the inputs of three layers, and the target has {own.layers}")
    if problems:
        raise InputError(
            f"the drafter does not fit {target.loaded.name}: {'; '.join(problems)}",
            hint="Use the drafter that was trained for this target.",
        )
