"""From samples to sections: right numbers in the right order, and nothing where nothing was."""

import numpy as np
import pytest

from costmodel.calibration.choices import standard_curves
from costmodel.calibration.points import Points
from costmodel.profile.schema import DrafterSection
from costmodel.profile.store import ProfileStore
from decoder.drafters.ngram import NgramDrafter
from profiler.calibrate.files import with_stored_drafters
from profiler.calibrate.sections import (
    drafter_sections,
    points_of,
    provenance_fields,
    stages_section,
    with_held_out,
)
from profiler.calibrate.sweep import SweepResult, Task
from profiler.measure.samples import PointSamples
from tests.costmodel.conftest import altered
from tests.profiler.made_profile import make_profile


def swept(*measured: tuple[Task, tuple[float, ...]], **fields) -> SweepResult:
    samples = {task: PointSamples(seconds=seconds, **fields) for task, seconds in measured}
    return SweepResult(samples=samples, unmeasured=(), spent_s=12.345, resumed_samples=0)


def task(kind: str, size: int, context: int = 0, batch: int = 1) -> Task:
    return Task(kind=kind, size=size, context=context, batch=batch)


def test_points_of_one_kind_and_stages_sorted_along_their_axes():
    points = points_of(
        swept(
            (task("verify", 4, 64), (1.0, 2.0, 4.0)), (task("held_out", 5, 70), (9.0,)),
            (task("verify", 1, 64, 2), (3.0, 5.0)), (task("build", 4), (7.0,)),
        ),
        "verify",
    )  # fmt: skip
    assert points.rows.tolist() == [4, 1]
    assert points.context.tolist() == [64, 64]
    assert points.batch.tolist() == [1, 2]
    assert points.seconds.tolist() == [2.0, 4.0]
    assert points.mad_s[0] == 1.0
    assert np.isnan(points.mad_s[1])  # two samples have no spread
    assert points.n.tolist() == [3, 2]
    stages = stages_section(
        swept(
            (task("build", 7), (3e-6, 5e-6, 4e-6)), (task("build", 1), (1e-6,)),
            (task("accept", 3), (2e-6,)), (task("accept_sampled", 3), (7e-6,)),
            (task("commit", 2, 99), (6e-6,)), (task("prefill", 128), (0.5,)),
            (task("verify", 1, 512), (2.0,)), (task("verify", 1, 64), (1.0,)),
            (task("verify", 1, 64, 2), (1.5,)), (task("verify", 2, 64), (9.0,)),
        )
    )  # fmt: skip
    assert (stages.build.nodes, stages.build.median_s) == ((1, 7), (1e-6, 4e-6))
    assert stages.build.mad_s == (None, pytest.approx(1e-6))
    assert stages.accept_sampled.median_s == (7e-6,)
    assert (stages.accept.nodes, stages.commit.tokens) == ((3,), (2,))
    assert (stages.prefill.tokens, stages.prefill.median_s) == ((128,), (0.5,))
    assert stages.plain.batch == (1, 1, 2)
    assert stages.plain.context == (64, 512, 64)
    assert stages.plain.median_s == (1.0, 2.0, 1.5)


def test_provenance_and_drafts_under_the_drafters_hash():
    result = swept(
        (task("verify", 1, 64), (1.0, 1.0)), (task("build", 1), (1.0,)), rejected=(5.0, 6.0)
    )
    busy = [
        {"pid": pid, "name": name, "core_share": 0.9} for pid, name in ((1, "miner"), (2, None))
    ]
    state = {"gpu_temperature_c": 50, "gpu_ecc": True, "gpu_clock_reasons": ["power cap"]}
    fields = provenance_fields(result, state | {"busy_processes": busy})
    assert fields == {
        "samples": 3, "discarded_samples": 4, "pace_spread": None, "duration_s": 12.35,
        "sm_clock_hz": None, "memory_clock_hz": None, "temperature_c": 50, "power_w": None,
        "clock_reasons": ["power cap"], "ecc": True, "busy_processes": ["miner"],
    }  # fmt: skip
    sections = drafter_sections(
        swept((task("draft", 1, 256), (2e-5,)), (task("draft", 1, 64), (1e-5,))), NgramDrafter()
    )
    (section,) = sections.values()
    assert list(sections) == [NgramDrafter.architecture_hash]
    assert (section.name, section.context, section.median_s) == ("ngram", (64, 256), (1e-5, 2e-5))


