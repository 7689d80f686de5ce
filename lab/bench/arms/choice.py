"""The arms and drafters of a benchmark by their names: policies, studies, and peers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from costmodel.errors import InputError
from decoder.drafters.base import Drafter
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import DFlashModel
from decoder.drafters.ensemble import EnsembleDrafter
from decoder.drafters.factory import BLOCK, JOINT
from decoder.model.runtime.linear import plain_state
from decoder.policies.base import DEFAULT_MAX_NODES
from decoder.policies.bastion import parse_policy
from lab.bench.arms.peers import LOOKUP_TOKENS
from lab.bench.record import PEER, PLAIN, Arm, Model
from lab.papers.blockpilot.drafter import BlockPilotDrafter
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import SpecBlockModel
from lab.papers.specblock.updates.specblock import ADAPT, split_updater


def drafter_labels(drafters: Sequence[str]) -> dict[str, str]:
    """A short name for each drafter: the last part of a folder or hub id, all parts of an ensemble.

    Folders of one name get the folder they lie in too: `full/drafter`. Raises InputError for
    no drafter, an empty name, and two drafters with one short name.
    """
    if not drafters:
        raise InputError("there is no drafter", hint="Give --drafter ngram, or leave it out.")
    paths = {Path(split[0]) for drafter in drafters for split in map(_split, _parts(drafter))}
    names = [path.name for path in paths]
    if not all(names):
        raise InputError("the drafter's name is empty", hint="Give ngram or a folder.")
    short = {path: path.name if names.count(path.name) == 1 else _longer(path) for path in paths}
    labels: dict[str, str] = {}
    for drafter in drafters:
        pairs = map(_split, _parts(drafter))
        label = JOINT.join(short[Path(base)] + option for base, option in pairs)
        if label in labels.values() or drafter in labels:
            raise InputError(
                f"two drafters are called '{label}'",
                hint="Give each once; rename one of two folders.",
            )
        labels[drafter] = label
    return labels


def _parts(drafter: str) -> list[str]:
    """The names of the drafters that are joined by `+`; of a single drafter its own."""
    if os.path.exists(drafter):
        return [drafter]
    return [part.strip() for part in drafter.split(JOINT)]


def _split(name: str) -> tuple[str, str]:
    """A drafter's name and its option, as `@block=4`; the option is empty without one."""
    match = BLOCK.fullmatch(name) or ADAPT.fullmatch(name)
    base = name if match is None else match[1]
    return base, name[len(base) :]


def _longer(path: Path) -> str:
    return "/".join(path.parts[bool(path.anchor) :][-2:])


def describe_drafters(loaded: Sequence[tuple[str, str, Drafter]]) -> tuple[Model, ...]:
    """The drafters for a result.

    loaded  (short name, name that `--drafter` takes, drafter without updates) of each
    """
    models: list[Model] = []
    for place, (label, name, drafter) in enumerate(loaded):
        earlier = (first for first, _, other in loaded[:place] if _same_weights(drafter, other))
        models.append(replace(_model(label, name, drafter), same_as=next(earlier, None)))
    return tuple(models)


def _model(label: str, name: str, drafter: Drafter) -> Model:
    block = isinstance(drafter, DFlashDrafter)
    return Model(
        name=label,
        hash=drafter.architecture_hash,
        source=public_name(name),
        kind=_kind(drafter),
        without=drafter.model.without if isinstance(drafter, SpecBlockDrafter) else (),
        block_size=drafter.block_size if block else None,
        updates=split_updater(name)[1],
    )


def _kind(drafter: Drafter) -> str:
    if isinstance(drafter, EnsembleDrafter | CausalLMDrafter):
        return "combined" if isinstance(drafter, EnsembleDrafter) else "causal"
    return re.split("[:@+]", drafter.name)[0]


def public_name(source: str) -> str:
    """A drafter's name for a result: of local folders only the last part of the path."""
    pairs = map(_split, _parts(source))
    return JOINT.join(
        (Path(base).name if os.path.isdir(base) else base) + option for base, option in pairs
    )


def _same_weights(drafter: Drafter, other: Drafter) -> bool:
    """Whether two block drafters have equal weights; BlockPilot's predictor is left out."""
    module, other_module = _module(drafter), _module(other)
    if module is None or other_module is None or module.config != other_module.config:
        return False
    first, second = plain_state(module), plain_state(other_module)
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def _module(drafter: Drafter) -> DFlashModel | SpecBlockModel | None:
    if isinstance(drafter, BlockPilotDrafter):
        return drafter.dflash.model
    return drafter.model if isinstance(drafter, DFlashDrafter | SpecBlockDrafter) else None


