"""`rooftree plan` from the command line: tables, JSON, exports, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from profiler.cli import run

ASKED = [
    "plan", "--target", "Qwen/Qwen3-8B", "--gpus", "h100-sxm,l40s", "--prompt-tokens", "1000",
    "--output-tokens", "400", "--rate", "5/s",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_own_profiles(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "300")


def test_the_table_names_sizes_intervals_and_provenance(capsys):
    assert run([*ASKED, "--acceptance", "gsm8k", "--price", "l40s=1,h100-sxm=2.5"]) == 0
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines()]
    assert any(row[:1] == ["l40s"] and "composed," in row for row in rows)
    assert "bastion table 1, qwen3-8b" in shown.err
    assert "80 %" in shown.err and "5 layers of the target's width" in shown.err


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_exports_print_settings_only(engine, capsys):
    assert run([*ASKED, "--acceptance", "gsm8k", "--export", engine]) == 0
    shown = capsys.readouterr().out
    assert "Qwen/Qwen3-8B" in shown and "z-lab/Qwen3-8B-DFlash-b16" in shown
    assert "per 1M tokens" not in shown


def test_goals_out_of_reach_show_the_nearest_and_fail(capsys):
    assert run([*ASKED, "--slo", "tpot=1ms"]) == 2
    shown = capsys.readouterr()
    assert "nearest: tpot" in shown.out
    assert "no option holds the goals" in shown.err
    assert run([*ASKED, "--slo", "tpot=1ms", "--export", "vllm"]) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--slo", "speed=1"], "no goal is called"),
        (["--policy", "chain"], "needs acceptance data"),
        (["--policy", "magic"], "no policy is called"),
        (["--price", "b200=1"], "not among the GPUs"),
        (["--acceptance", "nonsense"], "no acceptance data is called"),
        (["--weights", "int3"], "no weights are called"),
        (["--tp", "3"], "not planned"),
        (["--acceptance", "0.8", "--drafter", "psychic"], "no drafter is called"),
    ],
)
def test_bad_input_is_one_line(more, said, capsys):
    assert run([*ASKED, *more]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert shown[-1].startswith("rooftree: ") and said in shown[-1]


SIMULATED = ["--price", "l40s=1,h100-sxm=2.5", "--simulate", "200"]


@pytest.mark.slow
def test_a_percentile_that_is_missed_asks_for_more_gpus(capsys):
    """A percentile as a goal is simulated without being asked for."""
    asked = [*ASKED[:-1], "20/s", *SIMULATED[:2], "--slo", "tpot=30ms,ttft.p95=200ms"]
    assert run(asked) == 0
    shown = capsys.readouterr().out
    found = re.search(r"l40s tp 1: (\d+) GPUs hold the means, but not ttft.p95; (\d+) hold", shown)
    assert int(found[1]) < int(found[2])
    assert re.search(rf"l40s +1 +{found[2]} .*held +{found[2]}\.00", shown)


@pytest.mark.slow
def test_percentiles_out_of_reach_fail_and_say_what_is_reached(capsys):
    assert run([*ASKED, *SIMULATED, "--slo", "ttft.p50=1ms"]) == 2
    shown = capsys.readouterr()
    assert re.search(
        r"h100-sxm tp 1: no fleet of up to \d+ GPUs holds ttft.p50; nearest:", shown.out
    )
    assert "no option holds the goals in the simulation" in shown.err


def write_trace(path, gap_s=0.2, prompt=500):
    lines = [f"{gap_s * i:.3f},{prompt + i},{100 + i % 50}" for i in range(150)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    return str(path)


def test_a_trace_gives_lengths_rate_and_arrivals(capsys, tmp_path):
    trace = write_trace(tmp_path / "trace.csv")
    asked = ["plan", "--target", "Qwen/Qwen3-8B", "--gpus", "h100-sxm", "--trace", trace]
    assert run([*asked, "--simulate", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["request"]["requests_per_s"] == pytest.approx(5.0)
    assert record["request"]["prompt_tokens"] == pytest.approx(574.5)
    assert record["simulation"]["requests"] == 150 and record["simulation"]["trace"]
    assert run([*asked, "--rate", "50/s", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["request"]["requests_per_s"] == 50.0 and record["simulation"] is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--simulate", "10"], "too few"),
        (["--slo", "ttft.p97=1s"], "p97 is no goal"),
        (["--trace", "TRACE"], "the trace has lengths of its own, but --prompt-tokens"),
        (["--trace", "missing.csv"], "there is no such file"),
    ],
)
def test_bad_simulations_are_one_line(more, said, capsys, tmp_path):
    trace = write_trace(tmp_path / "trace.csv")
    assert run([*ASKED, *(trace if word == "TRACE" else word for word in more)]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert shown[-1].startswith("rooftree: ") and said in shown[-1]


def test_a_gpu_and_its_price_may_have_different_names_of_one_device(capsys):
    asked = [word.replace("h100-sxm,l40s", "h100") for word in ASKED]
    assert run([*asked, "--price", "NVIDIA H100 80GB HBM3=2.5"]) == 0
    assert re.search(r"h100 .* 2\.50 ", capsys.readouterr().out)
    assert run([*asked, "--price", "h100-sxm=2.5,h100=2"]) == 2
    assert "the price of h100 is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("degree", ["1", "8"])
def test_latent_attention_is_the_reason_at_any_degree(capsys, degree):
    asked = ["--target", "DeepSeek-V3", "--gpus", "b200", "--tp", degree]
    assert run([*ASKED, *asked]) == 2
    assert "latent attention, whose operator tables are not read" in capsys.readouterr().err
    assert run(["compose", "--device", "b200", "--target", "DeepSeek-V3", "--tp", degree]) == 2
    assert "latent attention, whose operator tables are not read" in capsys.readouterr().err


def test_traffic_that_is_not_said_is_asked_for(capsys):
    assert run(ASKED[:-4]) == 2
    assert "--output-tokens, --rate missing" in capsys.readouterr().err


RANGES = r"trees to (\d+), chains"


def test_the_plan_begins_with_whether_it_pays(capsys):
    """The shapes of the sentence are those of the JSON record, and its crossings the table's."""
    asked = [*ASKED, "--acceptance", "gsm8k", "--engine", "rooftree"]
    assert run(asked) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Does it pay? ") and re.search(RANGES, first)
    assert run([*asked, "--json"]) == 0
    pays = json.loads(capsys.readouterr().out)["options"][0]["pays"]
    last = int(re.search(RANGES, first)[1])
    trees = [row["running"] for row in pays["by_concurrency"] if row["best"] == "tree"]
    assert pays["best"][0] == {"shape": "tree", "first": 1, "last": max(trees)} and last >= 4
    row = next(row for row in pays["by_concurrency"] if row["running"] == 1)
    shown = next(line.split() for line in rest if line.split()[:1] == ["1"])
    assert f"{row['tree_speedup']:.2f}x" in shown and f"({row['tree_nodes']})*" in shown


