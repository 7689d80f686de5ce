"""The models of a benchmark, loaded once, and the arms made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from costmodel.profile.profile import Profile
from costmodel.profile.schema import DrafterSection
from decoder.drafters.base import Drafter
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.ensemble import EnsembleDrafter
from decoder.drafters.factory import load_drafter
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model.loading import LoadedModel, load_model
from decoder.model.making import make_target
from decoder.model.target import Target
from decoder.profiling.startup import CostSource, ProfileChoice
from decoder.text import end_tokens
from lab.bench.arms.base import ArmRunner
from lab.bench.arms.choice import ESTIMATORS, describe_drafters, public_name
from lab.bench.arms.given_text import GivenTextTarget, PlainTexts
from lab.bench.arms.peers import PeerArm, share_weights, tie_weights
from lab.bench.arms.tree_decoder import TreeArm
from lab.bench.environment import without_home
from lab.bench.record import Arm, Model
from lab.papers.specblock.updates.specblock import split_updater, updatable, updated


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """Options that all arms of this project's decoder share.

    seed  of sampling, and of the exploration of drafters that learn
    """

    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = False  # no token ends a text
    same_text: bool = False  # every arm writes the text of plain decoding
    by_round: bool = False  # arms decode a prompt together, each with its own cache
    profile: ProfileChoice = field(default_factory=ProfileChoice)


class ArmBuilder:
    """The target's weights, shared by all arms, and the drafters.

    Peers get their own modules around the same weights. A drafter that reads hidden states gets
    its own `Target` around the same model, so that no other arm pays for them. An arm whose
    drafter learns has its own copy of it.
    """

    def __init__(
        self, loaded: LoadedModel, drafters: dict[str, str], options: DecodingOptions
    ) -> None:
        """drafters  short name by the name that `--drafter` takes"""
        self.loaded = loaded
        if options.ignore_eos:
            loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = None
        self.ends = end_tokens(loaded.model)
        # Before the target changes its modules.
        self._peer_model = share_weights(loaded.model, self.ends)
        self._options = options
        self.target = make_target(loaded)
        self._names = {label: name for name, label in drafters.items()}
        self._checkpoints: dict[str, tuple[Target, Drafter]] = {}
        for label, name in self._names.items():
            if name != NgramDrafter.name:
                target = make_target(loaded)
                base, updater = split_updater(name)
                drafter = load_drafter(base, target)
                drafter = updatable(drafter, name) if updater else drafter
                self._checkpoints[label] = (target, drafter)
        tie_weights(self._peer_model, loaded.model)  # fused layers have moved theirs
        self.encoder = TreeDecoder(self.target, policy="plain", drafter="ngram")
        self._texts = PlainTexts(self.encoder) if options.same_text else None
        self.cost_sources: list[CostSource] = []
        self._drafts: dict[str, DrafterSection] = {}  # each timed or read once for all arms
        self._assistants: dict[str, Any] = {}

    @property
    def causal_drafters(self) -> tuple[str, ...]:
        """Labels of the drafters that are causal language models, which peers can use too."""
        drafters = ((label, drafter) for label, (_, drafter) in self._checkpoints.items())
        return tuple(label for label, one in drafters if isinstance(one, CausalLMDrafter))

    @property
    def profile(self) -> tuple[Profile, str] | None:
        """The first profile that an arm reads, and the line that describes it; None without one."""
        for source in self.cost_sources:
            if source.profile is not None:
                return source.profile, source.line
        return None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The distinct warnings of the profile lookups."""
        warnings = (warning for source in self.cost_sources for warning in source.warnings)
        return tuple(dict.fromkeys(map(without_home, warnings)))

    @property
    def described(self) -> Model:
        """The target for a result, of a local folder only its name."""
        loaded = self.loaded
        return Model(
            name=loaded.name,
            hash=loaded.architecture.hash,
            source=public_name(loaded.source),
            weights=loaded.weights,
        )

    def drafters(self) -> tuple[Model, ...]:
        """The drafters for a result."""
        return describe_drafters(
            [(label, name, self._drafter(label)[1]) for label, name in self._names.items()]
        )

    def runners(self, arms: Sequence[Arm]) -> list[ArmRunner]:
        """Every arm ready to decode, its `arm` completed by estimator and cost line."""
        return [self._peer(arm) if arm.kind == "peer" else self._tree_arm(arm) for arm in arms]

    def _drafter(self, label: str | None) -> tuple[Target, Drafter]:
        """A drafter and its target (its cache) for one arm: shared weights, separate state."""
        if label in self._checkpoints:
            target, drafter = self._checkpoints[label]
            drafter = drafter.unlearnt() if isinstance(drafter, EnsembleDrafter) else drafter
        else:
            target = self.target
            drafter = load_drafter("ngram" if label is None else self._names[label], target)
        if self._options.by_round:
            target = make_target(self.loaded)
        return target, drafter

    def _tree_arm(self, arm: Arm) -> ArmRunner:
        target, drafter = self._drafter(arm.drafter)
        if arm.updates:
            random = np.random.default_rng(self._options.seed)
            drafter = updated(updatable(drafter, arm.name), arm.updates, random)
        profile = self.profile
        decoder = TreeDecoder(
            target if self._texts is None else GivenTextTarget(target),
            drafter=drafter,
            policy=arm.policy,
            profile=replace(
                self._options.profile,
                estimator=arm.variant if arm.variant in ESTIMATORS else None,
                drafts=dict(self._drafts),
                probed=None if profile is None else profile[0],
            ),
        )
        source = decoder.cost_source
        if source is not None:
            self.cost_sources.append(source)
            draft = source.cost.cost.drafter
            if draft is not None:
                self._drafts[drafter.architecture_hash] = draft
            arm = replace(arm, estimator=source.cost.mode, cost=without_home(source.line))
        return TreeArm(arm, decoder, self._options.temperature, self._texts)

    def _peer(self, arm: Arm) -> ArmRunner:
        options: dict[str, Any] = dict(arm.options)
        model = self._peer_model
        if (attention := options.pop("attention", None)) is not None:
            model = share_weights(model, self.ends)
            model.set_attn_implementation(attention)
        if arm.drafter is not None:
            options["assistant_model"] = self._assistant(arm.drafter)
        return PeerArm(arm, model, self._options.temperature, options)

    def _assistant(self, label: str) -> Any:
        """A drafter for assisted generation, loaded again without this project's attention."""
        if label not in self._assistants:
            target, name = self.target, self._names[label]
            loaded = load_model(
                name, weights="pretrained", dtype=target.dtype, device=target.device
            )
            self._assistants[label] = loaded.model
        return self._assistants[label]
