"""DSpark tables: read as SGLang reads them, they give the server's own steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from costmodel.planning.exports.step_tables import doubling, step_s, steps_table, sum_table
from costmodel.planning.forwards import ProfileForward
from costmodel.planning.request import PlanRequest
from costmodel.planning.search import make_server
from costmodel.planning.traffic import Traffic
from costmodel.profile.lookup import named_profile

TRAFFIC = Traffic(prompt_tokens=1000, output_tokens=400)


@pytest.fixture(scope="module")
def server():
    forward = ProfileForward(profile=named_profile("h100-sxm/qwen3-8b")[1])
    request = PlanRequest(
        target="Qwen/Qwen3-8B", gpus=("h100-sxm",), traffic=TRAFFIC, rate=1.0, engine="sglang"
    )
    return make_server(request, forward, None)


def test_the_sum_gives_the_servers_steps(server):
    table = sum_table(server, TRAFFIC, most_running=64, drafted=7)
    values = table.values
    assert values["bias_seconds"] > 0 and values["alpha_seconds"][0] == 0
    errors = []
    for running in (1, 2, 4, 8, 64):
        for rows in (1, 2, 4, 8):
            read_s = (
                values["bias_seconds"]
                + np.interp(running, values["bs_probes"], values["alpha_seconds"])
                + np.interp(running * rows, values["m_probes"], values["theta_seconds"])
            )
            errors.append(abs(read_s / step_s(server, TRAFFIC, running, rows) - 1))
    assert max(errors) <= table.worst_error + 1e-4 and table.worst_error < 0.05


def test_steps_a_second_are_those_of_whole_drafts(server):
    table = steps_table(server, TRAFFIC, most_running=6, drafted=3)
    assert table.values["sample_batch_tokens"] == [4, 8, 16, 24]
    assert table.values["max_batch_tokens"] == 24
    rates = [1 / step_s(server, TRAFFIC, running, 4) for running in (1, 2, 4, 6)]
    assert table.values["sample_steps_per_sec"] == pytest.approx(rates, rel=1e-5)


def test_a_step_holds_the_draft_and_no_prompts(server):
    alone = step_s(server, TRAFFIC, 4, 1)
    long = Traffic(
        prompt_tokens=1199, output_tokens=2
    )  # the same context, and prompts all the time
    assert step_s(server, long, 4, 1) == pytest.approx(alone)

    class Slow:
        name, label, layers, host_s = "slow", "slow", 0, 0.5

        def draft_s(self, forward, batch, context, tokens):
            from costmodel.planning.forwards import ForwardSeconds

            return ForwardSeconds()

    drafting = dataclasses.replace(server, drafter=Slow())
    assert step_s(drafting, TRAFFIC, 4, 1) > 1.9


@pytest.mark.parametrize(("most", "expected"), [(1, [1]), (8, [1, 2, 4, 8]), (6, [1, 2, 4, 6])])
def test_probes_double_to_the_last(most, expected):
    assert doubling(most) == expected
