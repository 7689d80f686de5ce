"""All-reduces as protocols, and calibrations that tell them apart, against known truths."""

import dataclasses

import numpy as np
import pytest

from costmodel.calibration.physical import PhysicalCalibration, fit_physical
from costmodel.calibration.points import Points
from costmodel.catalog import all_reduce_s, find_device, protocols_of
from costmodel.roofline import Roofline
from tests.costmodel.calibration.test_physical import truth
from tests.costmodel.conftest import LLAMA, grid

RTX = find_device("rtx-pro-6000-server")


@pytest.mark.parametrize(("slug", "devices", "message_bytes", "seconds"), [
    ("l40s", 2, 262144, 18.1e-6),
    ("rtx-pro-6000-server", 2, 2097152, 55.7e-6),
    ("rtx-pro-6000-server", 4, 131072, 24.8e-6),
    ("h100-sxm", 8, 2097152, 19.4e-6),
    ("a100-sxm-80gb", 4, 8388608, 71.4e-6),
])  # fmt: skip
def test_shipped_protocols_are_near_published_times(slug, devices, message_bytes, seconds):
    """Single measurements of aiconfigurator-core 0.12.0, of the fastest engine."""
    found = float(all_reduce_s(protocols_of(slug, devices), message_bytes))
    assert found == pytest.approx(seconds, rel=0.15)
    assert protocols_of(slug, 1) == protocols_of("unheard-of", 2) == ()


def tensor_parallel() -> tuple[Roofline, PhysicalCalibration]:
    """A roofline of two devices, and a physical calibration without communication."""
    roofline = Roofline(architecture=LLAMA, peaks=RTX.peaks, tensor_parallel=2)
    return roofline, truth(points=24).over(roofline)


def sample(truth: PhysicalCalibration, reduced_s, rows, contexts) -> Points:
    r, c = grid(rows, contexts)
    return Points(rows=r, context=c, seconds=truth.predict_s(r, c) + reduced_s(r))


FITTED = (1, 4, 16, 32, 48, 64, 80, 128, 200, 300, 384, 500, 640)
LEFT_OUT = (8, 24, 60, 96, 160, 256, 350, 512)


def test_a_switch_of_the_protocol_is_found():
    """Beyond 64 tokens all-reduces take 2 ms more."""
    roofline, truth = tensor_parallel()

    def reduced_s(tokens):
        return np.where(tokens > 64, 2e-3, 0.0)

    fitted = fit_physical(sample(truth, reduced_s, FITTED, (64, 1024, 8192)), roofline)
    assert fitted.switch_tokens == 64
    held = sample(truth, reduced_s, LEFT_OUT, (300, 4000))
    error = fitted.predict_s(held.rows, held.context) / held.seconds - 1
    assert np.mean(np.abs(error)) < 0.03
    alone = dataclasses.replace(roofline, tensor_parallel=1)
    assert fit_physical(sample(truth, reduced_s, FITTED, (64, 8192)), alone).communication is None
    stored = PhysicalCalibration.model_validate(fitted.model_dump(exclude_none=True))
    assert stored.over(roofline).predict_s(96, 300) == pytest.approx(fitted.predict_s(96, 300))


@pytest.mark.parametrize("fields", [{"communication": 1.0}, {"switch_tokens": 4}])
def test_half_a_term_is_refused(fields):
    _, truth = tensor_parallel()
    with pytest.raises(ValueError, match="communication"):
        PhysicalCalibration.model_validate(truth.model_dump(exclude_none=True) | fields)
