"""How a decoder finds its cost model: a profile, a probe, or the bare roofline."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from costmodel.catalog import Peaks
from costmodel.errors import InputError, ProfileError
from costmodel.io import shipped_directory
from costmodel.profile.profile import Profile
from costmodel.profile.schema import DrafterSection
from costmodel.profile.store import ProfileStore, user_directory
from decoder import device
from decoder.drafters.ngram import NgramDrafter
from decoder.model.runtime.capture import BUCKETS
from decoder.profiling import measured_profile as measuring
from decoder.profiling import probe
from decoder.profiling.measured_profile import profile_key
from decoder.profiling.probe import POINTS, quick_profile, time_drafter
from decoder.profiling.startup import ProfileChoice, calibrate_command, find_cost
from tests.conftest import DATA
from tests.costmodel.conftest import altered
from tests.decoder.models import PROMPT, decoder_of, greedy, random_model, target_of

pytestmark = pytest.mark.cpu_kind
MEASURING = "decoder.profiling.measured_profile.measure_peaks"
PEAKS = Peaks(flops_per_s=1e11, bytes_per_s=1e10)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty data directory, and peaks that need no measuring."""
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(MEASURING, lambda device, dtype: PEAKS)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def target():
    return target_of(random_model("llama-gqa", dtype=torch.float32))


@pytest.fixture(scope="module")
def probed(target):
    """A profile of the target; each test stores what it changes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MEASURING, lambda device, dtype: PEAKS)
        return quick_profile(target, NgramDrafter())


def files(folder):
    """Files below a folder, but for notes of structures that were found exact."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(str(p.relative_to(folder)) for p in paths if p.parent.name != "structures")


class TestFound:
    def test_a_stored_profile_is_used(self, target, probed):
        path = ProfileStore().save(probed)
        source = find_cost(target, NgramDrafter(), ProfileChoice(require=True))
        date = probed.provenance.created_utc[:10]
        assert source.line == f"profile {path} (quick, {date}, grade: usable)"
        assert source.profile is not None
        assert source.profile.to_yaml() == Profile.from_yaml(path).to_yaml()
        assert (source.warnings, source.cost.mode) == ((), "static")
        rows = np.array(probed.surface.rows)
        predicted = source.cost.cost.verify_s(rows - 1, np.array(probed.surface.context))
        expected = probed.verify_calibration().predict_s(rows, np.array(probed.surface.context))
        np.testing.assert_allclose(predicted, expected, rtol=1e-4)

    @pytest.mark.parametrize(("kind", "mode"), [
        ("composed", "affine"), ("transferred", "affine"), ("quick", "ema+calib"),
    ])  # fmt: skip
    def test_borrowed_profiles_are_corrected_by_floor_and_slope(self, target, probed, kind, mode):
        fields = {"kind": kind, "source": "somewhere else"}
        ProfileStore().save(altered(probed, provenance=fields, runtime={"torch": "1.0.0"}))
        source = find_cost(target, NgramDrafter(), ProfileChoice())
        assert source.cost.mode == mode

    def test_kernels_alone_get_the_floor_of_the_host(self, target, probed, monkeypatch):
        timed = Mock(return_value=[900.0, 20.0, 30.0])
        monkeypatch.setattr("decoder.profiling.startup.time_forward", timed)
        made = {"kind": "composed", "source": "operator tables"}
        runtime = {"kind": "kernels", "attention": "published"}
        kernels = altered(probed, runtime=runtime, provenance=made)
        ProfileStore().save(kernels)
        source = find_cost(target, NgramDrafter(), ProfileChoice())
        timed.assert_called_once_with(target, rows=1, context=256)
        assert source.cost.mode != "static"
        assert any("composed" in warning for warning in source.warnings)
        sizes = np.arange(64)
        np.testing.assert_array_equal(source.cost.cost.verify_s(sizes, 200), np.full(64, 30.0))
        assert source.cost.plain_s(200) == 30.0
        above = np.array([10**9])
        expected = kernels.verify_calibration().predict_s(above, 200)
        np.testing.assert_allclose(source.cost.cost.verify_s(above - 1, 200), expected, rtol=1e-4)


@pytest.fixture
def timed(monkeypatch):
    """Stands for `time_drafter`; the drafters that it was asked to time."""
    asked = []

    def time(drafter, target):
        asked.append(drafter.architecture_hash)
        seconds = {"median_s": [3e-3], "mad_s": [1e-4], "n": [5]}
        return DrafterSection(name=drafter.name, context=[1024], **seconds)

    monkeypatch.setattr("decoder.profiling.startup.time_drafter", time)
    monkeypatch.setattr("decoder.profiling.probe.time_drafter", time)
    monkeypatch.setattr("decoder.profiling.startup.now_utc", lambda: "2026-05-01T08:00:00Z")
    return asked


