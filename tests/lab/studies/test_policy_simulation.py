"""The controller on published acceptance, simulated: against every fixed size in hindsight."""

import numpy as np
import pytest

from costmodel.io import shipped_directory
from costmodel.online import CycleCost
from costmodel.profile.profile import Profile
from decoder.policies.base import Chain, Plain
from decoder.policies.bastion import Bastion
from lab.bench.simulated import published
from lab.papers.bastion.policy import PaperBastion, PrintedBastion, released_calibration
from lab.studies.controller_simulated import CostAt, compare, fixed_rates

CONTEXT, MOST = 1024, 255
CURVES = (
    ("bastion", "math500", "qwen3-8b", 0), ("bastion", "alpaca", "qwen3-4b", 0),
    ("ddtree", "mt_bench", "qwen3-8b", 0), ("ddtree", "humaneval", "qwen3-coder-30b-a3b", 1),
)  # fmt: skip


def costs(device):
    """The shipped costs of Qwen3-8B: as selected, by two branches, and by the linear line."""
    path = shipped_directory() / device / "qwen3-8b.bfloat16.kernels.tp1.yaml"
    profile = Profile.from_yaml(path)
    best = CycleCost.from_profile(profile)
    fits = (released_calibration(profile), profile.linear_calibration())
    papers = [CycleCost(verify=fit, roofline=best.roofline) for fit in fits]
    return [CostAt.of(cost, CONTEXT, MOST) for cost in (best, *papers)]


def straight(slope, draft=0.0, plain=1.0):
    """A cycle of plain + slope x nodes, as on a CPU, where nodes are not free."""
    return CostAt(plain + draft + slope * np.arange(MOST + 1), draft, plain)


def rates(process, policies, cost):
    """Tokens a second of every policy, and of the best fixed size."""
    played, committed = compare(process, policies, cost, rounds=1000)
    sums = {name: rounds.sum(axis=0) for name, rounds in played.items()}
    return {name: tokens / seconds for name, (tokens, seconds, _) in sums.items()} | {
        "best": max(fixed_rates(committed, cost))
    }


class TestPublishedAcceptance:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("curve", "device"), zip(CURVES, 2 * ["h100-sxm", "a100-sxm-80gb"], strict=True)
    )
    def test_no_fixed_size_is_faster_by_a_hundredth(self, curve, device):
        table, dataset, target, temperature = curve
        process = published(table, dataset, target=target, temperature=temperature)
        true, released, linear = costs(device)
        policies = {
            "bastion": Bastion(true, MOST), "paper": PaperBastion(released, MOST),
            "printed": PrintedBastion(linear, MOST), "chain": Chain(max_nodes=MOST),
            "plain": Plain(),
        }  # fmt: skip
        speed = rates(process, policies, true)
        assert speed["bastion"] > 0.99 * speed["best"]
        assert speed["bastion"] > 0.98 * speed["paper"]
        for name in ("printed", "chain", "plain"):
            assert speed["bastion"] > speed[name]

    @pytest.mark.parametrize("slope", [0.02, 0.1])
    def test_it_beats_every_fixed_size_where_nodes_cost(self, slope):
        """Drafts differ in how far they may be trusted, which one size cannot follow."""
        cost = straight(slope)
        policies = {"bastion": Bastion(cost, MOST)}
        speed = rates(published("bastion", "gsm8k"), policies, cost)
        assert speed["bastion"] > 1.01 * speed["best"]
