"""The policies by name, as `--policy` takes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from costmodel.errors import InputError
from decoder.extensions import POLICIES, build, extension_names, find_extension
from decoder.policies.base import Cost, CostKind, Policy
from decoder.policies.bastion import Bastion, PaperBastion, PrintedBastion
from decoder.policies.shapes import Chain, Fixed, Plain, beam, static_tree
from lab.papers.dynatree.policy import ConfidentGrowth, DynaTree, HistorySettings

KNOWN = (
    "bastion, bastion:paper, bastion:printed, fixed:N, chain, beam:WxD, static-tree:DxB, dynatree "
    "or plain"
)
# For each name that takes numbers: the pattern of the numbers, and a hint.
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
    """The policy of a name, as `bastion` or `beam:4x15`; `KNOWN` lists them.

    `package:Class` and the names of entry points are policies of other packages.

    cost       gives the cost model; called only for a policy that reads one
    max_nodes  bounds every tree whose size is not in the name
    Raises InputError for another name.
    """
    if max_nodes < 1:
        raise InputError(f"the largest tree must have 1 node or more, got {max_nodes}")
    if text == "bastion":
        return Bastion(cost("best"), max_nodes)
    if text == "bastion:paper":
        return PaperBastion(cost("released"), max_nodes)
    if text == "bastion:printed":
        return PrintedBastion(cost("linear"), max_nodes)
    if text == "chain":
        return Chain(max_nodes=max_nodes)
    if text.partition(":")[0] == "dynatree":
        return _dynatree(text, max_nodes)
    if text == "plain":
        return Plain()
    if text.partition(":")[0] in SHAPES:
        return _shaped(text, max_nodes)
    factory = find_extension(text, POLICIES)
    if factory is not None:
        return build(factory, Policy, text, cost=cost, max_nodes=max_nodes)
    names = ", ".join((KNOWN, *extension_names(POLICIES)))
    raise InputError(
        f"'{text}' is not a policy", hint=f"Use {names}, or package:Class for one of your own."
    )


def _shaped(text: str, max_nodes: int) -> Policy:
    """A policy with numbers in its name."""
    name, _, argument = text.partition(":")
    pattern, hint = SHAPES[name]
    match = re.fullmatch(pattern, argument, re.ASCII)
    numbers = [int(number) for number in match.groups()[:2]] if match else [0]
    if match is None or min(numbers) < 1:
        raise InputError(f"'{text}' is not a policy", hint=hint)
    if name == "fixed":
        return Fixed(numbers[0])
    width, depth = numbers
    if name == "beam":
        return beam(width, depth)
    depth, width = numbers
    return static_tree(depth, width, max_nodes, float(match[3] or 0.0))


def _dynatree(text: str, max_nodes: int) -> DynaTree:
    """`dynatree`, or `dynatree:NAME=VALUE,...` with settings of its growth and its history."""
    parts: dict[type, dict[str, Any]] = {ConfidentGrowth: {}, HistorySettings: {}}
    settings = {one.name: (part, type(one.default)) for part in parts for one in fields(part)}
    _, colon, listed = text.partition(":")
    for item in listed.split(",") if colon else ():
        name, _, value = item.partition("=")
        try:
            part, kind = settings[name]
            parts[part][name] = kind(value)
        except (KeyError, ValueError):
            raise InputError(
                f"'{text}' is not a policy: '{item}' sets nothing",
                hint=f"Write dynatree, or dynatree:NAME=VALUE,... with {', '.join(settings)}.",
            ) from None
    growth, history = (
        ConfidentGrowth(**parts[ConfidentGrowth]),
        HistorySettings(**parts[HistorySettings]),
    )
    return DynaTree(max_nodes, history, growth, text)
