"""The peaks of profiles that are measured on this machine."""

import pytest

from costmodel.profile.profile import Profile
from decoder.profiling.measured_profile import MeasuredSubject, Measurement, make_profile
from tests.conftest import DATA


@pytest.mark.parametrize("source", ["measured", "datasheet"])
def test_measured_peaks_are_raised_to_the_rates_of_the_points(source):
    stored = Profile.from_yaml(DATA / "measured" / "calibrations_avx2" / "quiet_2.yaml")
    changes = {"source": source, "flops_per_s": 3e10, "bytes_per_s": 5e9}
    low, points = stored.peaks.model_copy(update=changes), stored.surface.points()
    subject = MeasuredSubject(
        device=stored.device, architecture=stored.target.architecture, runtime=stored.runtime
    )
    made = make_profile(subject, Measurement(kind="measured", points=points, peaks=low))
    branches_s = made.roofline("physical").branches_s(points.rows, points.context)
    shares = [max(one / points.seconds) for one in branches_s]
    assert shares == pytest.approx([1, 1]) if source == "measured" else made.peaks == low
