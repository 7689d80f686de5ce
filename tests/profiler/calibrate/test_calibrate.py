"""A real calibration of a tiny target, and everything around it that can go wrong."""

import errno
import json
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from costmodel.errors import InputError, MeasurementError, ProfileError
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore
from decoder.model.loading import load_model
from decoder.model.making import make_target
from decoder.profiling.measured_profile import profile_key
from profiler.calibrate import decoder as source
from profiler.calibrate import run as module
from profiler.calibrate.files import check_writable, keep_samples
from profiler.calibrate.points import DecoderPoints
from profiler.calibrate.run import CalibrationListener, calibrate
from profiler.calibrate.source import CalibrationSettings
from profiler.measure.journal import Journal
from tests.tiny_folder import fake_clock, isolate, listing, write_config

pytestmark = pytest.mark.cpu_kind

CONTEXTS = (32, 128)


def settings(folder: Path, **changed) -> CalibrationSettings:
    fields = {
        "target": str(folder / "tiny"), "device": "cpu", "dtype": "float32", "contexts": CONTEXTS,
        "max_nodes": 15, "time_budget_s": 30.0,
    }  # fmt: skip
    return CalibrationSettings(**(fields | changed))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A machine and a clock to oneself, and a target whose config is all there is."""
    write_config(tmp_path / "tiny")
    fake_clock(monkeypatch)
    return isolate(monkeypatch, tmp_path)


class Calibrated:
    """One real calibration: nothing is faked but where files lie."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        write_config(folder / "tiny")
        self.home = folder / "home"
        patch.setenv("ROOFTREE_HOME", str(self.home))
        patch.setattr("tempfile.tempdir", str(folder / "locks"))
        self.said: list[str] = []
        listener = CalibrationListener(say=self.said.append)
        wanted = settings(folder, time_budget_s=15.0)
        self.result = calibrate(wanted, listener)
        loaded = load_model(wanted.target, dtype=torch.float32, device=torch.device("cpu"))
        self.target = make_target(loaded)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield Calibrated(tmp_path_factory.mktemp("calibrated"), patch)


