"""From the text of `--policy` to a policy."""

from __future__ import annotations

import re
from collections.abc import Callable

from costmodel.errors import InputError
from decoder.policies.base import Cost, CostKind, Policy
from decoder.policies.bastion import Bastion, PaperBastion
from decoder.policies.dynatree import DynaTree
from decoder.policies.grown import beam, static_tree
from decoder.policies.simple import Chain, Fixed, Plain

KNOWN = "bastion, bastion:paper, fixed:N, chain, beam:WxD, static-tree:DxB, dynatree or plain"
# What may follow each name that takes numbers, and how to say so.
SHAPES = {
    "fixed": (r"(\d{1,9})", "Write fixed:N with N of 1 or more, as fixed:16."),
    "beam": (
        r"(\d{1,3})x(\d{1,3})",
        "Write beam:WxD with a width and a depth of 1 to 999, as beam:4x15.",
    ),
    "static-tree": (
        r"(\d{1,3})x(\d{1,3})(?::(0?\.\d+))?",
        "Write static-tree:DxB with a depth and a branching of 1 to 999, as static-tree:5x2, or "
        "static-tree:DxB:P to leave out paths below the probability P, as static-tree:8x3:0.1.",
    ),
}


def parse_policy(text: str, cost: Callable[[CostKind], Cost], max_nodes: int) -> Policy:
    """The policy of a name such as `bastion` or `beam:4x15`; `KNOWN` lists them.

    `cost` is called only where one is needed; `max_nodes` bounds every tree whose size
    the name does not say. Raises InputError for anything else.
    """
    if max_nodes < 1:
        raise InputError(f"the largest tree must have 1 node or more, got {max_nodes}")
    if text == "bastion":
        return Bastion(cost("best"), max_nodes)
    if text == "bastion:paper":
        return PaperBastion(cost("linear"), max_nodes)
    if text == "chain":
        return Chain(max_nodes=max_nodes)
    if text == "dynatree":
        return DynaTree(max_nodes)
    if text == "plain":
        return Plain()
    return _shaped(text, max_nodes)


def _shaped(text: str, max_nodes: int) -> Policy:
    """A policy whose numbers follow its name."""
    name, _, argument = text.partition(":")
    if name not in SHAPES:
        raise InputError(f"'{text}' is not a policy", hint=f"Use {KNOWN}.")
    pattern, hint = SHAPES[name]
    found = re.fullmatch(pattern, argument, re.ASCII)
    numbers = [int(number) for number in found.groups()[:2]] if found else [0]
    if found is None or min(numbers) < 1:
        raise InputError(f"'{text}' is not a policy", hint=hint)
    if name == "fixed":
        return Fixed(*numbers)
    if name == "beam":
        return beam(*numbers)
    return static_tree(*numbers, max_nodes, float(found[3] or 0.0))