PEERS = ("plain", "prompt-lookup", "assisted")
DEFAULT_POLICIES = ("chain", "bastion")
SWEEP = (1, 3, 7, 15, 31)  # tree sizes; more come with --policy fixed:N
ESTIMATORS = ("static", "ema", "ema+calib")
_SHAPES = ("beam:4x15", "fixed:60")  # as many nodes by beam search as best first


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmNames:
    """The arms that the command line names; `plan_arms` checks the names.

    policies   for all drafters; `fixed:59@DRAFTER` for that one alone, by its name or short name
    peers      None for plain and prompt lookup, and assisted generation where a drafter is a
               causal language model
    attention  of transformers' plain decoding, an arm each; empty for that of the loaded model
    """

    policies: Sequence[str] = DEFAULT_POLICIES
    drafters: Sequence[str] = ("ngram",)
    studies: Sequence[str] = ()
    peers: Sequence[str] | None = None
    attention: Sequence[str] = ()


def plan_arms(choice: ArmNames, *, causal_drafters: Iterable[str] = ()) -> tuple[Arm, ...]:
    """Plain decoding first, then all policies drafter by drafter, then the peers; each arm once.

    causal_drafters  labels of drafters that assisted generation can use
    Raises InputError for an unknown policy, and one for a drafter that is not there.
    """
    labels = drafter_labels(choice.drafters)
    partners = {policy.partition("@")[2] for policy in choice.policies if "@" in policy}
    for partner in partners - {*labels, *labels.values()}:
        raise InputError(
            f"a policy is for the drafter '{partner}', which is not there",
            hint=f"Add it with --drafter, or name one of {', '.join(labels.values())}.",
        )
    arms: dict[str, Arm] = {}
    _add(arms, Arm(name=PLAIN, kind="plain", policy=PLAIN, studies=("policies",)))
    for drafter, label in labels.items():
        for named, variant, study in _policies(choice):
            policy, _, partner = named.partition("@")
            if policy != PLAIN and partner in ("", drafter, label):
                _add(arms, _policy_arm(policy, variant, label, study))
    causal = list(causal_drafters)
    peers = choice.peers
    if peers is None:
        peers = PEERS if causal else PEERS[:2]
    for peer in peers:
        for arm in _peer(peer, causal, choice.attention):
            _add(arms, arm)
    return tuple(arms.values())


def _policies(choice: ArmNames) -> list[tuple[str, str, str]]:
    """(policy, variant, study) of all arms of one drafter."""
    policies = [(policy, "", "policies") for policy in choice.policies]
    if "sweep" in choice.studies:
        policies += [(f"fixed:{nodes}", "", "sweep") for nodes in SWEEP]
    if "shape" in choice.studies:
        policies += [(policy, "", "shape") for policy in _SHAPES]
    if "estimator" in choice.studies:
        policies += [("bastion", mode, "estimator") for mode in ESTIMATORS]
    return policies


def _policy_arm(policy: str, variant: str, drafter: str, study: str) -> Arm:
    shape = parse_policy(policy, _no_cost, DEFAULT_MAX_NODES)
    fixed = policy.startswith(("fixed:", "beam:"))
    mark = f"[{variant}]" if variant else ""
    return Arm(
        name=f"{policy}{mark}+{drafter}",
        kind="policy",
        policy=policy,
        drafter=drafter,
        variant=variant,
        studies=(study,),
        updates=split_updater(drafter)[1],
        nodes=shape.max_nodes if fixed else None,
    )


def _peer(peer: str, causal: Sequence[str], attention: Sequence[str]) -> list[Arm]:
    if peer not in PEERS:
        raise InputError(
            f"'{PEER}{peer}' is no arm", hint=f"Use {', '.join(PEERS)} or none after {PEER}"
        )
    arm = Arm(name=f"{PEER}{peer}", kind="peer", policy=peer, studies=("policies",))
    if peer == "plain" and attention:
        return [
            replace(arm, name=arm.name + f"[{kind}]" * bool(place), options={"attention": kind})
            for place, kind in enumerate(attention)
        ]
    if peer == "prompt-lookup":
        return [replace(arm, options={"prompt_lookup_num_tokens": LOOKUP_TOKENS})]
    if peer != "assisted":
        return [arm]
    if not causal:
        raise InputError(
            "assisted generation needs a drafter that is a causal language model",
            hint="Add one with --drafter, or leave out --policy transformers:assisted.",
        )
    return [replace(arm, name=f"{arm.name}+{label}", drafter=label) for label in causal]


def _add(arms: dict[str, Arm], arm: Arm) -> None:
    """Add an arm, or only its studies to the arm of the same name."""
    first = arms.get(arm.name, arm)
    arms[arm.name] = replace(first, studies=tuple(dict.fromkeys((*first.studies, *arm.studies))))


def _no_cost(fit: Any = None) -> Any:
    """A cost for policies that are built only to check their names."""
    return None
