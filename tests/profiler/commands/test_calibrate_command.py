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

from profiler.commands.options import NamedValue, duration
from tests.conftest import CALIBRATED
from tests.tiny_folder import fake_clock, isolate, listing, write_config

ROOT = Path(__file__).parents[3]


class Place:
    """A data directory with a tiny target, and calls of the command there."""

    def __init__(self, folder: Path, home: Path, run) -> None:
        self.folder, self.home, self._run = folder, home, run
        self.arguments = [
            "calibrate", "--target", str(write_config(folder / "tiny")), "--device", "cpu",
            "--dtype", "float32", "--contexts", "32,128", "--max-nodes", "15",
        ]  # fmt: skip

    def run(self, *more: str) -> tuple[int, str, list[str]]:
        """In this process: exit code, stdout and the lines on stderr."""
        exit_code, out, err = self._run(*self.arguments, *more)
        return exit_code, out, err.splitlines()

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
        journals = list(self.home.glob("journals/*.jsonl"))
        return max(journals[0].read_bytes().count(b"\n") - 1, 0) if journals else 0


@pytest.fixture
def place(tmp_path, monkeypatch, run):
    return Place(tmp_path, isolate(monkeypatch, tmp_path), run)


@pytest.mark.slow
def test_ctrl_c_a_second_run_at_the_same_time_and_a_kill(place, monkeypatch):
    with place.start(samples=5) as process:
        exit_code, out, lines = place.run()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert (exit_code, out, len(lines)) == (4, "", 1)
    assert re.match(rf"rooftree: another measurement of .* \(process {process.pid}, ", lines[0])
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "rooftree: interrupted"
    assert "Traceback" not in errors
    interrupted = place.samples()
    assert interrupted >= 5
    assert not list(place.home.glob("*/*.yaml"))
    with place.start(samples=interrupted + 20) as process:
        process.kill()
    kept = place.samples()
    assert process.returncode == -signal.SIGKILL and kept >= interrupted + 20
    (journal,) = listing(place.home).values()
    fake_clock(monkeypatch, samples=30)
    exit_code, _, lines = place.run()
    assert exit_code in CALIBRATED
    assert f"went on from {kept} samples of an unfinished run" in lines
    assert not list(place.home.glob("journals/*"))
    (sidecar,) = place.home.glob("*/*.samples.jsonl")
    assert sidecar.read_bytes().splitlines()[: kept + 1] == journal.splitlines()[: kept + 1]


@pytest.mark.slow
def test_an_unfinished_run_of_other_settings_is_dropped_and_told(place, monkeypatch):
    fake_clock(monkeypatch, interrupt_after=40)
    exit_code, _, lines = place.run()
    assert (exit_code, lines[-1]) == (130, "rooftree: interrupted")
    assert place.samples() == 40
    fake_clock(monkeypatch)
    exit_code, out, lines = place.run("--max-nodes", "7", "--json")
    assert exit_code == 0
    assert any(re.match(r"dropped: .*max_nodes was 15, is 7", line) for line in lines)
    assert json.loads(out)["resumed_samples"] == 0


def test_a_busy_machine_gives_no_profile_to_use_and_keeps_the_older_one(place, monkeypatch):
    fake_clock(monkeypatch)
    exit_code, out, lines = place.run("--json")
    record = json.loads(out)
    assert exit_code == 0 and lines[0].startswith("tiny (random weights, float32) on ")
    assert sorted(record) == [
        "aside", "grade", "next", "path", "picture", "profile", "resumed_samples", "schema_version",
        "skipped", "unmeasured", "verdict", "warnings",
    ]  # fmt: skip
    stored = Path(record["path"])
    before = stored.read_bytes()
    assert Path(record["picture"]).is_file() and record["grade"] in ("good", "usable")
    assert record["profile"]["provenance"]["kind"] == "measured"
    assert "Choosing the tree size from this profile costs" in record["verdict"]
    assert record["unmeasured"] == record["skipped"] == []

    fake_clock(monkeypatch, spread=30.0)
    busy = ("--time-budget", "2s")
    exit_code, out, _ = place.run(*busy)
    assert (exit_code, stored.read_bytes()) == (5, before)
    assert "the new one is worse (do not use" in " ".join(out.split())
    assert "The same command with `--replace` replaces it." in out
    assert out.splitlines()[-1].startswith("do not use: stop what else runs, then `rooftree cal")
    aside = {path.suffix for path in (stored.parent / "aside").iterdir()}
    assert aside >= {".yaml", ".png", ".jsonl"}

    exit_code, out, _ = place.run(*busy, "--replace", "--json")
    assert (exit_code, json.loads(out)["grade"]) == (5, "do not use")
    assert stored.read_bytes() != before


@pytest.mark.parametrize(("option", "value", "message"), [
    ("--time-budget", "soon", "'soon' is not a duration; write 30s, 2m or 1h"),
    ("--time-budget", "0s", "is not a duration"), ("--time-budget", "-3s", "is not a duration"),
    *(("--contexts", wrong, "is not a list of whole numbers") for wrong in ("64;8", "0,64", "")),
    ("--batch", "1.5", "is not a list of whole numbers, as "), ("--max-nodes", "2", "--max-nodes"),
    ("--runtime", "fast", "--runtime"), ("url", "http://127.0.0.1:1", "Give options after 'url'."),
])  # fmt: skip
def test_options_that_make_no_sense(refused, option, value, message):
    assert message in refused("calibrate", "--device", "cpu", option, value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("45", 45.0), ("2m", 120.0), ("0.5h", 1800.0)]
)
def test_durations(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize(("text", "value"), [
    ("a=true", True), ("a=[1, 2]", [1, 2]), ("a=b=c", "b=c"), ("a=False", False),
    ("a=None", None), ("a=NaN", "NaN"), ("a=" + "[" * 20_000, "[" * 20_000),
    ("a=" + "1" * 5_000, "1" * 5_000),
], ids=range(8))  # fmt: skip
def test_what_is_no_json_is_a_text(text, value):
    assert NamedValue().convert(text, None, None) == ("a", value)
