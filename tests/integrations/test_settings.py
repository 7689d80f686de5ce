"""Engines' settings: what an engine would read from a plan, and what it cannot run."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from costmodel.catalog import load_targets
from costmodel.errors import InputError
from costmodel.planning.acceptance import find_acceptance
from costmodel.planning.drafting import DraftCost, drafter_kind
from costmodel.planning.exports import checkpoint_of, export_plan, served_name, step_s
from costmodel.planning.forwards import ForwardSeconds, TargetForward
from costmodel.planning.request import PlanRequest, Precision, ServingPolicy
from costmodel.planning.result import Plan, PlanOption
from costmodel.planning.search import make_server, plan_profile
from costmodel.planning.servers import Interval, OperatingPoint, Sizing
from costmodel.planning.traffic import Traffic
from costmodel.profile.lookup import named_profile
from integrations.draft_lengths.pilot import DraftTable
from integrations.sglang.settings import steps_table, sum_table
from integrations.vllm.settings import context_table
from tests.costmodel.planning.conftest import point

QWEN = "Qwen/Qwen3-8B"
TRAFFIC = Traffic(prompt_tokens=1000, output_tokens=400)
ONE = Interval(value=1.0, low=1.0, high=1.0)


def chain(running: int, nodes: int) -> OperatingPoint:
    return point(running, "chain" if nodes else "plain", nodes)


POINTS = (chain(1, 9), chain(2, 9), chain(4, 5), chain(8, 0), chain(64, 0))


def made(engine: str = "vllm", drafter: str | None = "dflash", load: int = 1, **changed) -> Plan:
    """A plan for two GPUs whose best, of tp 2, runs POINTS, and at the load `POINTS[load]`."""
    option = PlanOption(gpu="h100-sxm", device="NVIDIA H100 80GB HBM3", tensor_parallel=2)
    points = changed.pop("points", POINTS)
    ones = dict.fromkeys(("gpus", "tpot_s", "ttft_s"), ONE)
    unknown = ("cost_per_hour", "cost_per_million", "watts", "joules_per_token")
    sizing = Sizing(at_most=points[-1], at_load=points[load], **ones, **dict.fromkeys(unknown))
    best = dataclasses.replace(
        option,
        tensor_parallel=changed.pop("tp", 2),
        points=points,
        sizing=sizing,
        drafter=drafter and DraftCost(name=drafter, label=drafter),
    )
    acceptance = None if drafter is None else "0.7"
    where = {"target": QWEN, "gpus": ("h100-sxm",), "traffic": TRAFFIC, "rate": 5.0}
    request = PlanRequest(**where, engine=engine, acceptance=acceptance, **changed)
    other = dataclasses.replace(option, gpu="l40s", tensor_parallel=1)
    return Plan(request=request, options=(best, other), acceptance=None, notes=())


def config_of(text: str) -> dict:
    return json.loads(re.search(r"--speculative-config '(.*)'", text)[1])


def test_vllm_gets_a_config_that_it_can_read_with_the_size_of_each_batch():
    text = export_plan(made(), "vllm")
    assert config_of(text) == {
        "method": "dflash",
        "model": "z-lab/Qwen3-8B-DFlash-b16",
        "num_speculative_tokens": 9,
        "num_speculative_tokens_per_batch_size": [[1, 3, 9], [4, 7, 5], [8, 64, 0]],
    }
    assert "--tensor-parallel-size 2" in text and "--max-num-seqs 64" in text
    assert "vLLM 0.32" in text
    config = config_of(export_plan(made(drafter="ngram", load=2), "vllm"))
    assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 9)
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 3, 9], [4, 7, 5], [8, 64, 0]]
    assert "model" not in config
    text = export_plan(made("rooftree", "ngram", tp=1), "transformers")
    assert 'drafter="ngram"' in text and "DFlash" not in text


def test_lengths_fall_in_the_fewest_steps_and_say_their_loss():
    """Before: 12, 11, 15, 11, 9, 8, 7, 5, 7, ...; no falling schedule of one step is as near."""
    profile = named_profile("h100-sxm/qwen3-8b")[1]
    request = dataclasses.replace(made().request, acceptance="mt_bench")
    plan = plan_profile(request, profile, 8)
    text, choices = export_plan(plan, "vllm"), plan.best.choices
    table = config_of(text)["num_speculative_tokens_per_batch_size"]
    lengths = [n for _, _, n in table]
    assert lengths == sorted(set(lengths), reverse=True) and len(lengths) == 3

    one_size = dataclasses.replace(request, engine="sglang")
    assert "lengths fall" not in export_plan(plan_profile(one_size, profile, 8), "sglang")

    def losses(length_at) -> list[float]:
        times = [(one.chains_s, length_at(one.running)) for one in choices]
        return [times_s.get(n, 9.0) / min(times_s.values()) - 1 for times_s, n in times]

    mine = losses(lambda at: next(n for first, last, n in table if first <= at <= last))
    assert f"takes {np.mean(mine):.1%} longer" in text and f"at most {max(mine):.1%} (" in text
    for first, then in itertools.combinations_with_replacement(range(15, -1, -1), 2):
        for split in (one.running for one in choices):
            assert max(losses(lambda at: first if at < split else then)) > max(mine)  # noqa: B023


def test_sglang_counts_the_root_and_tensorrt_llm_gets_both_ends_of_each_range():
    text = export_plan(made("sglang", load=2), "sglang")
    assert "--speculative-num-draft-tokens 6" in text
    assert "--speculative-algorithm DFLASH" in text and "--max-running-requests 64" in text
    assert "SGLang 0.5.23" in text
    with pytest.raises(InputError, match="is called 'ollama'"):
        export_plan(made(), "ollama")
    with pytest.raises(InputError, match="settings of 2 devices"):
        export_plan(made("rooftree"), "transformers")
    text = export_plan(made("trtllm", "ngram"), "tensorrt-llm")
    assert "  draft_len_schedule: {1: 9, 3: 9, 4: 5, 7: 5, 8: 0, 64: 0}" in text
    assert "decoding_type: NGram" in text and "--tp_size 2" in text
    with pytest.raises(InputError, match="with the drafter specblock"):
        export_plan(made("trtllm", "specblock"), "tensorrt-llm")
    cached = made("trtllm", "ngram", precision=Precision(cache="fp8"))
    assert "kv_cache_config:\n  dtype: fp8\n" in export_plan(cached, "tensorrt-llm")


@pytest.mark.parametrize(
    ("engine", "drafter"), [("sglang", "ngram"), ("vllm", "ngram+dflash"), ("sglang", "specblock")]
)
def test_drafters_that_an_engine_cannot_run_as_planned_are_refused(engine, drafter):
    with pytest.raises(InputError, match=re.escape(f"with the drafter {drafter}")):
        export_plan(made(engine, drafter, load=2), engine)


def test_the_planned_drafter_and_the_hub_id_are_named(tmp_path):
    for name in ("me/my-eagle3", "EAGLE3-LLaMA3.1-Instruct-8B"):
        assert config_of(export_plan(made(drafter=name), "vllm"))["model"] == name
        assert f"--speculative-draft-model-path {name}" in export_plan(
            made("sglang", name), "sglang"
        )
    assert checkpoint_of("my-dflash-demo", QWEN) == "my-dflash-demo"
    assert checkpoint_of("dflash", "me/my-model") == "PATH_OF_A_DFLASH_DRAFTER"
    assert checkpoint_of("dflash@block=4", QWEN) == "z-lab/Qwen3-8B-DFlash-b16@block=4"
    assert checkpoint_of("dspark", QWEN) == "PATH_OF_A_DSPARK_DRAFTER"
    assert [drafter_kind(name) for name in ("dflash2", "z/Qwen3-8B-DFlash2-b8@block=4")] == 2 * [
        "dflash2"
    ]
    assert served_name("qwen3-8b") == QWEN
    assert served_name("me/my-model") == "me/my-model"
    known = load_targets()["HuggingFaceTB/SmolLM2-135M-Instruct"]
    folder = tmp_path / "SmolLM2-135M-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(known.hf_config))
    assert served_name(str(folder)) == known.name
    (folder / "config.json").write_text(json.dumps(known.hf_config | {"num_hidden_layers": 7}))
    assert served_name(str(folder)) == str(folder)


@pytest.mark.parametrize(
    ("planned", "engine"), [("sglang", "vllm"), ("vllm", "transformers"), ("trtllm", "sglang")]
)
def test_a_plan_for_another_engine_is_refused(planned, engine):
    with pytest.raises(InputError, match=f"the plan is for {planned}") as raised:
        export_plan(made(planned), engine)
    assert "--engine" in raised.value.hint


def test_plain_plans_export_no_speculation_and_precision_is_exported_or_refused():
    for engine in ("vllm", "sglang"):
        plain = {"points": (chain(1, 0), chain(8, 0)), "drafter": None}
        for policy, why in (("plain", "the policy is plain"), ("auto", "no acceptance data")):
            text = export_plan(made(engine, policy=ServingPolicy(kind=policy), **plain), engine)
            options = [line for line in text.splitlines() if not line.startswith("#")]
            assert not any("speculative" in line for line in options)
            assert not options[-1].endswith("\\")
            assert why in text
    precision = Precision(weights="fp8_dynamic", cache="fp8")
    for engine in ("vllm", "sglang"):
        text = export_plan(made(engine, precision=precision), engine)
        assert "--quantization fp8" in text and "--kv-cache-dtype fp8" in text
    with pytest.raises(InputError, match="fp8_dynamic"):
        export_plan(made("rooftree", tp=1, precision=precision), "transformers")
    stored = export_plan(made(precision=Precision(weights="nvfp4")), "vllm")
    assert "weights are nvfp4" in stored


@pytest.mark.parametrize(("policy", "said"), [
    ("auto", 'policy="bastion"'), ("chain", 'policy="chain", max_nodes=9'),
    ("fixed:32", 'policy="fixed:32"'),
])  # fmt: skip
def test_the_own_decoder_gets_a_script_that_compiles(policy, said):
    plan = made("rooftree", tp=1, policy=ServingPolicy.parse(policy))
    text = export_plan(plan, "transformers")
    compile(text, "export", "exec")
    assert said in text and 'drafter="z-lab/Qwen3-8B-DFlash-b16"' in text


# SGLang's DSpark tables: read as SGLang reads them, they give the server's own steps.


@pytest.fixture(scope="module")
def server():
    forward = TargetForward(named_profile("h100-sxm/qwen3-8b")[1])
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


def test_steps_a_second_are_those_of_whole_drafts_without_prompts(server):
    table = steps_table(server, TRAFFIC, most_running=6, drafted=3)
    assert table.values["sample_batch_tokens"] == [1, 2, 4, 8, 16, 24]
    assert table.values["max_batch_tokens"] == 24
    shapes = [(1, 1), (1, 2), *((running, 4) for running in (1, 2, 4, 6))]
    rates = [1 / step_s(server, TRAFFIC, *shape) for shape in shapes]
    assert table.values["sample_steps_per_sec"] == pytest.approx(rates, rel=1e-5)
    alone = step_s(server, TRAFFIC, 4, 1)
    # The same context, and prompts all the time.
    long = Traffic(prompt_tokens=1199, output_tokens=2)
    assert step_s(server, long, 4, 1) == pytest.approx(alone)

    class Slow:
        name, label, layers, host_s = "slow", "slow", 0, 0.5

        def draft_s(self, forward, batch, context, tokens):
            return ForwardSeconds()

    drafting = dataclasses.replace(server, drafter=Slow())
    assert step_s(drafting, TRAFFIC, 4, 1) > 1.9


def test_lengths_by_batch_and_context_are_those_of_the_most_tokens_a_second():
    forward = TargetForward(named_profile("h100-sxm/qwen3-8b")[1])
    request = dataclasses.replace(made(drafter="dflash").request, acceptance="gsm8k")
    drafting = make_server(request, forward, find_acceptance("gsm8k", QWEN))
    rows = context_table(drafting, range(16), most_running=200)
    table = DraftTable(rows, range(16))
    for running in (1, 5, 64, 200):
        for context in (300, 900, 3000):
            held = [r for r in rows if r[0] <= running <= r[1] and r[2] <= context <= r[3]]
            assert [table.tokens(running, context)] == [row[4] for row in held]
            traffic = Traffic(prompt_tokens=context, output_tokens=1)
            rates = [
                drafting.acceptance.committed("chain", k)
                / step_s(drafting, traffic, running, k + 1, drafts=k > 0)
                for k in range(16)
            ]
            assert rates[held[0][4]] >= 0.97 * max(rates)
    longer = {tuple(row[:2]): row[4] for row in rows}  # of the longest contexts
    assert all(longer[row[0], row[1]] >= row[4] for row in rows) and len(longer) < len(rows)
