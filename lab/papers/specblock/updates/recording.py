"""Recording of rejected positions while a drafter serves (SpecBlock, section 3.4).

At every rejected position verification has already given the target's token, its distribution,
and the drafter's probability of that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.acceptance.drawn import DrawnTree
from decoder.drafters.base import DraftRequest, DraftSession
from decoder.tree.draft_tree import CandidateTree, DraftTree, Lattice

Proposed = Lattice | CandidateTree | DrawnTree


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetResponse:
    """One text with its R positions at which a draft was rejected.

    tokens         int64 [L]: prompt and new tokens
    features       [L - 1, layers * hidden] of all tokens but the last, as the drafter reads them
    roots          int64 [R]: index of the bonus token that was the root of the draft
    rejected       int64 [R]: index of the target's token, which the draft lacked
    logits         [R, vocab] of the target for that token
    probabilities  float64 [R]: r, the drafter's for that token; 0 outside its candidates
    """

    tokens: torch.Tensor
    features: torch.Tensor | None
    roots: torch.Tensor
    rejected: torch.Tensor
    logits: torch.Tensor
    probabilities: NDArray[np.float64]

    @property
    def signal(self) -> float:
        """s of equation (8); a value that is not a probability counts as 0."""
        r = np.nan_to_num(self.probabilities, nan=0.0).clip(0.0, 1.0)
        return float((1.0 - r).sum())


@dataclass(frozen=True, slots=True)
class _Rejection:
    root: int
    position: int
    probability: float
    logits: torch.Tensor


class RecordingSession(DraftSession):
    """Drafts as the session it wraps, and records the target's response.

    prompt, features  those with which that session was started
    """

    def __init__(
        self, session: DraftSession, prompt: NDArray[np.int64], features: torch.Tensor | None
    ) -> None:
        self._session = session
        self._prompt = np.array(prompt)
        self._emitted: list[int] = []  # without the first new token, which no round emits
        self._features: list[torch.Tensor] = []
        self._rejections: list[_Rejection] = []
        self._proposed: Proposed | None = None
        self._logits: torch.Tensor | None = None
        self.rewinds = session.rewinds
        self._keep(features)

    def read_logits(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._session.read_logits(logits)

    def rewind(self, tokens: int) -> None:
        self._session.rewind(tokens)

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> Lattice | CandidateTree:
        self._proposed = candidates = self._session.draft(context, request)
        return candidates

    def draw(
        self,
        context: NDArray[np.int64],
        shape: DraftTree,
        temperature: float,
        generator: torch.Generator,
    ) -> DraftTree:
        drawn = self._session.draw(context, shape, temperature, generator)
        self._proposed = drawn if isinstance(drawn, DrawnTree) else None
        return drawn

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        root = len(self._prompt) + len(self._emitted)
        if self._proposed is not None and self._logits is not None:
            probability = rejected_probability(self._proposed, emitted)
            if probability is not None:
                self._rejections.append(
                    # A copy: the next forward may overwrite them.
                    _Rejection(root, root + len(emitted), probability, _plain(self._logits))
                )
        self._proposed = self._logits = None
        self._emitted.extend(emitted)
        self._keep(features)
        self._session.observe(emitted, features)

    def response(self, new_tokens: Sequence[int]) -> TargetResponse:
        """The record of the text with these new tokens, up to its end.

        Raises InputError if they are of another text.
        """
        emitted = list(new_tokens[1:])
        if not new_tokens or self._emitted[: len(emitted)] != emitted:
            raise InputError(
                "these tokens are not those of the text that was drafted last",
                hint="Finish each text before the next one begins.",
            )
        tokens = torch.from_numpy(np.concatenate((self._prompt, np.array(new_tokens))))
        within = [one for one in self._rejections if one.position < len(tokens)]
        rows = [one.logits for one in within]
        return TargetResponse(
            tokens=tokens,
            features=torch.cat(self._features)[: len(tokens) - 1] if self._features else None,
            roots=torch.tensor([one.root for one in within], dtype=torch.int64),
            rejected=torch.tensor([one.position for one in within], dtype=torch.int64),
            logits=torch.stack(rows) if rows else torch.empty(0, 0),
            probabilities=np.array([one.probability for one in within], dtype=np.float64),
        )

    def _keep(self, features: torch.Tensor | None) -> None:
        if features is not None:
            self._features.append(_plain(features))


def rejected_probability(proposed: Proposed, emitted: Sequence[int]) -> float | None:
    """r of the last emitted token; None if the drafter had no candidates at its position.

    If the policy left out the right candidate, r is the drafter's probability of it all the same,
    and the signal is small.
    """
    path, token = emitted[:-1], emitted[-1]
    if isinstance(proposed, Lattice):
        if len(path) >= len(proposed.tokens):
            return None
        if proposed.whole is not None:
            return float(proposed.whole[len(path), token])
        hits = proposed.tokens[len(path)] == token
        return float(proposed.probabilities[len(path)][hits].sum())
    row = 0
    for accepted in path:
        hits = np.flatnonzero((proposed.parents == row) & (proposed.tokens == accepted))
        if len(hits) == 0:
            return None
        row = int(hits[0]) + 1
    children = np.flatnonzero(proposed.parents == row)
    if len(children) == 0:
        return None
    if isinstance(proposed, DrawnTree):
        q = proposed.q[int(proposed.sources[row])]
        return float(q[token] / q.sum()) if token < len(q) else 0.0
    same = children[proposed.tokens[children] == token]
    return float(proposed.probabilities[same].sum())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that autograd can use, unlike a tensor of inference mode."""
    with torch.inference_mode(False):
        return tensor.clone()
