"""From the text of `--policy` to a policy."""

from __future__ import annotations

from collections.abc import Callable

from costmodel.errors import InputError
from decoder.policies.base import Cost, CostKind, Policy
from decoder.policies.bastion import Bastion, PaperBastion
from decoder.policies.simple import Chain, Fixed, Plain

KNOWN = "bastion, bastion:paper, fixed:N, chain or plain"


def parse_policy(text: str, cost: Callable[[CostKind], Cost], max_nodes: int) -> Policy:
    """`bastion`, `bastion:paper`, `fixed:N`, `chain` or `plain`.

    `cost` is called only where one is needed; `max_nodes` bounds bastion and chain.
    """
    if max_nodes < 1:
        raise InputError(f"the largest tree must have 1 node or more, got {max_nodes}")
    name, _, argument = text.partition(":")
    if name == "fixed":
        if not argument.isdecimal() or int(argument) < 1:
            raise InputError(
                f"'{text}' is not a policy", hint="Write fixed:N with N of 1 or more, as fixed:16."
            )
        return Fixed(int(argument))
    if text == "bastion":
        return Bastion(cost("best"), max_nodes)
    if text == "bastion:paper":
        return PaperBastion(cost("linear"), max_nodes)
    if text == "chain":
        return Chain(max_nodes=max_nodes)
    if text == "plain":
        return Plain()
    raise InputError(f"'{text}' is not a policy", hint=f"Use {KNOWN}.")
