"""The protocol of drafters, for those of the package and for a user's own.

A drafter proposes tokens after the text so far, and drafts one text in one session. Its own
`name`, `start` and `draft` are all that it must have:

    class Repeat(Drafter):
        name = "repeat"

        def start(self, prompt, features, logits=None):
            return RepeatSession()

    class RepeatSession(DraftSession):
        def draft(self, context, request):
            tokens = np.full((request.depth, 1), context[-1])
            return Lattice(tokens, np.full(tokens.shape, 0.5))

An object that is both is a drafter of one text at a time, whose `start` returns itself.
Whatever is drafted, the decoded text stays the target's; only the speed changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from costmodel.statistics import Ints
from decoder.tree.draft_tree import Candidates, DraftTree
from decoder.tree.growth import UNBOUNDED, Growth

# How a drafter serves sampled trees: not at all, for want of a q over the whole vocabulary;
# by `Lattice.whole`, its q at every position; or by `DraftSession.draw`, level by level.
Draws = Literal["never", "whole", "levels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The draft that one round asks for.

    depth        deepest position, 1 or more; the drafter may stop earlier
    width        K: the most candidates of a position that can end in the tree
    growth       the rule by which a drafter that goes level by level expands its tree
    temperature  of the drafter's softmax q: that of sampling, or 1 for greedy decoding
    whole        whether a lattice must have q over the whole vocabulary, for sampled trees
    """

    depth: int
    width: int
    growth: Growth
    temperature: float = 1.0
    whole: bool = False


class DraftSession(ABC):
    """The drafting of one text, round by round; only `draft` must be implemented.

    A round calls `draft` at most once (`draw` for sampled trees of a drafter with
    `draws = "levels"`), then `read_logits`, then `observe`, also without a draft. The target's
    next forward may overwrite the tensors handed over: copy what is kept.
    """

    rewinds: bool = False  # whether `rewind` is implemented

    @abstractmethod
    def draft(self, context: Ints, request: DraftRequest) -> Candidates:
        """Candidates for the tokens after `context`.

        context  int64 [tokens]: the text so far, the bonus token last
        Returns a `Lattice` of candidates by position [depth, K], a `CandidateTree` of candidates
        by path, or other `Candidates`. Calling it twice without `observe` gives the same ones.
        """

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """The end of a round, or of a plain step.

        emitted   tokens that the round added to the text: the accepted ones, then the new
                  bonus token
        features  [len(emitted), layers * hidden]: the target's hidden states of the rows that
                  were kept, which are the last bonus token and the accepted ones; None for a
                  drafter without feature layers
        """
        return None

    def read_logits(self, logits: torch.Tensor) -> None:
        """The target's logits [vocab] from which this round's new bonus token was picked."""
        return None

    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
    ) -> DraftTree:
        """A `DrawnTree` of this shape, its siblings drawn without replacement in row order.

        shape        its tokens do not count; children for which q has no token left are left
                     out, with all that hangs below them
        temperature  of q
        generator    the source of all randomness
        """
        raise NotImplementedError(f"{type(self).__name__} does not draw trees")

    def rewind(self, tokens: int) -> None:
        """Forget the text behind its first `tokens` tokens, so that a round can be timed again.

        The next call is `observe`, with the bonus token that follows them and the tokens after
        it. Implement it, and set `rewinds`, where a draft first takes in what was observed.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rewind")


class Drafter(ABC):
    """Proposes candidates for the tokens after the bonus token; one session for each text.

    name               what reports and profiles call it
    max_depth          gamma: the deepest position it drafts
    deepens            whether it drafts deeper where a growth rule has a larger depth
    feature_layers     indices into the target's hidden states that it reads (0: the
                       embedding), in the order of `features`; empty for none
    draws              how it serves sampled trees
    members            the drafters that it combines
    simulated          whether it stands for a drafter, so that its cost is kept in no profile
    architecture_hash  the key of its cost in a profile; by default the name of its class
    """

    name: str
    max_depth: int = 8
    deepens: bool = False
    feature_layers: tuple[int, ...] = ()
    draws: Draws = "never"
    members: tuple[Drafter, ...] = ()
    simulated: bool = False

    @cached_property
    def architecture_hash(self) -> str:
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def deepest(self, growth: Growth) -> int:
        """The deepest position that it drafts under a growth rule."""
        deeper = self.deepens and growth.max_depth < UNBOUNDED
        return max(self.max_depth, growth.max_depth) if deeper else self.max_depth

    @abstractmethod
    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> DraftSession:
        """The session of a new text, which begins with this prompt.

        prompt    int64 [tokens]
        features  [tokens, layers * hidden]: the target's hidden states of the prompt; None
                  for a drafter without feature layers
        logits    [vocab]: the target's at the prompt's last token, from which the first bonus
                  token was picked; None where no text is decoded, as when a draft is timed
        """