@pytest.mark.slow
class TestReal:
    def test_three_files_and_a_whole_profile_that_the_decoder_finds(self, done):
        path = done.result.path
        assert path.name == "tiny.float32.packed.tp1.yaml"
        made = [path.with_suffix(suffix) for suffix in (".yaml", ".png", ".samples.jsonl")]
        assert {*listing(done.home)} == {str(one.relative_to(done.home)) for one in made}
        assert done.result.picture == path.with_suffix(".png")
        found = ProfileStore().find(profile_key(done.target))
        assert (found.path, found.warnings) == (path, ())
        profile = Profile.from_yaml(done.result.path)
        assert profile.to_yaml() == done.result.profile.to_yaml()
        made = profile.provenance
        assert (made.kind, made.note) == ("measured", "random weights")
        assert made.points == len(profile.surface.rows) == 2 * 8
        assert made.samples >= 10 * made.points
        assert 0 < made.duration_s < 60  # fits between the samples count
        assert set(zip(profile.surface.rows, profile.surface.context, strict=True)) == {
            (rows, context) for rows in DecoderPoints(contexts=(1, 2), max_nodes=15).rows
            for context in CONTEXTS
        }  # fmt: skip
        stages = profile.stages
        assert stages.plain.context == CONTEXTS
        assert stages.build.nodes == stages.accept.nodes == (1, 3, 7, 15)
        assert stages.commit.tokens == (1, 2, 4)
        assert stages.prefill.tokens == (64,)
        assert list(profile.drafters) == ["ngram"]
        plain_s = np.array(stages.plain.median_s)
        assert np.all(plain_s > np.max(stages.build.median_s))

    def test_it_was_checked_on_points_held_out_and_the_raw_samples_are_its_own(self, done):
        profile = done.result.profile
        shapes = profile.held_out.rows, profile.held_out.context
        plan = DecoderPoints(contexts=CONTEXTS, max_nodes=15)
        drawn = [{(t.size, t.context) for t in plan.held_out(most)} for most in range(2, 17)]
        assert set(zip(*shapes, strict=True)) in drawn
        predicted = profile.verify_calibration().predict_s(*shapes)
        np.testing.assert_allclose(profile.held_out.predicted_s, predicted, rtol=1e-3)
        error = np.abs(predicted / np.array(profile.held_out.measured_s) - 1)
        assert profile.held_out.error.median == pytest.approx(np.median(error), rel=0.01)
        assert profile.held_out.error.median < 0.5
        assert 0 <= profile.regret.mean <= profile.regret.worst <= 1
        lines = done.result.path.with_suffix(".samples.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines[1:]]
        used = profile.provenance.samples + profile.provenance.discarded_samples
        assert used <= len(records)  # warm-up samples are in neither
        counts = Counter((r["size"], r["context"]) for r in records if r["kind"] == "verify")
        surface = profile.surface
        for rows, context, median_s, n in zip(
            surface.rows, surface.context, surface.median_s, surface.n, strict=True
        ):
            seconds = sorted(
                r["seconds"] for r in records
                if (r["kind"], r["size"], r["context"]) == ("verify", rows, context)
            )  # fmt: skip
            # Each is divided by the machine's pace at its time, which is near 1.
            assert 0.7 * seconds[0] <= median_s <= 1.4 * seconds[-1]
            assert n <= counts[rows, context]
        header = json.loads(lines[0])["header"]
        assert header["contexts"] == list(CONTEXTS)
        assert header["target"] == done.target.architecture.hash


class TestBeforeMeasuring:
    @pytest.fixture(autouse=True)
    def nothing_is_measured(self, home, monkeypatch):
        def measured(*arguments, **options):
            raise AssertionError("it began to measure")

        monkeypatch.setattr(module, "run_sweep", measured)
        monkeypatch.setattr("decoder.profiling.measured_profile.measure_peaks", measured)

    @pytest.mark.parametrize(("changed", "message"), [
        ({"drafter": "./oracle"}, r"there is no folder \./oracle"),
        ({"contexts": (64,)}, "two contexts"),
        ({"max_nodes": 2}, "max nodes must be 3"),
        ({"contexts": (64, 250)}, "266 tokens, rows included, exceeds the 256 positions"),
        ({"contexts": None, "max_nodes": 200}, "256 positions, too few for the usual"),
    ])  # fmt: skip
    def test_settings_that_cannot_be(self, tmp_path, changed, message):
        with pytest.raises(InputError, match=message):
            calibrate(settings(tmp_path, **changed))
        assert [name for name in listing(tmp_path) if name.startswith("home")] == []

    def test_default_contexts_are_cut_to_the_target(self, tmp_path, monkeypatch):
        write_config(tmp_path / "tiny", max_position_embeddings=512)

        def workload(target, drafter, *, capacity, **options):
            raise InputError(f"capacity {capacity}")

        monkeypatch.setattr(source, "Workload", workload)
        with pytest.raises(InputError, match="capacity 272"):  # 256 + 16
            calibrate(settings(tmp_path, contexts=None))

    @pytest.mark.parametrize("name", ["profile.png", "profile", "profile.yaml.txt"])
    def test_an_output_of_another_kind(self, tmp_path, name):
        """The picture would take its place, or no lookup would find it."""
        with pytest.raises(InputError, match=r"file name ending in \.yaml"):
            calibrate(settings(tmp_path, output=tmp_path / name))


def test_a_check_of_the_place_leaves_nothing_behind(tmp_path):
    check_writable(tmp_path / "new" / "profile.yaml")
    assert listing(tmp_path) == {}
    (tmp_path / "victim").write_text("precious")
    for name in (".rooftree-writable", "profile.yaml", ".profile.yaml.tmp"):
        (tmp_path / "new" / name).symlink_to(tmp_path / "victim")
    check_writable(tmp_path / "new" / "profile.yaml")
    assert (tmp_path / "victim").read_text() == "precious"


def full(source, place):
    if not Path(place).exists():
        Path(place).write_bytes(b"a part")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("function", ["shutil.copyfile", "os.replace"])
def test_a_full_disk_leaves_the_old_samples(tmp_path, monkeypatch, function):
    (tmp_path / "a.samples.jsonl").write_text("old")
    journal = Journal(tmp_path / "run.jsonl", {"run": 1})
    monkeypatch.setattr(function, full)
    with pytest.raises(InputError, match=r"not its raw samples: No space left.*Free some"):
        keep_samples(journal.path, tmp_path / "a.yaml")
    monkeypatch.undo()
    assert (tmp_path / "a.samples.jsonl").read_text() == "old"
    assert sorted(listing(tmp_path)) == ["a.samples.jsonl", "run.jsonl"]


@pytest.mark.slow
class TestFailures:
    def test_too_short_a_time_keeps_what_was_measured(self, home, tmp_path):
        with pytest.raises(MeasurementError, match="--time-budget"):
            calibrate(settings(tmp_path, time_budget_s=1e-6))
        (journal,) = listing(home)
        assert journal.startswith("journals/") and "cpu." in journal
        result = calibrate(settings(tmp_path))
        assert result.resumed_samples == 1
        assert not any(name.startswith("journals") for name in listing(home))

    def test_a_profile_that_cannot_be_written_loses_no_sample(self, home, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            no_space = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr("costmodel.io.os.replace", Mock(side_effect=no_space))
            with pytest.raises(ProfileError, match="the disk is full"):
                calibrate(settings(tmp_path))
        (journal,) = listing(home)
        assert journal.startswith("journals/")
        assert calibrate(settings(tmp_path)).resumed_samples > 50

    def test_a_busy_machine_is_named(self, home, tmp_path, monkeypatch):
        busy = {"busy_processes": [{"pid": 7, "name": "miner", "core_share": 0.8}]}
        monkeypatch.setattr("profiler.measure.machine.observe", lambda: busy)
        said: list[str] = []
        result = calibrate(settings(tmp_path), CalibrationListener(say=said.append))
        assert result.profile.provenance.busy_processes == ("miner",)
        assert any("miner (process 7) is using 80% of a core" in warning for warning in said)
        assert any("miner" in warning for warning in result.warnings)
