"""The arms of a benchmark: policies by drafters, studies, and peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodel.errors import InputError
from decoder.policies.base import DEFAULT_MAX_NODES
from decoder.policies.bastion import parse_policy
from lab.bench.arms.drafter_names import drafter_labels
from lab.bench.arms.peers import LOOKUP_TOKENS
from lab.bench.record import PEER, PLAIN, Arm
from lab.papers.specblock.updates.specblock import split_updater

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
