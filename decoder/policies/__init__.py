"""Which tree to verify: the budget policies."""

from decoder.policies.base import (
    DEFAULT_MAX_NODES,
    Candidates,
    Cost,
    Limits,
    Offer,
    Policy,
    PolicyBase,
)
from decoder.policies.bastion import Bastion, PaperBastion
from decoder.policies.bias import DepthBias, DraftGate
from decoder.policies.dynatree import DynaTree
from decoder.policies.grown import Grown
from decoder.policies.parse import parse_policy
from decoder.policies.simple import Chain, Fixed, Plain

__all__ = [
    "DEFAULT_MAX_NODES",
    "Bastion",
    "Candidates",
    "Chain",
    "Cost",
    "DepthBias",
    "DraftGate",
    "DynaTree",
    "Fixed",
    "Grown",
    "Limits",
    "Offer",
    "PaperBastion",
    "Plain",
    "Policy",
    "PolicyBase",
    "parse_policy",
]
