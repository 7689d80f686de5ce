"""Loads the models of a benchmark once and makes its arms of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from costmodel.profile import Profile
from costmodel.stages import DrafterSection
from decoder.drafters.autoregressive import AutoregressiveDrafter
from decoder.drafters.base import Drafter
from decoder.drafters.combined import CombinedDrafter
from decoder.drafters.factory import NAMED, load_drafter
from decoder.engine import TreeDecoder
from decoder.loading import LoadedModel, load_model
from decoder.policies.dynatree import DynaTree, HistorySettings
from decoder.runtime.base import RuntimeChoice
from decoder.sequence import end_tokens
from decoder.startup import CostSource, ProfileChoice
from decoder.target import Target
from decoder.training.updates import split_updater, updatable, updated
from profiler.bench.arms import ESTIMATORS, NO_HISTORY
from profiler.bench.contender import Contender
from profiler.bench.drafters import describe_drafters, public_name
from profiler.bench.environment import without_home
from profiler.bench.forced import ForcedTarget, PlainTexts
from profiler.bench.ours import OurContender
from profiler.bench.peers import PeerContender, share_weights, tie_weights
from profiler.bench.record import Arm, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderChoice:
    """How our arms are set up, beside policy and drafter."""

    runtime: RuntimeChoice = "auto"
    temperature: float = 0.0
    max_nodes: int | None = None
    acceptance: str = "auto"
    stage_times: bool = False
    same_text: bool = False  # whether every arm writes the text of plain decoding
    by_round: bool = False  # whether arms decode a prompt together, each with a cache of its own
    profile: ProfileChoice = field(default_factory=ProfileChoice)


class Lineup:
    """One target's weights, shared by all arms, and the drafters.

    Peers get modules of their own around the same weights (`share_weights`). A drafter that
    reads hidden states gets a `Target` of its own around the same model, so that no other arm
    pays for them. An arm whose drafter is updated has a copy of its own.
    """

    def __init__(
        self, loaded: LoadedModel, drafters: dict[str, str], choice: DecoderChoice, seed: int = 0
    ) -> None:
        """
        drafters  what `--drafter` takes, and a short name for each
        seed      of what drafters that are updated explore
        """
        self.loaded = loaded
        self.ends = end_tokens(loaded.model)
        self._peer_model = share_weights(loaded.model, self.ends)  # before ours is changed
        self._choice, self._seed = choice, seed
        self.target = Target(loaded, runtime=choice.runtime)
        self._names = {label: name for name, label in drafters.items()}
        self._checkpoints: dict[str, tuple[Target, Drafter]] = {}
        for label, name in self._names.items():
            if name not in NAMED:
                own = Target(loaded, runtime=choice.runtime)
                base, how = split_updater(name)
                drafter = load_drafter(base, own)
                self._checkpoints[label] = (own, updatable(drafter, name) if how else drafter)
        tie_weights(self._peer_model, loaded.model)  # fused layers have joined theirs
        self.encoder = TreeDecoder(self.target, policy="plain", drafter="ngram")
        self._texts = PlainTexts(self.encoder) if choice.same_text else None
        self.cost_sources: list[CostSource] = []
        self._drafts: dict[str, DrafterSection] = {}  # timed or read, each once for all arms
        self._assistants: dict[str, Any] = {}

    @property
    def causal_drafters(self) -> tuple[str, ...]:
        """Labels of the drafters that are language models, which transformers can use too."""
        return tuple(
            label
            for label, (_, drafter) in self._checkpoints.items()
            if isinstance(drafter, AutoregressiveDrafter)
        )

    @property
    def profile(self) -> tuple[Profile, str] | None:
        """The first profile that an arm reads, and the line that says where it lies."""
        for source in self.cost_sources:
            if source.profile is not None:
                return source.profile, source.line
        return None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the lookup of profiles said, each once."""
        found = (
            without_home(warning) for source in self.cost_sources for warning in source.warnings
        )
        return tuple(dict.fromkeys(found))

    @property
    def described(self) -> Model:
        """The target as a result names it; of a local folder only its name."""
        loaded = self.loaded
        return Model(
            name=loaded.name,
            hash=loaded.architecture.hash,
            source=public_name(loaded.source),
            weights=loaded.weights,
        )

    def drafters(self) -> tuple[Model, ...]:
        """The drafters as a result names them."""
        return describe_drafters(
            [(label, name, self._drafter(label)[1]) for label, name in self._names.items()]
        )

    def contenders(self, arms: Sequence[Arm]) -> list[Contender]:
        """Every arm ready to decode; what is known only now is added to its `arm`."""
        return [self._peer(arm) if arm.kind == "peer" else self._ours(arm) for arm in arms]

    def _drafter(self, label: str | None) -> tuple[Target, Drafter]:
        """As checkpoint or name say: its weights are shared, what it learns is an arm's own.

        Where arms decode together, each has a target of its own, and so a cache.
        """
        if label in self._checkpoints:
            target, drafter = self._checkpoints[label]
            drafter = drafter.unlearnt() if isinstance(drafter, CombinedDrafter) else drafter
        else:
            target = self.target
            drafter = load_drafter("ngram" if label is None else self._names[label], target)
        if self._choice.by_round:
            target = Target(self.loaded, runtime=self._choice.runtime)
        return target, drafter

    def _ours(self, arm: Arm) -> Contender:
        choice = self._choice
        target, drafter = self._drafter(arm.drafter)
        if arm.updates:
            random = np.random.default_rng(self._seed)
            drafter = updated(updatable(drafter, arm.name), arm.updates, random)
        mode = arm.variant if arm.variant in ESTIMATORS else choice.profile.estimator
        known = self.profile
        decoder = TreeDecoder(
            target if self._texts is None else ForcedTarget(target),
            drafter=drafter,
            policy=arm.policy,
            max_nodes=choice.max_nodes,
            acceptance=choice.acceptance,
            profile=replace(
                choice.profile,
                estimator=mode,
                drafts=dict(self._drafts),
                probed=None if known is None else known[0],
            ),
            stage_times=choice.stage_times,
        )
        if arm.variant == NO_HISTORY:
            still = HistorySettings(depth_step=0.0, sure_step=0.0)
            decoder.policy = DynaTree(decoder.policy.max_nodes, still)
        source = decoder.cost_source
        if source is not None:
            self.cost_sources.append(source)
            draft = source.cost.cost.drafter
            if draft is not None:
                self._drafts[drafter.architecture_hash] = draft
            arm = replace(arm, estimator=source.cost.mode, cost=without_home(source.line))
        return OurContender(arm, decoder, choice.temperature, self._texts)

    def _peer(self, arm: Arm) -> Contender:
        options: dict[str, Any] = dict(arm.options)
        if arm.drafter is not None:
            options["assistant_model"] = self._assistant(arm.drafter)
        return PeerContender(arm, self._peer_model, self._choice.temperature, options)

    def _assistant(self, label: str) -> Any:
        """A drafter as transformers' assistant: loaded again, as ours has our attention."""
        if label not in self._assistants:
            loaded = load_model(
                self._names[label],
                weights="pretrained",
                dtype=self.target.dtype,
                device=self.target.device,
            )
            self._assistants[label] = loaded.model
        return self._assistants[label]
