"""Operating points: numbers by hand, and what must hold for any server."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodel.capacity.drafting import BlockDrafter, FreeDrafter
from costmodel.capacity.engines import engine_rules
from costmodel.capacity.operating import Policy, Server, Traffic, replicas_for
from costmodel.capacity.overheads import Overheads
from costmodel.errors import InputError
from costmodel.targets import find_target

LLAMA = find_target("meta-llama/Llama-3.1-8B-Instruct").architecture
TRAFFIC = Traffic(prompt_tokens=1000, output_tokens=400)
FIXTURES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def make(line_steps, line_acceptance):
    def server(policy: str = "auto", engine: str = "rooftree", **numbers) -> Server:
        return Server(
            forward=line_steps(architecture=LLAMA, **numbers),
            rules=engine_rules(engine),
            overheads=Overheads(),
            policy=Policy.parse(policy),
            acceptance=None if policy == "plain" else line_acceptance,
            drafter=None if policy == "plain" else FreeDrafter(),
        )

    return server


def test_one_plain_request_by_hand(make):
    """10 ms + 20 us + 1200 tokens x 10 ns = 10.032 ms a token; the prompt 1000 x 20 us."""
    point = make("plain").best(TRAFFIC, 1)
    assert point.tpot_s == pytest.approx(10.032e-3)
    assert point.prefill_s == point.ttft_s == pytest.approx(20e-3)
    assert point.requests_per_s == pytest.approx(1 / (20e-3 + 399 * 10.032e-3))


def test_other_prompts_are_waited_for(make):
    """Eight at once, in step: half of 7 prompts of 20 ms for 400 tokens."""
    point = make("plain").best(TRAFFIC, 8)
    step_s = 10e-3 + 8 * 20e-6 + 8 * 1200 * 1e-8
    assert point.tpot_s == pytest.approx(step_s + 0.5 * 7 / 400 * 20e-3)
    assert point.requests_per_s == pytest.approx(8 / (20e-3 + 399 * point.tpot_s))


def test_a_fixed_tree_by_hand(make):
    """31 nodes: 32 rows, building in 5 us + 31 x 50 ns, A = 1 + 6 x 31 / 39."""
    point = make("fixed:31").best(TRAFFIC, 1)
    committed = 1 + 6 * 31 / 39
    cycle_s = 10e-3 + 32 * 20e-6 + 1200 * 1e-8 + 5e-6 + 31 * 5e-8
    assert (point.shape, point.nodes) == ("tree", 31)
    assert point.committed == pytest.approx(committed)
    assert point.tpot_s == pytest.approx(cycle_s / committed)


def test_the_best_is_the_best_of_all_sizes_to_2_percent(make):
    auto = make("auto").best(TRAFFIC, 4)
    fixed = [make(f"fixed:{n}").best(TRAFFIC, 4).tpot_s for n in (3, 7, 15, 31, 63, 127, 255)]
    assert auto.tpot_s <= 1.02 * min(*fixed, make("plain").best(TRAFFIC, 4).tpot_s)


@FIXTURES
@given(
    fixed_s=st.floats(1e-3, 50e-3),
    row_s=st.floats(1e-6, 100e-6),
    batches=st.lists(st.integers(1, 256), min_size=2, max_size=2, unique=True),
)
def test_trees_shrink_with_the_batch(make, fixed_s, row_s, batches):
    server = make("auto", fixed_s=fixed_s, row_s=row_s)
    few, many = (server.best(TRAFFIC, batch) for batch in sorted(batches))
    # Sizes whose times differ by less than 2 % are equal, of which the smallest is taken.
    assert many.nodes <= 1.5 * few.nodes + 1


def test_trees_shrink_to_none(make):
    server = make("auto", row_s=2e-3)
    assert server.best(TRAFFIC, 1).nodes > 0
    assert server.best(TRAFFIC, 256).nodes == 0


@FIXTURES
@given(
    faster=st.floats(1.0, 4.0),
    batch=st.integers(1, 128),
    policy=st.sampled_from(["auto", "plain", "chain", "fixed:31"]),
)
def test_more_bandwidth_is_never_slower(make, faster, batch, policy):
    slow = make(policy).best(TRAFFIC, batch)
    quick = make(policy, fixed_s=10e-3 / faster, token_s=1e-8 / faster).best(TRAFFIC, batch)
    assert quick.tpot_s <= slow.tpot_s * 1.02
    assert quick.requests_per_s >= slow.requests_per_s / 1.02


def test_memory_limits_what_runs_at_once(make):
    """0.9 x 80 GB - 16.06 GB - 1 GB over 131,072 bytes a token and 1200 tokens held."""
    server = make("plain")
    room = (72e9 - 2 * 8030261248 - 1e9) / 131072
    assert server.room() == pytest.approx(room)
    assert server.most_running(TRAFFIC) == int(room / 1200)
    assert server.points(TRAFFIC)[-1].running == int(room / 1200)
    assert server.points(TRAFFIC, most=7)[-1].running == 7


def test_fixed_trees_leave_room_in_a_step(make):
    """Half of 8192 rows: 64 sequences of 64 rows."""
    assert make("fixed:63", engine="vllm").points(TRAFFIC)[-1].running == 64


def test_a_drafter_takes_memory(make):
    plain, drafting = make("plain"), dataclasses.replace(make("auto"), drafter=BlockDrafter())
    assert drafting.room() < plain.room()


def test_a_text_that_does_not_fit_runs_nowhere(make):
    server = make("plain")
    long = Traffic(prompt_tokens=server.room(), output_tokens=10)
    assert server.most_running(long) == 0
    assert server.points(long) == []


def test_a_block_drafter_by_its_size(line_steps):
    """5 of 36 layers and the head: between a tenth and a half of the target's block forward."""
    steps = line_steps(architecture=find_target("Qwen/Qwen3-8B").architecture)
    share = BlockDrafter().draft_s(steps, 1, 1000).total / steps.decode(1, 1000, 16).total
    assert 0.1 < share < 0.35
    weights = BlockDrafter().weight_bytes(steps.architecture)
    assert weights == pytest.approx(2 * 1.05e9, rel=0.05)  # the published checkpoint: 1.05 G


def test_mixture_targets_have_dense_drafters():
    moe = find_target("Qwen/Qwen3-30B-A3B").architecture
    assert BlockDrafter().architecture(moe).experts == 0


@pytest.mark.parametrize("text", ["", "fast", "fixed", "fixed:0", "fixed:x", "auto:3"])
def test_wrong_policies_are_refused(text):
    with pytest.raises(InputError, match="no policy"):
        Policy.parse(text)


@pytest.mark.parametrize(
    ("rate", "each", "servers"), [(5, 10, 1), (8, 10, 1), (8.1, 10, 2), (80, 10, 10)]
)
def test_servers_for_a_rate(rate, each, servers):
    assert replicas_for(rate, each, 0.8) == servers