def held_out(seconds: list[list[float]], rows=(1, 4, 9, 16)) -> Points:
    """Points at contexts 100, 200, ... with the given seconds by row."""
    count = len(seconds)
    return Points(
        rows=list(rows) * count, context=np.repeat(100 * (1 + np.arange(count)), len(rows)),
        seconds=np.ravel(seconds), mad_s=np.full(count * len(rows), 1e-5),
        n=np.full(count * len(rows), 25),
    )  # fmt: skip


class TestHeldOut:
    def test_errors_by_hand_and_no_regret_without_a_choice(self):
        """The made profile says 5 ms for everything."""
        profile = with_held_out(make_profile(), held_out([[0.005, 0.004, 0.01, 0.005]]))
        assert profile.held_out.error.worst == pytest.approx(0.5)
        assert profile.held_out.error.mape == pytest.approx((0 + 0.25 + 0.5 + 0) / 4)
        assert profile.held_out.error.median == pytest.approx(0.125)
        assert profile.held_out.linear_error == profile.held_out.error
        assert profile.held_out.rows == (1, 4, 9, 16)
        assert profile.held_out.predicted_s == pytest.approx((0.005,) * 4)
        noise = 1.4826 * 1.2533 * 1e-5 / 5 / np.array([0.005, 0.004, 0.01, 0.005])
        assert profile.held_out.repeat_noise == pytest.approx(np.median(noise))
        made = make_profile()
        assert with_held_out(made, points_of(swept(), "held_out")) is made
        profile = with_held_out(made, held_out([[0.005, 0.02]], rows=(1, 16)))
        assert profile.regret is None
        assert profile.held_out.error.points == 2

    def test_regret_by_brute_force(self):
        seconds = [[0.005, 0.006, 0.009, 0.02], [0.004, 0.004, 0.004, 0.004]]
        profile = with_held_out(make_profile(), held_out(seconds))
        nodes = np.array([0, 3, 8, 15])
        losses = []
        for truth in seconds:
            for curve in standard_curves():
                rate = curve.committed(nodes) / np.array(truth)
                losses.append(1 - rate[-1] / rate.max())  # flat costs: always the largest tree
        # The times have next to no noise that could be taken out.
        assert profile.regret.mean == pytest.approx(np.mean(losses), rel=1e-3)
        assert profile.regret.worst == pytest.approx(np.max(losses), rel=1e-3)
        low, high = profile.regret.interval
        assert low <= profile.regret.mean <= high
        assert profile.regret.contexts == (100, 200)
        assert profile.regret.curves == 18


def drafter(name: str, seconds: float, **origin: str) -> DrafterSection:
    return DrafterSection(name=name, context=[64], median_s=[seconds], mad_s=[0.0], n=[5], **origin)


FIRST, SECOND = "a" * 12, "b" * 12


def test_drafters_measured_before_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    new = make_profile().with_drafter(SECOND, drafter("second", 2e-3))
    old = make_profile().with_drafter(FIRST, drafter("first", 1e-3))
    old = old.with_drafter(SECOND, drafter("second", 9e-3))
    for output in (tmp_path / "mine.yaml", None):
        assert with_stored_drafters(new, output) == new  # nothing is stored yet
        old.to_yaml(output) if output else ProfileStore().save(old)
        merged = with_stored_drafters(new, output)
        found = {key: value.median_s for key, value in merged.drafters.items()}
        assert found == {FIRST: (1e-3,), SECOND: (2e-3,)}
        if output:
            output.unlink()


def test_they_keep_when_they_were_timed_and_those_of_a_start_go(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    started = drafter("second", 2e-3, kind="quick", created_utc="2026-02-03T00:00:00Z")
    old = make_profile().with_drafter(FIRST, drafter("first", 1e-3))
    ProfileStore().save(old.with_drafter(SECOND, started))
    for date in ("2026-04-01T00:00:00Z", "2026-05-01T00:00:00Z"):
        new = altered(make_profile(), provenance={"created_utc": date})
        merged = with_stored_drafters(new, None)
        ProfileStore().save(merged)
    assert merged.provenance.created_utc == "2026-05-01T00:00:00Z"
    assert merged.drafter_origin(FIRST) == ("measured", old.provenance.created_utc)
    assert list(merged.drafters) == [FIRST]


@pytest.mark.parametrize(
    ("stored", "here"),
    [({"driver": "550.1"}, {"driver": "560.2"}), ({"kind": "transferred"}, {"kind": "measured"})],
)
def test_drafters_of_other_versions_or_devices_are_not(tmp_path, monkeypatch, stored, here):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    section = "device" if "driver" in here else "provenance"
    old, new = (altered(make_profile(), **{section: fields}) for fields in (stored, here))
    ProfileStore().save(old.with_drafter(FIRST, drafter("first", 1e-3)))
    assert with_stored_drafters(new, None).drafters == {}