@pytest.mark.slow
def test_other_engines_are_planned_without_trees_and_told_of_them(capsys):
    assert run([*ASKED, "--acceptance", "gsm8k"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Trees, which vllm does not verify: in rooftree trees to \d+", shown)
    table = shown[shown.index("one server") :]
    assert "tree " not in table.replace("tree  ", "") and "chain" in table
    assert run([*ASKED, "--acceptance", "gsm8k", "--policy", "fixed:32"]) == 2
    assert "vllm verifies chains only" in capsys.readouterr().err


def test_an_export_is_of_the_drafter_that_was_planned(capsys):
    asked = [*ASKED, "--acceptance", "0.7", "--drafter", "ngram"]
    assert run([*asked, "--export", "vllm"]) == 0
    shown = capsys.readouterr().out
    assert '"method": "ngram"' in shown and "DFlash" not in shown
    assert run([*asked, "--export", "transformers"]) == 0
    assert 'drafter="ngram"' in capsys.readouterr().out
    assert run([*asked, "--export", "sglang"]) == 2
    assert "ngram" in capsys.readouterr().err


def test_an_export_keeps_to_engine_policy_and_gpu(capsys):
    asked = [*ASKED, "--acceptance", "gsm8k"]
    assert run([*asked, "--export", "vllm", "--engine", "sglang"]) == 2
    assert "the plan is for sglang" in capsys.readouterr().err
    assert run([*asked, "--export", "transformers", "--policy", "fixed:32"]) == 0
    assert 'policy="fixed:32"' in capsys.readouterr().out
    assert run([*ASKED, "--export", "vllm", "--policy", "plain"]) == 0
    shown = capsys.readouterr().out
    assert "the policy is plain" in shown and "planned for" in shown.splitlines()[0]


STORED = Path(__file__).parents[3] / "lab" / "studies" / "results" / "bench.json"


def test_a_stored_benchmark_is_refused_for_another_target(capsys):
    """It is of SmolLM2-135M-Instruct and n-grams, and says so."""
    assert run([*ASKED, "--acceptance", str(STORED)]) == 2
    assert "SmolLM2-135M-Instruct, not of Qwen/Qwen3-8B" in capsys.readouterr().err
