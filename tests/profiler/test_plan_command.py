"""`rooftree plan` from the command line: every format, the pictures, and what it refuses."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import sys

import pytest

from profiler.cli import run

ASKED = [
    "plan", "--target", "Qwen/Qwen3-8B", "--gpus", "h100-sxm,l40s", "--prompt-tokens", "1000",
    "--output-tokens", "400", "--rate", "5/s",
]  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def no_own_profiles(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))


def test_the_table_names_sizes_intervals_and_provenance(capsys):
    assert run([*ASKED, "--acceptance", "gsm8k", "--price", "l40s=1,h100-sxm=2.5"]) == 0
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines()]
    assert any(row[:1] == ["l40s"] and "composed," in row for row in rows)
    assert "bastion table 1, qwen3-8b" in shown.err
    assert "80 %" in shown.err and "5 layers of the target's width" in shown.err


def test_json_and_csv_say_the_same(capsys):
    assert run([*ASKED, "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert run([*ASKED, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["gpu"] for row in rows] == [option["gpu"] for option in record["options"]]
    for row, option in zip(rows, record["options"], strict=True):
        assert float(row["tpot_s"]) == option["sizing"]["tpot_s"]["value"]
        assert int(row["gpus"]) == option["sizing"]["gpus"]["value"]


def test_the_page_needs_nothing_else(capsys):
    assert run([*ASKED, "--acceptance", "gsm8k", "--format", "html"]) == 0
    page = capsys.readouterr().out
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', page)[1]
    assert base64.b64decode(picture).startswith(PNG)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script" not in page and "h100-sxm" in page


def test_the_picture_is_a_png(tmp_path, capsys):
    path = tmp_path / "plan.png"
    assert run([*ASKED, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(PNG)
    assert str(path) in capsys.readouterr().err
    assert run([*ASKED, "--plot", str(tmp_path / "missing" / "plan.png")]) == 2


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


def test_the_planner_is_imported_only_to_plan():
    """In a fresh interpreter, for this one has imported it already."""
    import subprocess

    code = (
        "import sys; from profiler.cli import run; run(['--help']);"
        "print([m for m in sys.modules if m.startswith('costmodel.capacity')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip().endswith("[]")


SIMULATED = ["--price", "l40s=1,h100-sxm=2.5", "--simulate", "200", "--length-variation", "0.3"]


def test_simulated_percentiles_are_in_every_format(capsys):
    """The same seed, so the same figures in each of them; another seed has others."""
    asked = [*ASKED, *SIMULATED, "--slo", "tpot=40ms,ttft.p95=2s"]
    assert run([*asked, "--format", "json"]) == 0
    simulation = json.loads(capsys.readouterr().out)["simulation"]
    assert (simulation["requests"], simulation["seed"], simulation["trace"]) == (200, 0, False)
    assert run([*asked, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert run(asked) == 0
    table = [line.split() for line in capsys.readouterr().out.split("simulated:")[1].splitlines()]
    assert run([*asked, "--format", "html"]) == 0
    page = capsys.readouterr().out
    for option in simulation["options"]:
        planned, (row,) = option["planned"], [r for r in rows if r["gpu"] == option["gpu"]]
        for metric in ("waiting", "ttft", "tpot"):
            assert float(row[f"{metric}_p99_s"]) == planned[metric]["p99"]["value"]
        assert float(row["simulated_utilisation"]) == planned["utilisation"]
        assert int(row["gpus_that_hold_all_goals"]) == option["enough"]["gpus"]
        shown = next(line for line in table if line[:1] == [option["gpu"]])
        for percent in ("p50", "p95", "p99"):
            cell = f"{planned['ttft'][percent]['value'] * 1e3:.0f}"
            assert cell in shown and cell in page
    assert run([*asked, "--format", "json", "--seed", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["simulation"]["options"] != simulation["options"]


def test_a_percentile_that_is_missed_asks_for_more_gpus(capsys):
    """A percentile as a goal is simulated without being asked for."""
    asked = [*ASKED[:-1], "20/s", *SIMULATED[:2], "--slo", "tpot=30ms,ttft.p95=200ms"]
    assert run(asked) == 0
    shown = capsys.readouterr().out
    found = re.search(r"l40s tp 1: (\d+) GPUs hold the means, but not ttft.p95; (\d+) hold", shown)
    assert int(found[1]) < int(found[2])
    assert re.search(rf"l40s +1 +{found[2]} .*held +{found[2]}\.00", shown)


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
    assert run([*asked, "--simulate", "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["request"]["requests_per_s"] == pytest.approx(5.0)
    assert record["request"]["prompt_tokens"] == pytest.approx(574.5)
    assert record["simulation"]["requests"] == 150 and record["simulation"]["trace"]
    assert run([*asked, "--rate", "50/s", "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["request"]["requests_per_s"] == 50.0 and record["simulation"] is None


def test_a_request_beyond_the_window_is_named(capsys, tmp_path):
    """Qwen3-8B holds 40,960 tokens: 40,900 are simulated, 41,900 are not."""
    path = tmp_path / "trace.csv"
    write_trace(path)
    path.write_text(path.read_text() + "40,40000,900\n")
    asked = ["plan", "--target", "Qwen/Qwen3-8B", "--gpus", "l40s", "--trace", str(path)]
    assert run([*asked, "--simulate"]) == 0
    capsys.readouterr()
    path.write_text(path.read_text() + "41,40000,1900\n")
    assert run([*asked, "--simulate"]) == 2
    assert "request 152 of the trace has 41900 tokens" in capsys.readouterr().err


def test_simulating_without_the_extra_names_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert run([*ASKED, "--simulate"]) == 2
    assert "pip install 'rooftree[plan]'" in capsys.readouterr().err
    assert run(ASKED) == 0  # means need nothing


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--simulate", "10"], "too few"),
        (["--seed", "1"], "--seed is of a simulation"),
        (["--length-variation", "1"], "--length-variation is of a simulation"),
        (["--simulate", "--seed", "-1"], "seed must be 0 or more"),
        (["--slo", "ttft.p97=1s"], "p97 is no goal"),
        (["--trace", "TRACE"], "the trace has lengths of its own, but --prompt-tokens"),
        (["--trace", "missing.csv"], "cannot be read"),
    ],
)
def test_bad_simulations_are_one_line(more, said, capsys, tmp_path):
    trace = write_trace(tmp_path / "trace.csv")
    assert run([*ASKED, *(trace if word == "TRACE" else word for word in more)]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert shown[-1].startswith("rooftree: ") and said in shown[-1]


def test_capitals_of_gpus_do_not_matter_to_prices(capsys):
    asked = [word.replace("h100-sxm,l40s", "H100-SXM") for word in ASKED]
    assert run([*asked, "--price", "h100-sxm=2.5"]) == 0
    assert re.search(r"H100-SXM .* 2\.50 ", capsys.readouterr().out)


def test_an_export_without_acceptance_says_that_nothing_is_drafted(capsys):
    assert run([*ASKED, "--export", "vllm"]) == 0
    shown = capsys.readouterr()
    assert "--speculative-config '" not in shown.out and "no acceptance data" in shown.err


def test_traffic_that_is_not_said_is_asked_for(capsys):
    assert run(ASKED[:-4]) == 2
    assert "--output-tokens, --rate missing" in capsys.readouterr().err
