"""Plans from shipped profiles: sizing by hand, rankings, intervals, and every bad question."""

import dataclasses
import json
import math
from itertools import pairwise

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.io import shipped_directory
from costmodel.planning.accuracy import DRAFTING_ERROR, SERVER_ERROR, relative_error
from costmodel.planning.batching import engine_overheads
from costmodel.planning.forwards import Origin
from costmodel.planning.request import (
    Goals,
    PlanRequest,
    Precision,
    ServingPolicy,
    SimulationSettings,
    parse_parallel,
    parse_rate,
    parse_servers,
    request_from_options,
)
from costmodel.planning.result import Plan, shape_ranges
from costmodel.planning.search import plan, server_overheads
from costmodel.planning.servers import Group, Interval, size
from costmodel.planning.traffic import Traffic
from profiler.commands.plan import command
from tests.costmodel.conftest import altered, shipped
from tests.costmodel.planning import conftest
from tests.costmodel.planning.conftest import SHIPPED, point


def asked(**changes) -> PlanRequest:
    return conftest.asked(**({"gpus": ("h100-sxm", "l40s")} | changes))


def test_a_speculating_server_that_others_measured(tmp_path):
    """Dogacel/Qwen3-8B-DSpark in vLLM on an H100: ms at 1 and 32 at once; lengths are of chats."""
    accepted = [1.0, 0.605, 0.341, 0.186, 0.099, 0.052, 0.027, 0.014]
    rates = [further / so_far for so_far, further in pairwise(accepted)]
    (tmp_path / "card.json").write_text(json.dumps({"by_depth": rates}))
    chats = Traffic(prompt_tokens=200, output_tokens=500)
    drafts = {"acceptance": str(tmp_path / "card.json"), "drafter": "dspark"}
    for policy, more, measured in (
        ("plain", {}, (6.78, 8.83)), ("chain:7", drafts, (3.83, 6.00)),
    ):  # fmt: skip
        policy = ServingPolicy.parse(policy)
        planned = plan(asked(gpus=("h100-sxm",), traffic=chats, policy=policy, **more))
        points = {one.running: one.tpot_s * 1e3 for one in planned.options[0].points}
        assert (points[1], points[32]) == pytest.approx(measured, rel=0.03)


def test_a_plan_says_which_version_it_is_of():
    for version, told in (
        ("", "of today is planned as 0.19, which overlaps its host's work; --engine vllm@0.11"),
        ("0.15.1", "0.15.1 is planned as 0.19, which overlaps"),
        ("0.13", "0.13 is planned as 0.11, which prepares steps in between"),
    ):
        notes = plan(asked(engine_version=version)).notes
        assert any(note.startswith(f"vllm {told}") for note in notes)


POINTS = [
    point(running, tpot_s=tpot_s, requests_per_s=rate, ttft_s=0.1)
    for running, tpot_s, rate in ((1, 10e-3, 1.0), (4, 20e-3, 2.0), (16, 40e-3, 4.0))
]
GROUP = Group(gpu="h100-sxm", devices=2, power_w=700.0)


