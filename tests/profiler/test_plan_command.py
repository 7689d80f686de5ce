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
