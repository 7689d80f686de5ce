"""Operating points: numbers by hand, and what must hold for any server."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.catalog import find_target
from costmodel.errors import InputError
from costmodel.planning.batching import Cycle, cycle_work, engine_overheads
from costmodel.planning.drafting import block_drafter, find_drafter, lookup_drafter
from costmodel.planning.engines import engine_rules
from costmodel.planning.request import ServingPolicy
from costmodel.planning.servers import TREES, Server, replicas_for
from costmodel.planning.traffic import Traffic
from tests.costmodel.planning.conftest import CHAT as TRAFFIC
from tests.costmodel.planning.conftest import LINE_ACCEPTANCE, LineSteps, server_of

FREE = dataclasses.replace(lookup_drafter(), host_s=0.0)


def make(policy: str = "auto", engine: str = "rooftree", **numbers) -> Server:
    drafts = {} if policy == "plain" else {"acceptance": LINE_ACCEPTANCE, "drafter": FREE}
    return server_of(
        LineSteps(**numbers), rules=engine_rules(engine), policy=ServingPolicy.parse(policy),
        **drafts,
    )  # fmt: skip


def test_one_plain_request_and_eight_by_hand():
    """10 ms + 20 us + 1200 tokens x 10 ns = 10.032 ms a token; the prompt 1000 x 20 us."""
    point = make("plain").best(TRAFFIC, 1)
    assert point.tpot_s == pytest.approx(10.032e-3)
    assert point.prefill_s == point.ttft_s == pytest.approx(20e-3)
    assert point.requests_per_s == pytest.approx(1 / (20e-3 + 399 * 10.032e-3))
    # Eight at once, in step: half of 7 prompts of 20 ms for 400 tokens
    point = make("plain").best(TRAFFIC, 8)
    step_s = 10e-3 + 8 * 20e-6 + 8 * 1200 * 1e-8
    assert point.tpot_s == pytest.approx(step_s + 0.5 * 7 / 400 * 20e-3)
    assert point.requests_per_s == pytest.approx(8 / (20e-3 + 399 * point.tpot_s))


def test_a_fixed_tree_and_the_parts_of_a_cycle_by_hand():
    """31 nodes: 32 rows, building in 5 us + 31 x 50 ns, A = 1 + 6 x 31 / 39."""
    point = make("fixed:31").best(TRAFFIC, 1)
    committed = 1 + 6 * 31 / 39
    cycle_s = 10e-3 + 32 * 20e-6 + 1200 * 1e-8 + 5e-6 + 31 * 5e-8
    assert (point.shape, point.nodes) == ("tree", 31)
    assert point.committed == pytest.approx(committed)
    assert point.tpot_s == pytest.approx(cycle_s / committed)
    # Two at once, trees of 15: 32 rows, and 2 x (5 us + 15 x 50 ns) on the host
    parts = make("fixed:15").best(TRAFFIC, 2).parts
    assert parts.weights_s == pytest.approx(10e-3 + 32 * 20e-6)
    assert parts.attention_s == pytest.approx(2 * 1200 * 1e-8)
    assert parts.acceptance_s == pytest.approx(2 * (5e-6 + 15 * 5e-8))
    committed = 1 + 6 * 15 / 23
    assert parts.prompts_s == pytest.approx(committed * 0.5 * 1 / 400 * 1000 * 20e-6)
    assert parts.communication_s == parts.draft_s == 0
    assert parts.engine_s == pytest.approx(0, abs=1e-12)


@settings(max_examples=25)
@given(
    fixed_s=st.floats(1e-3, 50e-3), row_s=st.floats(1e-6, 100e-6),
    batches=st.lists(st.integers(1, 256), min_size=2, max_size=2, unique=True),
)  # fmt: skip
def test_trees_shrink_with_the_batch(fixed_s, row_s, batches):
    server = make("auto", fixed_s=fixed_s, row_s=row_s)
    few, many = (server.best(TRAFFIC, batch) for batch in sorted(batches))
    # Sizes whose times differ by less than 2 % are equal, of which the smallest is taken.
    assert many.nodes <= 1.5 * few.nodes + 1


@settings(max_examples=25)
@given(
    faster=st.floats(1.0, 4.0), batch=st.integers(1, 128),
    policy=st.sampled_from(["auto", "plain", "chain", "fixed:31"]),
)  # fmt: skip
def test_more_bandwidth_is_never_slower(faster, batch, policy):
    slow = make(policy).best(TRAFFIC, batch)
    quick = make(policy, fixed_s=10e-3 / faster, token_s=1e-8 / faster).best(TRAFFIC, batch)
    assert quick.tpot_s <= slow.tpot_s * 1.02
    assert quick.requests_per_s >= slow.requests_per_s / 1.02


def test_memory_limits_what_runs_at_once_and_trees_shrink_to_none():
    """0.9 x 80 GB - 16.06 GB - 1 GB over 131,072 bytes a token; 64 trees of 64 rows in vLLM."""
    server = make("plain")
    room = (72e9 - 2 * 8030261248 - 1e9) / 131072
    assert server.cache_tokens() == pytest.approx(room)
    assert server.most_running(TRAFFIC) == int(room / 1200)
    assert server.points(TRAFFIC)[-1].running == int(room / 1200)
    assert server.points(TRAFFIC, most=7)[-1].running == 7
    long = Traffic(prompt_tokens=server.cache_tokens(), output_tokens=10)
    assert server.most_running(long) == 0 and server.points(long) == []
    drafting = dataclasses.replace(make("auto"), drafter=block_drafter())
    assert drafting.cache_tokens() < server.cache_tokens()
    assert make("fixed:63", engine="vllm").points(TRAFFIC)[-1].running == 64
    server = make("auto", row_s=2e-3)
    assert server.best(TRAFFIC, 1).nodes > 0
    assert server.best(TRAFFIC, 256).nodes == 0


@pytest.mark.parametrize(("engine", "target", "bytes_each"), [
    # prompts of 1,000 and half of 400 answer tokens, all of them in trtllm
    ("sglang", "Qwen3.5-4B", 1200 * 8 * 2 * 1024 * 2 + 24 * (4 * 32 * 128**2 + 2 * 3 * 8192)),
    ("trtllm", "gemma-4-31B-it", 2 * (50 * 8192 * 1024 + 10 * 4096 * 1400)),
    ("rooftree", "gemma-4-31B-it", 2 * (50 * 8192 + 10 * 4096) * 1200),
])  # fmt: skip
def test_a_sequence_holds_its_states_and_what_windows_leave(engine, target, bytes_each):
    a, rules = find_target(target).architecture, engine_rules(engine)
    server = server_of(LineSteps(architecture=a), rules=rules)
    free = rules.memory.free_bytes(80e9, 2 * a.parameters)
    assert server.most_running(TRAFFIC) == int(free / bytes_each)


def test_a_block_drafter_by_its_size_and_vllms_host_at_each_drafted_token():
    """5 of 36 layers and the head: between a tenth and a half of the target's block forward."""
    steps = LineSteps(architecture=find_target("Qwen/Qwen3-8B").architecture)
    share = block_drafter().draft_s(steps, 1, 1000, 15).total / steps.decode(1, 1000, 16).total
    assert 0.1 < share < 0.35
    weights = block_drafter().weight_bytes(steps.architecture)
    assert weights == pytest.approx(2 * 1.05e9, rel=0.05)  # the published checkpoint: 1.05 G
    # Its steps with 3 to 8 drafted tokens (vLLM PR #32628) take 0.84 ms more for each
    each_s = 1e-3 * np.polyfit(range(3, 9), [7.58, 8.48, 9.36, 10.22, 11.02, 11.80], 1)[0]
    steps = LineSteps(fixed_s=5e-3)
    eagle, dflash = (find_drafter(steps, name) for name in ("eagle3", "dflash"))
    on_vllm = dataclasses.replace(steps, engine="vllm")
    assert eagle.draft_s(steps, 1, 1000, 5).total < 5 * 0.5e-3
    assert eagle.draft_s(on_vllm, 1, 1000, 5).total == pytest.approx(5 * each_s, rel=0.01)
    assert dflash.draft_s(on_vllm, 1, 1000, 5) == dflash.draft_s(steps, 1, 1000, 5)