class TestDraftCosts:
    """What becomes of a draft cost that the profile lacks."""

    def without(self, probed, **changes):
        return altered(probed, **changes).model_copy(update={"drafters": {}})

    def test_it_is_timed_once_and_kept(self, target, probed, timed):
        path = ProfileStore().save(self.without(probed))
        before = Profile.from_yaml(path)
        first = find_cost(target, NgramDrafter(), ProfileChoice())
        assert first.line.endswith("; draft cost of ngram timed now and kept there")
        (kept,) = Profile.from_yaml(path).drafters.values()
        assert (kept.kind, kept.created_utc) == ("quick", "2026-05-01T08:00:00Z")
        assert kept.median_s == (3e-3,)
        assert Profile.from_yaml(path).model_copy(update={"drafters": {}}) == before
        again = find_cost(target, NgramDrafter(), ProfileChoice())
        assert again.line.endswith("; draft cost of ngram timed at a start on 2026-05-01")
        assert first.cost.draft_s(300) == again.cost.draft_s(300) == 3e-3
        assert timed == ["ngram"]

    @pytest.mark.parametrize("where", ["named", "shipped"])
    def test_a_file_of_others_stays(self, target, probed, timed, tmp_path, monkeypatch, where):
        path = ProfileStore([tmp_path / where]).save(self.without(probed))
        before, folder = path.read_bytes(), tmp_path / "shipped"
        monkeypatch.setattr("costmodel.profile.store.shipped_directory", lambda: folder)
        choice = ProfileChoice(path=path if where == "named" else None)
        source = find_cost(target, NgramDrafter(), choice)
        assert source.line == (
            f"profile {path} (quick, {probed.provenance.created_utc[:10]}, grade: usable); draft"
            " cost of ngram timed now, not kept: the profile is none of your own in"
            f" {user_directory()}"
        )
        assert source.cost.draft_s(300) == 3e-3
        assert path.read_bytes() == before
        assert not user_directory().exists()


def test_a_draft_is_timed_by_the_median_of_warm_calls(target, monkeypatch):
    ticks = []
    for seconds in (9.0, 0.5, 0.25, 4.0, 1.0, 0.125):  # the first call compiles
        start_s = ticks[-1] if ticks else 100.0
        ticks += [start_s, start_s + seconds]
    clock = iter(ticks)
    monkeypatch.setattr("decoder.device.perf_counter", lambda: next(clock))
    section = time_drafter(NgramDrafter(), target)
    assert (section.median_s, section.mad_s, section.n) == ((0.5,), (0.375,), (5,))
    assert (section.kind, section.created_utc) == (None, None)
    assert next(clock, None) is None


class TestNotFound:
    def test_a_quick_probe_is_saved_and_found_the_next_time(self, target, home):
        first = find_cost(target, NgramDrafter(), ProfileChoice())
        (name,) = [name for name in files(home) if name.endswith(".yaml")]
        path = home / name
        assert f"saved as {path}" in first.line
        assert f"`{calibrate_command(target)}` measures a full one" in first.line
        assert first.profile.provenance.kind == "quick"
        assert first.profile.provenance.points == len(POINTS)
        assert first.profile.key == profile_key(target)
        assert first.profile.key == profile_key(target)
        again = find_cost(target, NgramDrafter(), ProfileChoice(require=True))
        assert again.line.startswith(f"profile {path} (quick")
        assert again.cost.draft_s(100) > 0

    def test_without_calibration_the_bare_roofline_is_learnt_upon(self, home):
        model = random_model("llama-gqa", dtype=torch.float32)
        decoder = decoder_of(model, "bastion", profile=ProfileChoice(calibrate=False))
        assert decoder.cost_source.profile is None
        assert decoder.cost_source.cost.mode == "ema"
        assert "bare roofline" in decoder.profile_line
        result = decoder.generate(PROMPT, max_new_tokens=30)
        assert result.token_ids == greedy(model, PROMPT, 30)
        assert decoder.cost_source.cost.observations == result.stats.rounds
        assert decoder.cost_source.cost.bias > 1.0  # no forward reaches these peaks
        assert files(home) == []

    def test_a_required_profile_is_an_error_that_lists_what_exists(self, target, probed, home):
        other = altered(probed, runtime={"dtype": "float64"})
        path = ProfileStore().save(other)
        before = files(home)
        choice = ProfileChoice(require=True)
        with pytest.raises(ProfileError, match=r"dtype float64, here float32") as caught:
            find_cost(target, NgramDrafter(), choice)
        assert path.name in str(caught.value)
        assert "rooftree calibrate" in str(caught.value)
        assert files(home) == before

    def test_a_damaged_profile_is_named_and_left_to_be_mended(self, target, probed):
        path = ProfileStore().save(probed)
        damaged = path.read_text()[:300]
        path.write_text(damaged)
        source = find_cost(target, NgramDrafter(), ProfileChoice())
        assert source.line.startswith("no profile for this device")
        (warning,) = source.warnings
        assert warning.startswith(f"left out a profile that cannot be used: {path}: ")
        assert source.cost.mode == "static"
        again = find_cost(target, NgramDrafter(), ProfileChoice())
        assert again.line.startswith(f"profile {path.with_suffix('')}-2.yaml")
        assert path.read_text() == damaged


