"""A profile made by hand, for tests of what shows and finds profiles."""

from costmodel.calibration.linear import LinearCalibration
from costmodel.catalog import DeviceFingerprint, find_target
from costmodel.profile import schema
from costmodel.profile.profile import Profile
from costmodel.profile.schema import CalibrationSection, PeaksSection, ProvenanceSection

TARGET = "Qwen/Qwen3-8B"


def make_profile(device: str = "Test GPU", dtype: str = "bfloat16") -> Profile:
    """A profile whose calibration says 5 ms for every verification."""
    flat = LinearCalibration(
        slope=0.0, intercept_s=0.005, slope_se=0.0, intercept_se_s=0.0, rmse_before_s=0.002,
        rmse_after_s=0.0, mape_before=0.4, mape_after=0.0,
    )  # fmt: skip
    count = 4
    return Profile(
        provenance=ProvenanceSection(
            kind="measured", created_utc="2026-01-02T03:04:05Z", tool_version="0.1.0", points=count
        ),
        device=DeviceFingerprint(kind="cuda", name=device, memory_bytes=1 << 36),
        target=schema.TargetSection.of(find_target(TARGET).architecture),
        runtime=schema.RuntimeSection(kind="graphs", dtype=dtype, attention="split"),
        peaks=PeaksSection(source="measured", flops_per_s=1e15, bytes_per_s=4e12),
        calibration=CalibrationSection(selected="linear", linear=flat),
        surface=schema.SurfaceSection(
            rows=(1, 16, 1, 16), context=(256, 256, 2048, 2048), batch=(1,) * count,
            median_s=(0.005,) * count, mad_s=(0.0,) * count, n=(5,) * count,
        ),
    )  # fmt: skip
