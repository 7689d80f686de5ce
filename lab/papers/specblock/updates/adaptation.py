"""A drafter that is updated while it serves: copies, penalty and rollback (SpecBlock, 3.4, A.3).

`updates.bandit` decides when to update. README.md has the choices made where the paper leaves one
open.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from costmodel.errors import InputError
from costmodel.statistics import Array, Ints
from decoder.acceptance.drawn import DrawnTree
from decoder.device import synchronise
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.engine import Generation
from decoder.tree.draft_tree import CandidateTree, DraftTree, Lattice
from lab.papers.specblock.updates.bandit import Action, Decision, Query, Updater

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Redrafted:
    """A model's draft at the rejected positions of a response, with gradients.

    logs   [R, drafted] log-probabilities over the drafter's tokens
    extra  a further loss, summed over positions, such as a rank head's
    """

    logs: torch.Tensor
    extra: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """The settings of an update; the paper gives that of the penalty alone.

    kl_weight      lambda: weight of the penalty
    steps          optimiser steps, each over the whole buffer
    most_gradient  norm to which larger gradients are scaled down
    """

    kl_weight: float = 0.01
    learning_rate: float = 1e-4
    steps: int = 1
    most_gradient: float = 1.0


class AdaptiveDrafter(Drafter):
    """A drafter that is updated between texts, one at a time: call `finish` after every generation.

    Its weights change but not its cost, so a profile treats it as the drafter it wraps.
    """

    def __init__(
        self,
        drafter: Drafter,
        model: nn.Module,
        kind: Any,
        updater: Updater,
        settings: UpdateSettings = UpdateSettings(),
    ) -> None:
        """
        model  the drafter's module, whose weights serve
        kind   says what an update trains and drafts again, as `updates.specblock.SpecBlockKind`
        """
        self.name = f"{drafter.name}+adapt"
        self.architecture_hash = drafter.architecture_hash
        self.max_depth, self.feature_layers = drafter.max_depth, drafter.feature_layers
        self.draws = drafter.draws
        self.updates: list[tuple[Action, float]] = []  # each with its seconds
        self.rollbacks = 0
        self._drafter, self._serving = drafter, model
        self._updater = updater
        with torch.inference_mode(False):
            self._model = deepcopy(model).float().requires_grad_(False)
            first = deepcopy(self._model)
        self._trainer = Trainer(self._model, first, kind, settings)
        self._good = self._opening = self._now = _copy(self._model)
        self._buffers: dict[Action, list[TargetResponse]] = {}
        self._session: RecordingSession | None = None

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> RecordingSession:
        session = self._drafter.start(prompt, features, logits)
        self._session = RecordingSession(session, prompt, features)
        return self._session

    def finish(self, generation: Generation) -> Decision:
        """Learn from the text that was generated last, as the updater decides.

        Raises InputError if `generation` is of another text.
        """
        response = self._response(generation)
        stats = generation.stats
        decision = self._updater.after(
            Query(
                signal=response.signal,
                tokens=stats.new_tokens - 1,
                verifications=stats.rounds,
                seconds=stats.decode_s,
            )
        )
        if decision.good:
            self._good = self._opening
        if decision.rollback:
            self._roll_back()
        elif decision.action != "skip":
            self._buffers.setdefault(decision.action, []).append(response)
        if decision.train:
            self._update(decision.action)
        if decision.window:
            self._opening = self._now
        return decision

    def rehearse(self, generation: Generation) -> None:
        """Run each kind of update on a copy, so that one-time set-up is not timed later."""
        response = self._response(generation)
        with torch.inference_mode(False):
            copied = deepcopy(self._model)
        for action in get_args(Action):
            if action != "skip":
                self._trainer.like(copied).train(action, [response])

    def _response(self, generation: Generation) -> TargetResponse:
        if self._session is None:
            raise InputError("no text was drafted since the last one was finished")
        response = self._session.response(generation.token_ids)
        self._session = None
        return response

    def _update(self, action: Action) -> None:
        started_s = perf_counter()
        self._trainer.train(action, self._buffers.pop(action, []))
        self._now = _copy(self._model)
        _copy_into(self._now, self._serving)
        synchronise(next(self._serving.parameters()).device)  # so that its time counts here
        spent_s = perf_counter() - started_s
        self.updates.append((action, spent_s))
        self._updater.charge(spent_s)

    def _roll_back(self) -> None:
        self._now = self._good
        _copy_into(self._good, self._model)
        _copy_into(self._good, self._serving)
        self._trainer.forget()
        self._buffers.clear()
        self.rollbacks += 1


class Trainer:
    """Trains a model in place; `first` is the drafter before it served, theta_0."""

    def __init__(
        self, model: nn.Module, first: nn.Module, kind: Any, settings: UpdateSettings
    ) -> None:
        self._model, self._first, self._kind, self._settings = model, first, kind, settings
        self._optimisers: dict[Action, torch.optim.Optimizer] = {}

    def like(self, model: nn.Module) -> Trainer:
        """A trainer of another copy, with new optimisers."""
        return Trainer(model, self._first, self._kind, self._settings)

    def train(self, action: Action, responses: Sequence[TargetResponse]) -> None:
        """One update; none if nothing was rejected or the loss is not a number."""
        used = [response for response in responses if len(response.rejected)]
        if not used:
            return
        with torch.inference_mode(False), torch.enable_grad():
            weights = list(self._kind.parameters(self._model, action))
            for weight in weights:
                weight.requires_grad_(True)
            for _ in range(self._settings.steps):
                self._step(action, weights, used)
            self._model.requires_grad_(False)

    def forget(self) -> None:
        """Drop the optimisers."""
        self._optimisers.clear()

    def loss(self, responses: Sequence[TargetResponse]) -> torch.Tensor:
        """Loss and penalty, averaged over all rejected positions."""
        total = torch.zeros(())
        for response in responses:
            drafted = self._kind.redraft(self._model, response)
            with torch.no_grad():
                wanted = self._kind.wanted(response)
                before = self._kind.redraft(self._first, response).logs
            penalty = drafted.logs.exp() * (drafted.logs - before)
            rows = -(wanted * drafted.logs) + self._settings.kl_weight * penalty
            total = total.to(rows.device) + rows.sum()
            if drafted.extra is not None:
                total = total + drafted.extra
        return total / sum(len(response.rejected) for response in responses)

    def _step(
        self, action: Action, weights: Sequence[nn.Parameter], responses: Sequence[TargetResponse]
    ) -> None:
        settings = self._settings
        if action not in self._optimisers:
            self._optimisers[action] = torch.optim.Adam(weights, lr=settings.learning_rate)
        optimiser = self._optimisers[action]
        optimiser.zero_grad()
        loss = self.loss(responses)
        if not torch.isfinite(loss):
            return
        loss.backward()
        nn.utils.clip_grad_norm_(weights, settings.most_gradient)
        optimiser.step()


def _copy(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def _copy_into(state: State, model: nn.Module) -> None:
    """Copy weights into a model in place and in its dtype, so that captured graphs stay valid."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(state[name])


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
    probabilities: Array

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
    """Drafts as the session it wraps, and records the target's response."""

    def __init__(self, session: DraftSession, prompt: Ints, features: torch.Tensor | None) -> None:
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

    def draft(self, context: Ints, request: DraftRequest) -> Lattice | CandidateTree:
        self._proposed = candidates = self._session.draft(context, request)
        return candidates

    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
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
