"""`rooftree calibrate` as a user meets it: killed, interrupted, started twice, resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from profiler import cli
from profiler.commands.options import Duration, NamedValue
from tests.conftest import CALIBRATED
from tests.tiny_folder import fake_clock, isolate, listing, write_config

ROOT = Path(__file__).parents[3]


class Place:
    """A data directory with a tiny target, and calls of the command there."""

    def __init__(self, folder: Path, home: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.home, self._capture = folder, home, capture
        self.arguments = [
            "calibrate", "--target", str(write_config(folder / "tiny")), "--device", "cpu",
            "--dtype", "float32", "--contexts", "32,128", "--max-nodes", "15",
        ]  # fmt: skip

    def run(self, *more: str) -> tuple[int, str, list[str]]:
        """In this process: exit code, stdout and the lines on stderr."""
        exit_code = cli.run([*self.arguments, *more])
        captured = self._capture.readouterr()
        return exit_code, captured.out, captured.err.splitlines()

    def start(self, samples: int) -> subprocess.Popen[str]:
        """In a process of its own, returned once that many samples are in the journal."""
        process = subprocess.Popen(
            [sys.executable, "-c", "from profiler.cli import main; main()", *self.arguments],
            cwd=ROOT, env=os.environ | {"TMPDIR": str(self.folder / "locks")},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A shell that runs the tests in the background has Ctrl-C ignored for all below it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        deadline_s = time.monotonic() + 600
        while self.samples() < samples:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return process

    def samples(self) -> int:
        """Whole samples in the journal."""
        journals = list(self.home.glob("journals/*.jsonl"))
        return max(journals[0].read_bytes().count(b"\n") - 1, 0) if journals else 0


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    (tmp_path / "locks").mkdir()
    return Place(tmp_path, isolate(monkeypatch, tmp_path), capsys)


@pytest.fixture
def clocked(place, monkeypatch):
    """The same with a clock that gives every point three samples."""
    fake_clock(monkeypatch)
    return place


@pytest.mark.slow
def test_a_kill_loses_no_sample(place, monkeypatch):
    with place.start(samples=20) as process:
        process.kill()
    kept = place.samples()
    assert process.returncode == -signal.SIGKILL
    assert kept >= 20
    before = listing(place.home)
    fake_clock(monkeypatch, samples=30)
    exit_code, _, lines = place.run()
    assert exit_code in CALIBRATED
    assert f"went on from {kept} samples of an unfinished run" in lines
    assert not list(place.home.glob("journals/*"))
    (sidecar,) = place.home.glob("*/*.samples.jsonl")
    before_lines = next(iter(before.values())).splitlines()[: kept + 1]
    assert sidecar.read_bytes().splitlines()[: kept + 1] == before_lines


@pytest.mark.slow
def test_ctrl_c_and_a_second_run_at_the_same_time(place, monkeypatch):
    with place.start(samples=5) as process:
        exit_code, out, lines = place.run()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert (exit_code, out, len(lines)) == (4, "", 1)
    assert re.match(rf"rooftree: another measurement of .* \(process {process.pid}, ", lines[0])
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "rooftree: interrupted"
    assert "Traceback" not in errors
    kept = place.samples()
    assert kept >= 5
    assert not list(place.home.glob("*/*.yaml"))
    fake_clock(monkeypatch, samples=30)
    exit_code, _, lines = place.run()
    assert exit_code in CALIBRATED
    assert f"went on from {kept} samples of an unfinished run" in lines


@pytest.mark.slow
def test_an_unfinished_run_of_other_settings_is_dropped_and_told(clocked, monkeypatch):
    with monkeypatch.context() as patch:
        fake_clock(patch, interrupt_after=40)
        exit_code, _, lines = clocked.run()
    assert (exit_code, lines[-1]) == (130, "rooftree: interrupted")
    assert clocked.samples() == 40
    exit_code, out, lines = clocked.run("--max-nodes", "7", "--json")
    assert exit_code == 0
    assert any(re.match(r"dropped: .*max_nodes was 15, is 7", line) for line in lines)
    assert json.loads(out)["resumed_samples"] == 0


def test_a_busy_machine_gives_no_profile_to_use_and_keeps_the_older_one(place, monkeypatch):
    fake_clock(monkeypatch)
    exit_code, out, _ = place.run()
    assert exit_code == 0
    stored = next(place.home.rglob("*.yaml"))
    before = stored.read_bytes()
    assert out.splitlines()[-1].startswith(("good: `rooftree gen", "usable: `rooftree gen"))

    fake_clock(monkeypatch, spread=30.0)
    exit_code, out, _ = place.run("--json")
    record = json.loads(out)
    assert (exit_code, record["grade"]) == (5, "do not use")
    assert stored.read_bytes() == before
    aside = Path(record["path"])
    assert aside.parent == stored.parent / "aside"
    assert aside.with_suffix(".samples.jsonl").is_file() and Path(record["picture"]).is_file()
    assert "the new one is worse (do not use" in record["aside"]
    exit_code, out, _ = place.run()
    assert exit_code == 5
    assert "The same command with `--replace` replaces it." in out
    assert out.splitlines()[-1].startswith("do not use: stop what else runs, then `rooftree cal")

    assert place.run("--replace")[0] == 5
    assert stored.read_bytes() != before


def test_json_on_stdout_is_stable(clocked):
    exit_code, out, lines = clocked.run("--json")
    assert exit_code == 0
    assert lines[0].startswith("tiny (random weights, float32) on ")
    record = json.loads(out)
    assert sorted(record) == [
        "aside", "grade", "next", "path", "picture", "profile", "resumed_samples", "schema_version",
        "skipped", "unmeasured", "verdict", "warnings",
    ]  # fmt: skip
    assert Path(record["path"]).is_file()
    assert Path(record["picture"]).is_file()
    assert record["profile"]["provenance"]["kind"] == "measured"
    assert "Choosing the tree size from this profile costs" in record["verdict"]
    assert record["unmeasured"] == record["skipped"] == []


@pytest.mark.parametrize(("option", "value", "message"), [
    ("--time-budget", "soon", "'soon' is not a duration; write 30s, 2m or 1h"),
    ("--time-budget", "0s", "is not a duration"),
    ("--time-budget", "-3s", "is not a duration"),
    ("--contexts", "64;128", "is not a list of whole numbers, as 256,1024"),
    ("--contexts", "0,64", "is not a list of whole numbers"),
    ("--contexts", "", "is not a list of whole numbers"),
    ("--batch", "1.5", "is not a list of whole numbers"),
    ("--max-nodes", "2", "--max-nodes"),
    ("--runtime", "fast", "--runtime"),
    ("url", "http://127.0.0.1:1", "rooftree: Give options after 'url'."),
])  # fmt: skip
def test_options_that_make_no_sense(place, option, value, message):
    exit_code, out, lines = place.run(option, value)
    assert (exit_code, out, len(lines)) == (2, "", 1)
    assert lines[0].startswith("rooftree: ")
    assert message in lines[0]
    assert not place.home.exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("45", 45.0), ("2m", 120.0), ("0.5h", 1800.0)]
)
def test_durations(text, seconds):
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize(("text", "value"), [
    ("a=true", True), ("a=[1, 2]", [1, 2]), ("a=b=c", "b=c"), ("a=False", False),
    ("a=None", None), ("a=NaN", "NaN"), ("a=" + "[" * 20_000, "[" * 20_000),
    ("a=" + "1" * 5_000, "1" * 5_000),
], ids=range(8))  # fmt: skip
def test_what_is_no_json_is_a_text(text, value):
    """Also where Python's own reader has no end of levels, or takes what JSON has not."""
    assert NamedValue().convert(text, None, None) == ("a", value)
