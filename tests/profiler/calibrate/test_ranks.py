"""`rooftree calibrate` under torchrun: two processes in step, one profile, one error line."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from costmodel.errors import DeviceError, MeasurementError, ProfileError
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore
from decoder.model.ranks import ALONE, Ranks
from profiler import cli
from profiler.calibrate import ranks as parallel
from profiler.calibrate.memory import OutOfMemory, Rehearsed
from profiler.calibrate.ranks import EndedElsewhere, check_same_device, shared_journal
from profiler.launch import TORCHRUN, launched_rank, launched_size
from tests.profiler.calibrating_ranks import SLOWEST_S, TOO_LARGE
from tests.tiny_folder import listing, write_config
from tests.torchrun import torchrun


class Calibrated:
    """What two processes left behind that calibrated together three times."""

    def __init__(self, folder: Path) -> None:
        (folder / "locks").mkdir()
        write_config(folder / "tiny")
        write_config(folder / "uneven", num_key_value_heads=1)
        self.ended = torchrun("tests.profiler.calibrating_ranks", str(folder))
        self.codes = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
        self.home = folder / "home"
        self.files = sorted(listing(self.home))
        self.left = [name for name in listing(folder) if name.startswith("failed")]
        self.lines = self.ended.stderr.splitlines()

    def samples(self, kind: str) -> list[dict[str, Any]]:
        (path,) = self.home.glob("*/*.samples.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        return [record for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    return Calibrated(tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
def test_a_degree_that_does_not_divide_is_one_line(done: Calibrated) -> None:
    refusals = [line for line in done.lines if "cannot share" in line]
    assert refusals == [
        "rooftree: 2 processes cannot share uneven: 4 heads, 1 KV heads and an FFN of 48 columns "
        "are not all multiples of 2. Degrees that divide them: 1 (--nproc-per-node)."
    ]
    assert done.codes == [[2, 0], [2, 0]]


@pytest.mark.slow
def test_one_profile_of_their_degree(done: Calibrated) -> None:
    path = Path(json.loads(done.ended.stdout)["path"])
    assert path.name == "tiny.float32.eager.tp2.yaml"
    stem = f"{path.parent.name}/tiny.float32.eager.tp2"
    assert [name for name in done.files if not name.startswith("journals")] == [
        f"{stem}.png", f"{stem}.samples.jsonl", f"{stem}.yaml"
    ]  # fmt: skip
    profile = Profile.from_yaml(path)
    assert (profile.runtime.tensor_parallel, profile.device.threads) == (2, 1)
    assert profile.provenance.note == (
        "random weights; 2 processes on one CPU, the interconnect between them not recorded"
    )
    assert profile.roofline().tensor_parallel == 2


@pytest.mark.slow
def test_the_lookup_takes_it_at_that_degree_alone(done: Calibrated) -> None:
    store = ProfileStore([done.home])
    (stored,) = store.list()
    assert store.find(stored.profile.key).path == stored.path
    alone = stored.profile.model_copy(
        update={"runtime": stored.profile.runtime.model_copy(update={"tensor_parallel": 1})}
    )
    with pytest.raises(ProfileError, match="tensor_parallel 2, here 1"):
        store.find(alone.key)


@pytest.mark.slow
def test_a_sample_is_the_slowest_processs(done: Calibrated) -> None:
    seconds = [record["seconds"] for record in done.samples("verify")]
    assert len(seconds) > 40
    assert SLOWEST_S <= min(seconds) <= max(seconds) <= 1.01 * SLOWEST_S


@pytest.mark.slow
def test_a_sample_that_was_disturbed_in_the_second_process_does_not_count(
    done: Calibrated,
) -> None:
    disturbed = Counter(record["disturbance"] for record in done.samples("verify"))
    assert set(disturbed) == {"", "a busy neighbour"}
    (stored,) = ProfileStore([done.home]).list()
    assert stored.profile.provenance.discarded_samples >= disturbed["a busy neighbour"]


@pytest.mark.slow
def test_memory_that_the_second_process_lacks_skips_the_point_for_both(done: Calibrated) -> None:
    record = json.loads(done.ended.stdout)
    skipped = {(task["kind"], task["size"], task["context"]) for task in record["skipped"]}
    assert skipped == {("verify", TOO_LARGE, 32), ("verify", TOO_LARGE, 128)}
    assert TOO_LARGE not in record["profile"]["surface"]["rows"]
    assert sum("Tried to allocate 1 GiB" in line for line in done.lines) == 2


@pytest.mark.slow
def test_a_failure_of_the_second_process_ends_both_with_one_line(done: Calibrated) -> None:
    assert done.ended.returncode != 0
    assert sum(line.endswith("goes on") for line in done.lines) == 2
    errors = [line for line in done.lines if line.startswith("rooftree:")]
    assert errors[1:] == ["rooftree: the second device is broken"]
    assert any("exitcode  : 5 " in line for line in done.lines)  # in torchrun's report
    (journal,) = (name for name in done.files if name.startswith("journals"))
    assert journal.endswith(".float32.eager.tp2.jsonl")
    assert done.left == []


class TestBeforeTheGroup:
    """Errors that every process has by itself: the first tells them."""

    @pytest.fixture
    def second(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        slept: list[float] = []
        for name in TORCHRUN:
            monkeypatch.setenv(name, "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(time, "sleep", slept.append)
        monkeypatch.setattr(parallel, "_groups", 0)
        return slept

    def test_the_second_waits_and_says_nothing(
        self, second: list[float], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.run(["calibrate", "--max-nodes", "1"]) == 2
        assert capsys.readouterr().err == ""
        assert second == [parallel.FIRST_REPORTS_S]

    @pytest.mark.parametrize(("name", "value"), [("RANK", "0"), ("WORLD_SIZE", "1"), ("RANK", "")])
    def test_others_speak(
        self,
        second: list[float],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        name: str,
        value: str,
    ) -> None:
        monkeypatch.setenv(name, value)
        assert cli.run(["calibrate", "--max-nodes", "1"]) == 2
        assert capsys.readouterr().err.startswith("rooftree: ")
        assert second == []


def test_another_processs_error_is_an_exit_code_and_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(*arguments: object) -> None:
        raise EndedElsewhere(5)

    monkeypatch.setattr("profiler.calibrate.calibrate.calibrate", ended)
    assert cli.run(["calibrate"]) == 5
    assert capsys.readouterr().err == ""


def test_different_devices_are_refused() -> None:
    class Unlike(Ranks):
        def collect(self, value: Any) -> list[Any]:
            return [value, "NVIDIA L40S"]

    check_same_device("NVIDIA H200", ALONE)
    with pytest.raises(DeviceError, match="different devices: NVIDIA H200, NVIDIA L40S"):
        check_same_device("NVIDIA H200", Unlike(0, 2))


def test_only_the_first_process_opens_the_journal() -> None:
    class Told(Ranks):
        def decide(self, function: Any) -> Any:
            assert function() is None
            return Path("run.jsonl"), [{"seconds": 1.0}]

    def opened() -> Any:
        raise AssertionError("opened")

    journal = shared_journal(opened, Told(1, 2))
    with journal:
        journal.append({"seconds": 2.0})
    assert (journal.path, journal.records) == (Path("run.jsonl"), [{"seconds": 1.0}])


class TestRehearsal:
    class Target:
        """Whether calls are rehearsed, and two ranks of which the other tells what it is given."""

        class Ranks:
            def __init__(self, other: str) -> None:
                self.other = other

            def any_text(self, text: str) -> str:
                return text or self.other

        def __init__(self, other: str = "") -> None:
            self.rehearsed = False
            self.ranks = self.Ranks(other)

        def rehearsal(self) -> Any:
            return self

        def __enter__(self) -> None:
            self.rehearsed = True

        def __exit__(self, *error: object) -> None:
            self.rehearsed = False

    def test_the_first_call_alone_is_rehearsed(self) -> None:
        target, calls = self.Target(), []
        run = Rehearsed(lambda: calls.append(target.rehearsed), target)
        run()
        run()
        assert calls == [True, False, False]

    def test_what_another_has_no_memory_for_is_not_begun(self) -> None:
        target, calls = self.Target("out of memory there"), []
        run = Rehearsed(lambda: calls.append(target.rehearsed), target)
        with pytest.raises(OutOfMemory, match="out of memory there"):
            run()
        assert calls == [True]

    def test_a_shortage_later_on_ends_the_run(self) -> None:
        target = self.Target()

        def short() -> None:
            if not target.rehearsed:
                raise OutOfMemory("out of memory")

        with pytest.raises(DeviceError, match="that other processes had begun") as raised:
            Rehearsed(short, target)()
        assert not isinstance(raised.value, MeasurementError)


def test_without_torchrun_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    assert (launched_size(), launched_rank()) == (1, 0)
