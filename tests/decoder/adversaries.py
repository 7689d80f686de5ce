"""Drafters that do everything wrong: whatever they propose, the output must not change."""

import numpy as np

from decoder.tree.draft_tree import CandidateTree, Lattice
from tests.decoder.models import LatticeDrafter

MASK = 96  # stands for a drafter's mask id: the last id of the vocabulary


class Knowing(LatticeDrafter):
    """A block drafter that may look up the target's true next tokens."""

    def __init__(self, truth, vocab, depth=5, width=4):
        super().__init__(vocab, depth, width)
        self._truth = np.asarray(truth, dtype=np.int64)

    def true_tokens(self, context, depth):
        """[depth] the target's next tokens, or any behind the end of what is known."""
        rest = self._truth[len(context) : len(context) + depth]
        return np.concatenate((rest, np.full(depth - len(rest), 1)))


class Right(Knowing):
    """Always right, among other candidates, and always sure."""

    def draft(self, context, request):
        depth = min(request.depth, self.max_depth)
        true = self.true_tokens(context, depth)[:, None]
        others = (true + np.arange(1, self._width)) % self._vocab
        chances = np.array([0.97] + [0.01] * (self._width - 1))
        return Lattice(np.hstack((true, others)), np.tile(chances, (depth, 1)))


class Wrong(Right):
    """Always wrong and always sure."""

    def draft(self, context, request):
        lattice = super().draft(context, request)
        true = lattice.tokens[:, :1]
        return Lattice((true + 1 + np.arange(self._width)) % self._vocab, lattice.probabilities)


class NoNumbers(Right):
    """Right tokens with probabilities that are none."""

    def draft(self, context, request):
        lattice = super().draft(context, request)
        return Lattice(lattice.tokens, np.full_like(lattice.probabilities, np.nan))


class Outside(Right):
    """The truth between tokens that the target does not have."""

    def draft(self, context, request):
        lattice = super().draft(context, request)
        tokens = lattice.tokens.copy()
        tokens[:, 1::2] = self._vocab + 5
        tokens[1::2, 2] = -1
        return Lattice(tokens, lattice.probabilities)


class Nothing(LatticeDrafter):
    """No candidates, in each of the ways to say so in turn."""

    def draft(self, context, request):
        nothing = (
            CandidateTree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)),
            Lattice(np.zeros((0, 3), np.int64), np.zeros((0, 3))),
            Lattice(np.zeros((4, 0), np.int64), np.zeros((4, 0))),
        )
        return nothing[len(context) % 3]


class BrokenTree(Knowing):
    """A path tree: the truth beside nodes that are none, each with the truth below it too."""

    def draft(self, context, request):
        depth = min(request.depth, self.max_depth)
        true = self.true_tokens(context, depth)
        tokens, parents, probabilities, trunk = [], [], [], 0
        for token in true:
            tokens += [token, self._vocab + 3, token, int(token)]
            probabilities += [0.9, 0.8, np.nan, -0.5]
            first = len(parents)
            parents += [trunk, trunk, first + 2, first + 3]
            trunk = first + 1
        return CandidateTree(np.array(tokens), np.array(parents), np.array(probabilities))


# Each takes the true text (prompt included) and the vocabulary.
ADVERSARIES = {
    "right": Right, "wrong": Wrong, "nan": NoNumbers, "outside": Outside,
    "nothing": lambda truth, vocab: Nothing(vocab), "broken tree": BrokenTree,
}  # fmt: skip
