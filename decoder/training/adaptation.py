"""Updates of a drafter while it serves: SpecBlock's two copies, penalty and rollback (3.4, A.3).

`decoder.training.bandit` says when; here is what an update is. Where the paper says nothing:

- Updates run between queries, and are copied to the serving weights at once: there is one
  stream, and their seconds count against the action that caused them.
- The training copy is float32 whatever serves. Each action has an optimiser of its own (Adam),
  a fresh one after a rollback, which takes the training copy back too.
- The loss of an update is the cross-entropy to the target's distribution over all rejected
  positions in the buffer (a forward Kullback-Leibler divergence but for a constant), plus what
  the drafter adds; the penalty KL(p_theta || p_theta_0) is over the same positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, get_args

import torch
from torch import nn

from costmodel.errors import InputError
from decoder.device import synchronise
from decoder.drafters.base import Drafter
from decoder.engine import Generation
from decoder.training.bandit import Action, Decision, Query, Updater
from decoder.training.recording import RecordingSession, Response

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Redrafted:
    """What a model drafts again at a response's rejected positions, with gradients.

    logs   [R, drafted] log-probabilities, over the tokens that the drafter knows
    extra  the sum over positions of what else an update minimises, as a rank head's loss
    """

    logs: torch.Tensor
    extra: torch.Tensor | None = None


class Adaptable(Protocol):
    """What an update needs to know of a kind of drafter."""

    def parameters(self, model: nn.Module, action: Action) -> Sequence[nn.Parameter]:
        """The weights that `heads` or `full` trains."""

    def redraft(self, model: nn.Module, response: Response) -> Redrafted:
        """The drafts of this model at the response's rejected positions."""

    def wanted(self, response: Response) -> torch.Tensor:
        """The target's distribution there, [R, drafted]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How an update is made; the paper gives the penalty alone.

    kl_weight      lambda, of the penalty
    steps          of the optimiser, over all of the buffer each
    most_gradient  the norm above which a gradient is scaled down
    """

    kl_weight: float = 0.01
    learning_rate: float = 1e-4
    steps: int = 1
    most_gradient: float = 1.0


class AdaptiveDrafter:
    """A drafter that is updated between texts; one text at a time.

    After every generation, `finish` tells it what came out:

        decoder = TreeDecoder(target, drafter=adaptive)
        generation = decoder.generate(prompt)
        adaptive.finish(generation)

    Its weights change, not what they cost, so that name aside it is the drafter it wraps.
    """

    def __init__(
        self,
        drafter: Drafter,
        model: nn.Module,
        kind: Adaptable,
        updater: Updater,
        settings: UpdateSettings | None = None,
    ) -> None:
        """model: the drafter's own module, whose weights serve"""
        self.name = f"{drafter.name}+adapt"
        self.architecture_hash = drafter.architecture_hash
        self.max_depth, self.feature_layers = drafter.max_depth, drafter.feature_layers
        self.draws = drafter.draws
        self.updates: list[tuple[Action, float]] = []  # each with its seconds
        self.rollbacks = 0
        self._drafter, self._serving = drafter, model
        self._updater, self._settings = updater, settings or UpdateSettings()
        with torch.inference_mode(False):
            self._model = deepcopy(model).float().requires_grad_(False)
            first = deepcopy(self._model)
        self._trainer = Trainer(self._model, first, kind, self._settings)
        self._good = self._opening = self._now = _copy(self._model)
        self._buffers: dict[Action, list[Response]] = {}
        self._session: RecordingSession | None = None

    def session(self) -> RecordingSession:
        self._session = RecordingSession(self._drafter.session())
        return self._session

    def finish(self, generation: Generation) -> Decision:
        """Learn from the text that was generated last, as the updater decides.

        Raises InputError where it is another text.
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
        """Try each kind of update on the text that was generated last, and keep nothing of it.

        What torch sets up once is then no part of the first update that counts.
        """
        response = self._response(generation)
        with torch.inference_mode(False):
            spare = deepcopy(self._model)
        for action in get_args(Action):
            if action != "skip":
                self._trainer.like(spare).train(action, [response])

    def _response(self, generation: Generation) -> Response:
        if self._session is None:
            raise InputError("no text was drafted since the last one was finished")
        response = self._session.response(generation.token_ids)
        self._session = None
        return response

    def _update(self, action: Action) -> None:
        started_s = perf_counter()
        self._trainer.train(action, self._buffers.pop(action, []))
        self._now = _copy(self._model)
        _give(self._now, self._serving)
        synchronise(next(self._serving.parameters()).device)  # else the next text would pay
        spent_s = perf_counter() - started_s
        self.updates.append((action, spent_s))
        self._updater.charge(spent_s)

    def _roll_back(self) -> None:
        self._now = self._good
        _give(self._good, self._model)
        _give(self._good, self._serving)
        self._trainer.forget()
        self._buffers.clear()
        self.rollbacks += 1


class Trainer:
    """Steps of a model in place.

    first  the drafter as it was before it served, theta_0
    """

    def __init__(
        self, model: nn.Module, first: nn.Module, kind: Adaptable, settings: UpdateSettings
    ) -> None:
        self._model, self._first, self._kind, self._settings = model, first, kind, settings
        self._optimisers: dict[Action, torch.optim.Optimizer] = {}

    def like(self, model: nn.Module) -> Trainer:
        """A trainer of another copy, with optimisers of its own."""
        return Trainer(model, self._first, self._kind, self._settings)

    def train(self, action: Action, responses: Sequence[Response]) -> None:
        """One update; none where nothing was rejected or the loss is no number."""
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
        """Begin with new optimisers."""
        self._optimisers.clear()

    def loss(self, responses: Sequence[Response]) -> torch.Tensor:
        """The mean over all rejected positions of loss and penalty."""
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
        self, action: Action, weights: Sequence[nn.Parameter], responses: Sequence[Response]
    ) -> None:
        own = self._settings
        if action not in self._optimisers:
            self._optimisers[action] = torch.optim.Adam(weights, lr=own.learning_rate)
        optimiser = self._optimisers[action]
        optimiser.zero_grad()
        loss = self.loss(responses)
        if not torch.isfinite(loss):
            return
        loss.backward()
        nn.utils.clip_grad_norm_(weights, own.most_gradient)
        optimiser.step()


def _copy(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def _give(state: State, model: nn.Module) -> None:
    """Put weights into a model in place, in its own dtype: captured graphs stay valid."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(state[name])