def test_sizing_by_hand_of_given_servers_and_of_data_parallel_groups():
    """20 requests/s, 2 a server at 25 ms a token, loaded to 0.8: 13 servers of 2 GPUs."""
    request = asked(rate=20.0, goals=Goals(tpot_s=25e-3), prices={"h100-sxm": 2.5})
    sizing = size(request, GROUP, POINTS, error=0.0)
    assert sizing.at_most.running == 4
    assert sizing.gpus.value == sizing.gpus.low == sizing.gpus.high == 26
    assert sizing.at_load.running == 4  # 20 / 13 = 1.54 requests/s each
    assert sizing.cost_per_hour.value == 65.0
    assert sizing.cost_per_million.value == pytest.approx(65 / (20 * 400 * 3600) * 1e6)
    assert sizing.watts.value == sizing.watts.high == 26 * 700  # the points' power share is 1
    assert sizing.joules_per_token.value == pytest.approx(26 * 700 / 8000)
    assert sizing.load == pytest.approx(20 / 26)
    # 20 requests/s on 3 servers of 4/s: 12 are served, at full load
    sizing = size(asked(rate=20.0, servers=3), GROUP, POINTS, error=0.1, slower=0.3)
    assert sizing.gpus == Interval(value=6, low=6, high=6)
    assert (sizing.at_load.running, sizing.load) == (16, pytest.approx(20 / 12))
    assert sizing.joules_per_token.value == pytest.approx(6 * 700 / (12 * 400))
    assert sizing.tpot_s.high / sizing.tpot_s.value == pytest.approx(math.exp(1.606 * 0.3))
    assert sizing.tpot_s.low / sizing.tpot_s.value == pytest.approx(math.exp(-1.606 * 0.1))
    assert (parse_servers("3"), parse_servers("70%")) == ((3, 1.0), (None, 0.7))
    one = size(asked(), GROUP, POINTS, error=0.0)
    group = dataclasses.replace(GROUP, devices=4 * GROUP.devices, ranks=4)
    four = size(asked(), group, POINTS, error=0.0)
    assert four.gpus.value == -(-one.gpus.value // group.devices) * group.devices
    assert four.at_load.running <= one.at_load.running


def test_intervals_choose_again():
    """10 % of error, +-17 %: 23.5 ms still hold at 4 at once; 35 % off, 1 at once has to do."""
    request = asked(rate=20.0, goals=Goals(tpot_s=25e-3))
    narrow, wide = (size(request, GROUP, POINTS, error) for error in (0.1, 0.35))
    assert size(asked(goals=Goals(tpot_s=10.1e-3)), GROUP, POINTS, 0.1).gpus.high is None
    factor = math.exp(1.606 * 0.1)
    assert narrow.gpus.high == 2 * math.ceil(20 / (0.8 * 2 / factor))
    assert wide.gpus.high == 2 * math.ceil(20 / (0.8 * 1 / math.exp(1.606 * 0.35)))
    assert wide.gpus.low <= narrow.gpus.low <= narrow.gpus.value <= narrow.gpus.high


def test_errors_add_in_squares():
    kernels = Origin(kind="composed", text="", error=0.06)
    whole = Origin(kind="measured", text="", error=0.03, whole_runtime=True)
    composed = dataclasses.replace(kernels, error=0.2)
    assert relative_error(kernels, "vllm", None, 1.0, version="0.19") == SERVER_ERROR
    assert relative_error(composed, "sglang", None, 1.0) == 0.2  # holds the server's own
    drafted = relative_error(whole, "sglang", None, 1.5, running=2)
    assert drafted == pytest.approx(math.hypot(0.03, SERVER_ERROR, DRAFTING_ERROR))
    assert relative_error(whole, "rooftree", None, 1.0) == 0.03
    assert server_overheads("rooftree", whole).layer_s == 0
    assert server_overheads("vllm", whole).layer_s == 0 < server_overheads("vllm", whole).step_s
    assert server_overheads("vllm", kernels).layer_s > 0


@pytest.fixture(scope="module")
def plain() -> Plan:
    return plan(asked(), SHIPPED)


@pytest.fixture(scope="module")
def speculative() -> Plan:
    return plan(asked(acceptance="gsm8k"), SHIPPED)


def test_plain_and_speculative_plans_of_shipped_profiles(plain, speculative):
    both = (sorted(one.options, key=lambda o: o.gpu) for one in (plain, speculative))
    for before, after in zip(*both, strict=True):
        assert before.origin.kind == "composed"
        assert 2 < before.points[0].tpot_s / after.points[0].tpot_s < 8.5
        nodes = [p.nodes for p in after.points if p.running in (1, 4, 16, 64)]
        assert nodes == sorted(nodes, reverse=True) and nodes[0] > nodes[-1]
        assert all(p.shape == "plain" for p in before.points)
    out_of_reach = plan(asked(goals=Goals(tpot_s=1e-4)), SHIPPED)
    assert out_of_reach.best is None
    for option in out_of_reach.options:
        assert "goals are not reached" in option.problem and "with 1 at once" in option.nearest
    for found in (plain, speculative, out_of_reach):
        record = json.loads(json.dumps(found.as_dict(), allow_nan=False))
        assert record["options"][0]["origin"]["kind"] == "composed"


def test_one_plain_step_is_the_profiles_and_vllm_has_no_tree(plain, speculative):
    """H100: 6.5 ms of kernels, by vLLM's factor of products, 36 layers, and a step on the host."""
    option = next(o for o in plain.options if o.gpu == "h100-sxm")
    vllm = engine_overheads("vllm")
    expected = vllm.products * 6.5e-3 + 36 * vllm.layer_s + vllm.step_s + vllm.sequence_s
    assert option.points[0].tpot_s == pytest.approx(expected, rel=0.03)
    shapes = {point.shape for option in speculative.options for point in option.points}
    assert shapes <= {"plain", "chain"}
    assert all(choice.tree for choice in speculative.best.with_trees[:8])


@pytest.mark.parametrize(("h100", "l40s", "best"), [(2.0, 9.0, "h100-sxm"), (99.0, 0.5, "l40s")])
def test_the_cheapest_comes_first(h100, l40s, best):
    prices = {"h100-sxm": h100, "l40s": l40s}
    assert plan(asked(prices=prices), SHIPPED).best.gpu == best


@given(rates=st.lists(st.floats(0.1, 500), min_size=2, max_size=2), error=st.floats(0, 0.3))
def test_cost_rises_with_the_rate(rates, error):
    request = asked(prices={"h100-sxm": 2.5}, goals=Goals(tpot_s=30e-3))
    requests = [dataclasses.replace(request, rate=rate) for rate in sorted(rates)]
    low, high = (size(one, GROUP, POINTS, error).cost_per_hour.value for one in requests)
    assert low <= high


def test_an_unknown_gpu_and_a_model_that_does_not_fit_are_named(tmp_path):
    short = Traffic(prompt_tokens=64, output_tokens=64)
    request = asked(gpus=("h1000", "h100-sxm"), most_running=1024, traffic=short)
    planned, unknown = plan(request, SHIPPED).options
    assert unknown.problem == "no known device is called 'h1000'" and "h100" in unknown.nearest
    assert planned.sizing is not None and 512 < planned.points[-1].running <= 1024
    # Qwen3-8B on a made-up 16 GB card: its weights alone are 16.4 GB
    path = tmp_path / "small.yaml"
    altered(shipped("l40s"), device={"memory_bytes": 2**34}).to_yaml(path)
    with_room = plan(asked(gpus=(str(path), "h100-sxm")), SHIPPED)
    small = with_room.options[-1]
    assert "does not fit" in small.problem
    assert small.nearest.startswith("--tp 2")
    assert with_room.best.gpu == "h100-sxm"


def test_a_missing_profile_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("costmodel.planning.sources.operators_installed", lambda: False)
    with pytest.raises(InputError, match="no profile") as composed:
        plan(asked(gpus=("h100-sxm",), degrees=(2,)), SHIPPED)
    assert "pip install 'rooftree[operators]'" in composed.value.hint
    fp8 = Precision(weights="fp8")
    with pytest.raises(InputError, match="weights fp8") as quantised:
        plan(asked(gpus=("h100-sxm",), precision=fp8), SHIPPED)
    assert "operators" in quantised.value.hint
    large = asked(target="meta-llama/Llama-3.1-70B-Instruct", gpus=("h100-sxm",))
    with pytest.raises(InputError, match=r"141 GB on each device, which has 8\d GB"):
        plan(large, SHIPPED)  # that much are its weights in bfloat16


OTHER = str(shipped_directory() / "l40s" / "qwen3-4b.bfloat16.kernels.tp1.yaml")
MANY = {"acceptance": "gsm8k", "policy": ServingPolicy.parse("fixed:9999"), "engine": "rooftree"}


@pytest.mark.parametrize(("changes", "said"), [
    ({"traffic": Traffic(prompt_tokens=50000, output_tokens=10)}, "holds 40960"),
    ({"gpus": ("h101", "h102")}, "h101"), ({"gpus": (OTHER,)}, "another target"),
    (MANY, "known to 511"),
    ({"policy": ServingPolicy.parse("chain")}, "needs acceptance"),
    ({"policy": ServingPolicy.parse("plain"), "acceptance": "0.8"}, "accepts nothing"),
    ({"gpus": ()}, "which GPUs"), ({"gpus": ("l40s", "l40s")}, "twice"),
    ({"prices": {"b200": 1.0}}, "not among"), ({"prices": {"l40s": 0.0}}, "above 0"),
    ({"rate": 0.0}, "rate"), ({"rate": float("nan")}, "rate"),
    ({"utilisation": 1.2}, "utilisation"), ({"servers": 0}, "at least one server"),
    ({"engine_version": "new"}, "no version"),
    ({"engine": "sglang", "engine_version": "0.5"}, "no version"),
    ({"most_running": 0}, "at least one"), ({"degrees": (3,)}, "not planned"),
    ({"engine": "ollama"}, "no engine"),
    ({"precision": Precision(weights="int3")}, "no weights are called 'int3'"),
    ({"precision": Precision(cache="int3")}, "no cache is called 'int3'"),
    ({"goals": Goals.parse("ttft.p97=1s")}, "p97 is no goal"),
    ({"goals": Goals.parse("ttft.p95=1s")}, "needs a simulation"),
    ({"goals": Goals.parse("tpot=0ms")}, "must be a time above 0"),
    ({"simulation": SimulationSettings(requests=99)}, "too few for percentiles"),
    ({"simulation": SimulationSettings(seed=-1)}, "seed must be 0"),
    ({"simulation": SimulationSettings(variation=-1)}, "variation of lengths must be 0"),
    (MANY | {"engine": "sglang"}, "sglang verifies chains only"),
    ({"traffic": Traffic(prompt_tokens=0, output_tokens=1)}, "at least 1"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(changes, said):
    with pytest.raises(InputError, match=said):
        plan(asked(**changes), SHIPPED)


def test_shapes_cross_over_where_the_policies_alone_do():
    request = asked(gpus=("h100-sxm",), acceptance="gsm8k", engine="rooftree")
    option = plan(request, SHIPPED).best
    chains = plan(dataclasses.replace(request, policy=ServingPolicy(kind="chain")), SHIPPED).best
    last = next(r.last for r in shape_ranges(option.choices) if r.shape == "tree")
    assert 8 <= last <= 48
    for choice, chain in zip(option.choices, chains.points, strict=True):
        assert choice.best.tpot_s <= 1.04 * chain.tpot_s
        if choice.running <= last:
            assert choice.best.shape == "tree" and choice.best.tpot_s <= chain.tpot_s * 1.01
        assert choice.speedup(choice.best) > 1


def typed(**given) -> PlanRequest:
    """The request of a command line with these options."""
    context = click.Context(command)
    defaults = {one.name: one.get_default(context) for one in command.params}
    defaults = {name: one if type(one) in (str, int) else None for name, one in defaults.items()}
    usual = {"target": "qwen3-8b", "gpus": "h100-sxm", "rate": "5", "prompt_tokens": 9}
    parted = {"output_tokens": 9, "engine": "vllm", "temperature": 0, "prices": ()}
    return request_from_options(defaults | usual | parted | given)


def test_texts_of_the_command_line():
    assert parse_rate("300/min") == 5
    assert parse_rate("5") == parse_rate("5/s") == 5
    request = typed(gpus="h100-sxm,l40s", prices=("H100 SXM=2", "l40s=3"), slo="tpot=30ms, ttft=1s")
    assert request.prices == {"h100-sxm": 2, "l40s": 3}
    assert request.goals == Goals(tpot_s=0.03, ttft_s=1.0)
    assert parse_parallel("2,1,2") == {"degrees": (1, 2)}
    for arguments in ("--data-parallel-size 4 --enable-expert-parallel", "-dp=4 -ep"):
        given = parse_parallel(f"2 {arguments}")
        assert given == {"degrees": (2,), "data_parallel": 4, "expert_parallel": True}


@pytest.mark.parametrize("wrong", [
    lambda: parse_rate("5/fortnight"), lambda: parse_rate("many"), lambda: parse_servers("a few"),
    lambda: parse_parallel("two"), lambda: parse_parallel("2 --data-parallel-size"),
    lambda: typed(prices=("h100",)), lambda: typed(prices=("h100=1", "h100=2")),
])  # fmt: skip
def test_wrong_texts_are_refused(wrong):
    with pytest.raises(InputError):
        wrong()
