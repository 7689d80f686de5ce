"""Grades of profiles by worked examples, and what may replace a stored profile."""

import pytest

from costmodel.calibration.points import ErrorSummary
from costmodel.profile.grade import grade, objection
from costmodel.profile.profile import Profile
from costmodel.profile.schema import HeldOutSection, RegretSection, SurfaceSection
from costmodel.profile.store import ProfileStore
from tests.costmodel.conftest import altered
from tests.profiler.made_profile import make_profile

GOOD = {"mean": 0.002, "worst": 0.01, "high": 0.004, "error": 0.01, "noise": 0.01, "held_out": 9,
        "ms": range(10, 16), "contexts": (256, 2048), "kind": "cuda"}  # fmt: skip


def judged(**changed) -> Profile:
    """A profile whose forwards of 1, 2, 4, ... rows take so many milliseconds."""
    wanted, made = GOOD | changed, make_profile()
    ms, contexts, error = wanted["ms"], wanted["contexts"], wanted["error"]
    count = len(ms) * len(contexts)
    device = made.device.model_copy(update={"kind": wanted["kind"], "threads": 2})
    surface = SurfaceSection(
        rows=[2**k for _ in contexts for k in range(len(ms))],
        context=[context for context in contexts for _ in ms],
        batch=(1,) * count, n=(5,) * count, mad_s=(1e-5,) * count,
        median_s=[one / 1e3 for _ in contexts for one in ms],
    )  # fmt: skip
    summary = ErrorSummary(points=wanted["held_out"], mape=error, median=error, p95=1, worst=1)
    held_out = HeldOutSection(error=summary, repeat_noise=wanted["noise"])
    regret = RegretSection(
        mean=wanted["mean"], worst=wanted["worst"], interval=(0, wanted["high"]), curves=18,
        contexts=(70, 300),
    )  # fmt: skip
    parts = {"device": device, "surface": surface, "held_out": held_out, "regret": regret}
    return made.model_copy(update=parts)


@pytest.mark.parametrize(("changed", "word", "reason"), [
    ({}, "good", ""),
    ({"mean": 0.006}, "usable", "loses 0.6% on average, more than 0.5%"),
    ({"mean": 0.006, "kind": "cpu"}, "good", ""),
    ({"worst": 0.04}, "usable", "4.0% at worst, more than 3.0%"),
    ({"high": 0.03}, "usable", "up to 3.0% on average"),
    ({"error": 0.025, "noise": 0.02}, "usable", "off by 2.5%, more than 2.0%"),
    ({"error": 0.025, "noise": 0.02, "kind": "cpu"}, "good", ""),
    ({"held_out": 5}, "usable", "5 held-out points, 6 will do"),
    ({"ms": (10, 11, 12, 13, 14)}, "usable", "measured at 10 points, 12 will do"),
    ({"mean": 0.021, "worst": 0.021}, "do not use", "2.1% on average, more than 2.0%"),
    ({"worst": 0.099}, "do not use", "9.9% at worst, more than 8.0%"),
    ({"error": 0.444, "noise": 0.0}, "do not use", "uncertain by 44%"),
    # As stored once by a busy machine, beside a regret that looked fair.
    ({"ms": (49, 1211.75, 56.64, 60, 61, 62)}, "do not use", "2 rows at context 256 took 21"),
])  # fmt: skip
def test_one_word_and_why(changed, word, reason):
    found = grade(judged(**changed))
    assert found.word == word
    assert reason in str(found)


MANY = (256, 700, 1500, 2048)
WIDE = judged(contexts=MANY)


@pytest.mark.parametrize(("newer", "reason"), [
    (judged(mean=0.004, worst=0.02, contexts=(256, 1000, 2048)), ""),
    (judged(mean=0.01, contexts=MANY), "worse (usable, the stored one is good)"),
    (judged(contexts=(256, 1024)), "contexts go from 256 to 1024, the stored one's from 256"),
    (judged(ms=(9, 10, 11, 12, 13), contexts=MANY), "row counts go from 1 to 16, the stored"),
    (judged(), "measured at 12 points, the stored one at 24"),
    (judged(contexts=(100, *MANY, 4096), ms=range(10, 18)), ""),
])  # fmt: skip
def test_what_a_stored_profile_stays_for(tmp_path, newer, reason):
    store = ProfileStore([tmp_path])
    place = store.save(WIDE)
    before = place.read_bytes()
    assert reason in objection(WIDE, newer)
    for output in (None, place):
        path, said = store.put(newer, output)
        assert bool(reason) == bool(said)
        assert (path != place) == bool(reason) == (place.read_bytes() == before)
        assert store.find(newer.key).path == place
        assert Profile.from_yaml(path).to_yaml() == newer.to_yaml()
    assert len(list(tmp_path.rglob("*.yaml"))) == (3 if reason else 1)  # nothing is lost
    assert store.put(newer, replace=True) == (place, "")


def test_nonsense_hides_no_other_profile_and_a_first_one_is_kept(tmp_path):
    store, nonsense = ProfileStore([tmp_path / "a", tmp_path / "b"]), judged(worst=0.6)
    assert store.put(nonsense)[0].parent.name == "test-gpu"
    quick = altered(WIDE, provenance={"kind": "quick"})
    place = ProfileStore([tmp_path / "b"]).save(quick)
    next((tmp_path / "a").rglob("*.yaml")).unlink()
    assert "do not use" in store.put(nonsense)[1]
    assert store.find(nonsense.key).path == place
