"""Every shipped calibration serves a decoder that starts on a device of that name."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from costmodel.catalog import Peaks
from costmodel.io import shipped_directory
from costmodel.profile.profile import Profile
from decoder.drafters.ngram import NgramDrafter
from decoder.model.runtime.capture import BUCKETS
from decoder.profiling.startup import ProfileChoice, find_cost
from tests.decoder.models import random_model, target_of

pytestmark = pytest.mark.cpu_kind

PATHS = sorted(shipped_directory().glob("*/*.yaml"))


class Disguised:
    """A small target that says that it is another architecture in bfloat16."""

    def __init__(self, target, architecture):
        self._target = target
        self.architecture = architecture
        self.dtype = torch.bfloat16

    def __getattr__(self, name):
        return getattr(self._target, name)


@pytest.fixture(scope="module")
def small():
    return target_of(random_model("llama-gqa", dtype=torch.float32))


@pytest.mark.parametrize("runtime", ["graphs", "eager"])
@pytest.mark.parametrize("path", PATHS, ids=[f"{p.parent.name}/{p.stem}" for p in PATHS])
def test_the_decoder_accepts_it(path, runtime, small, monkeypatch, tmp_path):
    shipped = Profile.from_yaml(path)
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    monkeypatch.setattr(
        "decoder.profiling.measured_profile.fingerprint",
        lambda device: shipped.device.model_copy(
            update={"memory_bytes": int(0.94 * shipped.device.memory_bytes)}
        ),
    )
    monkeypatch.setattr(
        "decoder.profiling.measured_profile.measure_peaks",
        lambda device, dtype: Peaks(flops_per_s=1e11, bytes_per_s=1e10),
    )
    target = Disguised(small, shipped.target.architecture)
    target.runtime = SimpleNamespace(kind=runtime, buckets=BUCKETS if runtime == "graphs" else ())
    source = find_cost(target, NgramDrafter(), ProfileChoice(require=True))
    assert str(path) in source.line and shipped.provenance.kind in source.line
    assert source.online and source.warnings
    nodes = [0, 15, 63, 255]
    expected = shipped.verify_calibration().predict_s([1, 16, 64, 256], 1040)
    assert source.cost.verify_s(nodes, 1040) == pytest.approx(expected, rel=1e-6) or (
        runtime == "eager" and bool((source.cost.verify_s(nodes, 1040) >= expected * 0.999).all())
    )
    # Another fit serves a rule that stops at the first drop; it is priced without the padding.
    source = find_cost(
        target, NgramDrafter(), ProfileChoice(require=True), Profile.linear_calibration
    )
    rows = np.arange(1, 257)
    linear_s = shipped.linear_calibration().predict_s(rows, 1040)
    assert source.cost.cost.verify_s(rows - 1, 1040) == pytest.approx(linear_s, rel=1e-9)
