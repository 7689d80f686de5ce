"""`rooftree plan` from the command line: tables, JSON, exports, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from costmodel.catalog import find_device

ASKED = [
    "plan", "--target", "Qwen/Qwen3-8B", "--gpus", "h100-sxm,l40s", "--prompt-tokens", "1000",
    "--output-tokens", "400", "--rate", "5/s",
]  # fmt: skip
GSM8K = [*ASKED, "--acceptance", "gsm8k"]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


def test_the_table_names_sizes_and_provenance_and_a_gpu_is_one_row(run, monkeypatch):
    code, out, err = run(*GSM8K, "--price", "l40s=1,h100-sxm=2.5", "--details")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert any(row[:1] == ["l40s"] and "composed," in row for row in rows)
    assert re.fullmatch(r"Best: \d .*l40s tp 1, chain \d+, .* USD an hour", out.splitlines()[0])
    busy = [*GSM8K[: GSM8K.index("5/s")], "60/s", *GSM8K[GSM8K.index("5/s") + 1 :]]
    close = run(*busy, "--price", "l40s=1,h100-sxm=4")[1].splitlines()[0]
    assert "; too close to call: " in close
    assert "bastion table 1, qwen3-8b" in err
    assert "(assumptions)" in err and "5 layers of the target's width" in err
    # DFlash by hand: 5 layers of 193 M weights, a projection of 84 M, 4 kB a layer and token
    monkeypatch.setenv("COLUMNS", "80")
    asked = [word.replace("l40s", "rtx-pro-6000-workstation") for word in GSM8K]
    out, err = run(*asked, "--price", "h100-sxm=2.5")[1:]
    assert [line for line in (out + err).splitlines() if len(line) > 80] == []
    for gpu, price in (("h100-sxm", "2.50"), ("rtx-pro-6000-workstation", "-")):
        [row] = [line.split() for line in out.splitlines() if line.startswith(gpu)]
        assert row[1:3] == ["1", "1"] and row[-1] == price and len(row) == 11
    assert "it takes 2.1 GB and 20 kB a cached token" in " ".join(err.split())
    assert "one server" not in out and "--details" in err


def test_without_acceptance_the_published_range_answers(run):
    """The speed-ups are those of plans with the data sets, as many requests at once."""
    out, record = run(*ASKED)[1], json.loads(run(*ASKED, "--json")[1])
    best = record["options"][0]
    at = best["sizing"]["at_load"]["running"]
    least, most = record["published_speedups"].items()
    for dataset, (label, speedup) in (("alpaca", least), ("math500", most)):
        options = json.loads(run(*ASKED, "--acceptance", dataset, "--json")[1])["options"]
        pays = next(one["pays"] for one in options if one["gpu"] == best["gpu"])["by_concurrency"]
        drafting = next(row["best_speedup"] for row in pays if row["running"] == at)
        assert speedup == pytest.approx(drafting, rel=0.02) and f"for {dataset}, T = 0" in label
        assert f"{speedup:.2f}x ({dataset})" in out


def test_all_gpus_are_planned_and_those_without_a_price_are_no_rivals(run, monkeypatch):
    """A few stand for all, without operator tables, whose reading takes long."""
    few = {slug: find_device(slug) for slug in ("rtx-4090", "h100-sxm", "mi300x", "t4", "l40s")}
    monkeypatch.setattr("costmodel.planning.request.load_devices", lambda: few)
    monkeypatch.setattr("costmodel.planning.sources.operators_installed", lambda: False)
    everything = ["all" if word == "h100-sxm,l40s" else word for word in GSM8K]
    code, out, _ = run(*everything, "--price", "l40s=1")
    best = out.splitlines()[0]
    assert code == 0 and "l40s" in best and "too close" not in best
    assert few.keys() <= {line.split()[0] for line in out.splitlines() if line.strip()}


def test_the_picture_has_a_curve_a_gpu_with_the_costs_of_the_plan(run, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        "profiler.report.drawing.save_figure", lambda figure, path: figures.append(figure) or path
    )
    asked = [*ASKED, "--price", "l40s=1,h100-sxm=2.5", "--plot", str(tmp_path / "a.svg"), "--json"]
    code, out, err = run(*asked)
    assert code == 0 and err == f"picture: {tmp_path / 'a.svg'}\n"
    curves = iter(figures[0].axes[0].lines)
    for option, price in zip(json.loads(out)["options"], (1, 2.5), strict=True):
        for (x, y), point in zip(next(curves).get_xydata(), option["by_concurrency"], strict=True):
            tokens_per_hour = 400 * 3600 * point["requests_per_s"]
            assert (x, y) == pytest.approx((1e3 * point["tpot_s"], 1e6 * price / tokens_per_hour))
        sizing = option["sizing"]
        star = [1e3 * sizing["tpot_s"]["value"], sizing["cost_per_million"]["value"]]
        assert next(curves).get_xydata()[0] == pytest.approx(star)


def test_goals_out_of_reach_fail_and_an_export_keeps_to_drafter_engine_and_policy(run):
    code, out, err = run(*ASKED, "--slo", "tpot=1ms")
    assert code == 2
    assert "nearest: tpot" in out and "no option holds the goals" in err
    assert run(*ASKED, "--slo", "tpot=1ms", "--export", "vllm")[0] == 2
    ngram = [*ASKED, "--acceptance", "0.7", "--drafter", "ngram", "--export", "vllm"]
    _, out, _ = run(*ngram)
    assert '"method": "ngram"' in out and "DFlash" not in out and "per 1M tokens" not in out
    code, _, err = run(*GSM8K, "--export", "vllm", "--engine", "sglang")
    assert code == 2 and "the plan is for sglang" in err
    _, out, _ = run(*GSM8K, "--export", "transformers", "--policy", "fixed:32")
    assert 'policy="fixed:32"' in out


@pytest.mark.slow
def test_a_percentile_that_is_missed_asks_for_more_gpus(run):
    asked = ["l40s" if word == "h100-sxm,l40s" else word for word in ASKED[:-1]]
    asked += ["20/s", "--price", "l40s=1"]
    code, out, _ = run(*asked, "--slo", "tpot=30ms,ttft.p95=220ms")
    assert code == 0
    found = re.search(r"l40s tp 1: (\d+) GPUs hold the means, but not ttft.p95; (\d+) hold", out)
    assert int(found[1]) < int(found[2])
    assert re.search(rf"l40s +1 +{found[2]} .*held +{found[2]}\.00", out)
    code, out, err = run(*asked, "--simulate", "100", "--slo", "ttft.p50=1ms")
    assert code == 2
    assert re.search(r"l40s tp 1: no fleet of up to \d+ GPUs holds ttft.p50; nearest:", out)
    assert "no option holds the goals in the simulation" in err


def test_a_trace_gives_lengths_rate_and_arrivals(run, refused, tmp_path):
    lines = [f"{0.2 * i:.3f},{500 + i},{100 + i % 50}" for i in range(150)]
    trace = str(tmp_path / "trace.csv")
    Path(trace).write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    asked = ["plan", "--target", "Qwen/Qwen3-8B", "--gpus", "h100-sxm", "--trace", trace]
    record = json.loads(run(*asked, "--simulate", "--json")[1])
    assert record["request"]["requests_per_s"] == pytest.approx(5.0)
    assert record["request"]["prompt_tokens"] == pytest.approx(574.5)
    assert record["simulation"]["requests"] == 150 and record["simulation"]["trace"]
    record = json.loads(run(*asked, "--rate", "50/s", "--json")[1])
    assert record["request"]["requests_per_s"] == 50.0 and record["simulation"] is None
    assert "the trace has lengths of its own, but" in refused(*ASKED, "--trace", trace)


RANGES = r"trees to (\d+), chains"


def test_the_plan_begins_with_the_best_and_whether_it_pays(run):
    asked = [*GSM8K, "--engine", "rooftree", "--details"]
    best, first, *rest = run(*asked)[1].splitlines()
    assert (
        best.startswith("Best: ") and first.startswith("Does it pay? ") and re.search(RANGES, first)
    )
    pays = json.loads(run(*asked, "--json")[1])["options"][0]["pays"]
    last = int(re.search(RANGES, first)[1])
    trees = [row["running"] for row in pays["by_concurrency"] if row["best"] == "tree"]
    assert pays["best"][0] == {"shape": "tree", "first": 1, "last": max(trees)} and last >= 4
    row = next(row for row in pays["by_concurrency"] if row["running"] == 1)
    shown = next(line.split() for line in rest if line.split()[:1] == ["1"])
    assert f"{row['tree_speedup']:.2f}x" in shown and f"({row['tree_nodes']})" in shown


@pytest.mark.slow
def test_other_engines_are_planned_without_trees_and_told_of_them(run):
    code, out, _ = run(*GSM8K, "--details")
    assert code == 0
    assert re.search(r"Trees, which vllm does not verify: in rooftree trees to \d+", out)
    table = out[out.index("one server") :]
    assert re.search(r"chain \d", table) and not re.search(r"tree \d", table)
    code, _, err = run(*GSM8K, "--policy", "fixed:32")
    assert code == 2 and "vllm verifies chains only" in err


STORED = Path(__file__).parents[3] / "lab" / "studies" / "results" / "bench.json"


def test_bad_input_is_one_line(refused):
    for more, message in (
        (["--acceptance", str(STORED)], "SmolLM2-135M-Instruct, not of Qwen/Qwen3-8B"),
        (["--tp", "3"], "not planned"), (["--trace", "missing.csv"], "there is no such file"),
    ):  # fmt: skip
        assert message in refused(*ASKED, *more)
    assert "--output-tokens, --rate missing" in refused(*ASKED[:-4])