class TestProbe:
    @pytest.mark.parametrize(("budget_s", "points", "most"), [(0.0, 4, 1), (60.0, 6, 7)])
    def test_it_takes_what_its_budget_allows(self, target, monkeypatch, budget_s, points, most):
        monkeypatch.setattr(probe, "BUDGET_S", budget_s)
        surface = quick_profile(target, NgramDrafter()).surface
        assert len(surface.rows) == points
        assert set(surface.n) == {most}

    @pytest.mark.parametrize(("budget_s", "size"), [(0.0, (4, 1)), (0.3, (5, 7)), (60.0, (5, 7))])
    def test_first_calls_take_none_of_its_time(self, target, monkeypatch, budget_s, size):
        clock, seen = [0.0], set()

        class Compiling:
            """The target, where the first forward of each number of rows takes seconds more."""

            def __getattr__(self, name):
                return getattr(target, name)

            def verify(self, steps):
                rows = steps[0].tree.nodes + 1
                clock[0] += 0.007 if rows in seen else 1.007
                seen.add(rows)

        for module in (probe, device):
            monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
        shapes = [(1, 256), (4, 256), (16, 256), (32, 256), (64, 256)]
        times = probe._time_points(Compiling(), shapes, budget_s)
        np.testing.assert_allclose(times, np.full(size, 0.007))

    def test_a_tree_too_large_is_refused_before_the_probe(self, home):
        with pytest.raises(InputError, match="a tree of 512 nodes does not fit the 512"):
            decoder_of(random_model("llama-gqa"), "bastion", max_nodes=512)
        assert files(home) == []


PATHS = sorted(shipped_directory().glob("*/*.yaml"))


class Disguised:
    """A small target that says that it is another architecture in bfloat16."""

    dtype = torch.bfloat16

    def __init__(self, target, architecture):
        self._target, self.architecture = target, architecture

    def __getattr__(self, name):
        return getattr(self._target, name)


@pytest.mark.parametrize("runtime", ["graphs", "eager"])
@pytest.mark.parametrize("path", PATHS, ids=[f"{p.parent.name}/{p.stem}" for p in PATHS])
def test_the_decoder_accepts_it(path, runtime, target, monkeypatch):
    shipped = Profile.from_yaml(path)
    memory = {"memory_bytes": int(0.94 * shipped.device.memory_bytes)}
    here = shipped.device.model_copy(update=memory)
    monkeypatch.setattr("decoder.profiling.measured_profile.fingerprint", lambda device: here)
    other = Disguised(target, shipped.target.architecture)
    other.runtime = SimpleNamespace(kind=runtime, buckets=BUCKETS if runtime == "graphs" else ())
    source = find_cost(other, NgramDrafter(), ProfileChoice(require=True))
    assert str(path) in source.line and shipped.provenance.kind in source.line
    assert source.cost.mode != "static" and source.warnings
    nodes = [0, 15, 63, 255]
    expected = shipped.verify_calibration().predict_s([1, 16, 64, 256], 1040)
    assert source.cost.verify_s(nodes, 1040) == pytest.approx(expected, rel=1e-6) or (
        runtime == "eager" and bool((source.cost.verify_s(nodes, 1040) >= expected * 0.999).all())
    )
    # Another fit serves a rule that stops at the first drop; it is priced without the padding.
    wanted = ProfileChoice(require=True), Profile.linear_calibration
    source = find_cost(other, NgramDrafter(), *wanted)
    rows = np.arange(1, 257)
    linear_s = shipped.linear_calibration().predict_s(rows, 1040)
    assert source.cost.cost.verify_s(rows - 1, 1040) == pytest.approx(linear_s, rel=1e-9)


@pytest.mark.parametrize("source", ["measured", "datasheet"])
def test_measured_peaks_are_raised_to_the_rates_of_the_points(source):
    stored = Profile.from_yaml(DATA / "measured" / "calibrations_avx2" / "quiet_2.yaml")
    changes = {"source": source, "flops_per_s": 3e10, "bytes_per_s": 5e9}
    low, points = stored.peaks.model_copy(update=changes), stored.surface.points()
    points = points.take(np.arange(0, len(points), 3))
    parts = {"device": stored.device, "architecture": stored.target.architecture}
    subject = measuring.MeasuredSubject(runtime=stored.runtime, **parts)
    made = measuring.make_profile(subject, "measured", points, low)
    branches_s = made.roofline("physical").branches_s(points.rows, points.context)
    shares = [max(one / points.seconds) for one in branches_s]
    assert shares == pytest.approx([1, 1]) if source == "measured" else made.peaks == low
