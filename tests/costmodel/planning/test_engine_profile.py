"""Plans from a profile that was measured inside vLLM: no overheads twice, drafts as they ran."""

import dataclasses

import numpy as np
import pytest

from costmodel.errors import InputError
from costmodel.planning.acceptance import from_file
from costmodel.planning.batching import Overheads, verification_s
from costmodel.planning.drafting import find_drafter
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import ServingPolicy
from costmodel.planning.search import server_overheads
from costmodel.planning.simulation.percentiles import replay
from costmodel.planning.traffic import Trace, Traffic
from tests.costmodel.planning.conftest import server_of
from tests.integrations.made_engine_profile import make_engine_profile, step_s

FORWARD = TargetForward(make_engine_profile())


def test_steps_get_no_overheads_and_drafts_cost_what_was_measured_in_the_engine() -> None:
    origin = FORWARD.origin
    assert server_overheads("vllm", origin) == Overheads()
    assert server_overheads("sglang", origin).step_s > 0
    apart = dataclasses.replace(origin, host_s=0.002)
    assert server_overheads("vllm", apart) == Overheads(step_s=0.002)
    forward = TargetForward(make_engine_profile(0.001, a_token_s=0.0005))
    drafter = find_drafter(forward, "ngram")
    assert drafter.in_engine is not None
    assert drafter.draft_s(forward, 8, 64, 15).total == pytest.approx(0.001 + 0.0005 * 15 * 8)
    assert find_drafter(forward, None).name == "ngram"
    plain, full = step_s(1, 64, 4), step_s(4, 64, 4)
    seconds = verification_s(FORWARD, (4, 64), 4, 0.4).total
    assert seconds == pytest.approx(plain + 0.4 * (full - plain), rel=0.02)


def test_a_chain_of_n_is_the_only_one(tmp_path) -> None:
    path, traffic = tmp_path / "ngram.json", Traffic(prompt_tokens=100, output_tokens=40)
    path.write_text('{"by_depth": [0.5, 0.5, 1e-9], "rounds": 900, "drafted_share": 0.4}')
    drafts = {"acceptance": from_file(path), "drafter": find_drafter(FORWARD, "ngram")}
    three, four = (
        server_of(FORWARD, policy=ServingPolicy.parse(f"chain:{n}"), **drafts) for n in (3, 4)
    )
    points = three.points(traffic, 8)
    assert {(point.shape, point.nodes) for point in points} == {("chain", 3)}
    committed = 1 + 0.4 * (0.5 + 0.25)
    assert [point.committed for point in points] == pytest.approx([committed] * len(points))
    with pytest.raises(InputError, match="known to 3 nodes"):
        four.points(traffic, 8)


def test_replayed_requests_one_at_a_time_take_the_sum_of_their_steps() -> None:
    """Far apart, nothing waits: a prefill, then one plain step a token with a growing context."""
    pytest.importorskip("simpy")
    requests = Trace(
        arrival_s=np.array([0.0, 100.0]), prompt_tokens=np.array([100, 300]),
        output_tokens=np.array([40, 2]),
    )  # fmt: skip
    result = replay(server_of(FORWARD), requests, 8)
    first_s = FORWARD.prompt(100, 0, 1).total
    assert result.ttft_s[0] == pytest.approx(first_s, rel=0.02)
    steps_s = sum(float(step_s(1, 100 + n, 1)) for n in range(39))
    assert result.tpot_s[0] == pytest.approx(steps_s / 39, rel=0.02)
