"""The policies by name, as `--policy` takes them."""

from __future__ import annotations

from costmodel.errors import InputError
from decoder.extensions import POLICIES, make_extension
from decoder.names import FIXED, check_policy
from decoder.policies.base import Chain, FindCost, Fixed, Plain, Policy
from decoder.policies.bastion import Bastion


def parse_policy(text: str, cost: FindCost, max_nodes: int) -> Policy:
    """The policy of a name, as `bastion` or `fixed:16`; `POLICY_NAMES` lists those of the decoder.

    Entry points give other packages' policies names, and `package.module:Class` needs none.

    cost       gives the cost model; called only for a policy that reads one
    max_nodes  bounds every tree whose size is not in the name
    Raises InputError for another name.
    """
    if max_nodes < 1:
        raise InputError(f"the largest tree must have 1 node or more, got {max_nodes}")
    if text == "bastion":
        return Bastion(cost(), max_nodes)
    if text == "chain":
        return Chain(max_nodes=max_nodes)
    if text == "plain":
        return Plain()
    check_policy(text)
    match = FIXED.fullmatch(text)
    if match is not None:
        return Fixed(int(match[1]))
    policy = make_extension(text, POLICIES, Policy, cost=cost, max_nodes=max_nodes)
    if policy is None:  # the entry point is that of a format
        raise InputError(f"'{text}' is not a policy")
    return policy