@pytest.mark.parametrize(("target", "name", "billions"), [
    # parameters of the checkpoints, without embedding and the target's LM head
    ("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", 1.049 + 0.0778),
    ("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 0.425),
    ("deepseek-ai/DeepSeek-V3", "mtp", 11.5),
])  # fmt: skip
def test_drafters_of_other_kinds_by_their_size(target, name, billions):
    steps = LineSteps(architecture=find_target(target).architecture)
    drafter = find_drafter(steps, name)
    assert drafter.weight_bytes(steps.architecture) == pytest.approx(2e9 * billions, rel=0.02)
    two, eight = (drafter.draft_s(steps, 4, 1000, n).total for n in (2, 8))
    each = drafter.size.each_token
    assert eight == pytest.approx(4 * two) if each else two < eight < 2 * two
    assert 0 < eight < steps.decode(4, 1000, 16).total


@pytest.mark.parametrize("text", ["", "fast", "fixed", "fixed:0", "fixed:x", "auto:3"])
def test_wrong_policies_are_refused(text):
    with pytest.raises(InputError, match="no policy"):
        ServingPolicy.parse(text)


@pytest.mark.parametrize(
    ("rate", "each", "servers"), [(5, 10, 1), (8, 10, 1), (8.1, 10, 2), (80, 10, 10)]
)
def test_servers_for_a_rate(rate, each, servers):
    assert replicas_for(rate, each, 0.8) == servers


def stairs(policy: str = "chain", step_s: float = 3e-4, height: int = 8) -> Server:
    """A server whose forwards cost another step every 8 rows, in chains of 0.8 a token."""

    class Steps(LineSteps):
        def decode(self, batch, context, rows=1):
            line = super().decode(batch, context, rows)
            steps = -(-int(batch * rows) // height)
            return dataclasses.replace(line, products=line.products + step_s * steps)

    return dataclasses.replace(make(policy), forward=Steps())


@pytest.mark.parametrize(("policy", "step_s", "height"), [
    ("chain", 1e-4, 8), ("chain", 3e-4, 24), ("auto", 3e-4, 8), ("auto", 1e-3, 16),
])  # fmt: skip
def test_sizes_rise_with_the_batch_only_where_that_pays(policy, step_s, height):
    """Every rise is checked against the time of the smaller size at the same batch."""
    server = stairs(policy, step_s, height)
    points = server.points(TRAFFIC, 256)
    for fewer, more in itertools.pairwise(points):
        if more.nodes > fewer.nodes:
            times = {
                cycle.nodes: cycle_s(server, more.running, cycle) / cycle.committed
                for _, cycle in server._cycles(TRAFFIC, more.running)
            }
            assert times[fewer.nodes] > 1.02 * more.tpot_s, (fewer.running, more.running)


def cycle_s(server: Server, running: int, cycle: Cycle) -> float:
    return server._seconds(cycle_work(server.forward, server.rules, TRAFFIC, running, cycle))


@pytest.mark.parametrize("running", [1, 6, 24])
def test_a_smaller_size_within_1_percent_wins(running):
    server = stairs("auto")
    best = server.best(TRAFFIC, running)
    for shape, cycle in server._cycles(TRAFFIC, running):
        tpot_s = cycle_s(server, running, cycle) / cycle.committed
        assert tpot_s >= best.tpot_s / 1.01
        assert cycle.nodes >= best.nodes or tpot_s > best.tpot_s / 1.01, shape


def test_choices_are_the_best_of_each_policy():
    choice = make("auto").choices(TRAFFIC, 8)[0]
    assert choice.plain.tpot_s == pytest.approx(make("plain").best(TRAFFIC, 1).tpot_s)
    assert choice.chain == make("chain").best(TRAFFIC, 1)
    trees = [make(f"fixed:{n}").best(TRAFFIC, 1).tpot_s for n in TREES]
    assert min(trees) <= choice.tree.tpot_s <= 1.01 * min(trees)
    assert choice.speedup(choice.tree) == choice.plain.tpot_s / choice.tree.tpot_s


@pytest.mark.parametrize("engine", ["rooftree", "vllm", "sglang", "trtllm"])
def test_the_parts_add_up_to_the_cycle(engine):
    server = dataclasses.replace(
        make("auto", engine=engine), drafter=block_drafter(), overheads=engine_overheads(engine)
    )
    for choice in server.choices(TRAFFIC, 64):
        for point in (choice.plain, choice.chain, choice.best):
            assert sum(dataclasses.astuple(point.parts)) == pytest.approx(point.cycle_s)
            assert min(dataclasses.astuple(point.parts)) >= 0
        assert choice.chain.parts.draft_s > 0 and choice.plain.parts.draft_s == 0
