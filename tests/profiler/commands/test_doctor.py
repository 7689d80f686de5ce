"""`rooftree doctor`: what it finds with and without a profile, a model and a place to write."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceFingerprint, find_target
from costmodel.errors import DeviceError
from costmodel.profile.grade import Grade
from costmodel.profile.profile import Profile
from costmodel.profile.schema import RuntimeSection, TargetSection
from costmodel.profile.store import ProfileStore
from profiler import checks
from tests.costmodel.conftest import altered
from tests.profiler.made_profile import make_profile
from tests.tiny_folder import QUIET

pytestmark = pytest.mark.cpu_kind

HERE = DeviceFingerprint(
    kind="cpu", name="Test CPU", memory_bytes=1 << 34, threads=2, instruction_set="avx2"
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A quiet test CPU with an empty data directory."""
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    monkeypatch.setattr(checks, "select_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(checks, "fingerprint", lambda device: HERE)
    monkeypatch.setattr(checks, "default_dtype", lambda device: torch.float32)
    no_gpu = Mock(side_effect=DeviceError("there is no GPU"))
    monkeypatch.setattr(checks.Gpu, "open", no_gpu)
    monkeypatch.setattr("profiler.measure.machine.observe", lambda: QUIET)
    monkeypatch.setattr(checks, "warnings", lambda metadata: ())
    return tmp_path


def found() -> dict[str, checks.DoctorCheck]:
    return {check.name: check for check in checks.run_checks()}


def test_a_new_machine_is_told_to_calibrate(home, monkeypatch):
    result = found()
    assert result["data directory"].status == "ok"
    assert result["profile"].status == "missing"
    assert result["demo model"].status == "missing"
    assert "rooftree demo-model" in result["demo model"].advice
    assert checks.next_step(list(result.values())).startswith("`rooftree calibrate`")
    assert result["versions"].found.count(torch.__version__.partition("+")[0]) == 1
    # A directory that cannot be written comes first.
    (home / "file").write_text("")
    monkeypatch.setenv("ROOFTREE_HOME", str(home / "file" / "below"))
    result = found()
    assert result["data directory"].status == "missing"
    assert "Set ROOFTREE_HOME" in checks.next_step(list(result.values()))


def fitting(kind: str) -> Profile:
    """A profile of the default target on the test CPU."""
    target = find_target(checks.default_target(torch.device("cpu"))).architecture
    runtime = RuntimeSection(kind="packed", dtype="float32", attention=checks.ATTENTION)
    here = {"device": HERE, "target": TargetSection.of(target), "runtime": runtime}
    return altered(make_profile(), provenance={"kind": kind}).model_copy(update=here)


@pytest.mark.parametrize(("kind", "status"), [("measured", "ok"), ("quick", "warn")])
def test_a_profile_that_fits_is_found(home, kind, status):
    path = ProfileStore().save(fitting(kind))
    result = found()
    assert result["profile"].status == status
    assert result["profile"].found.startswith(f"{kind}, {path}; usable: ")


def test_a_useless_profile_and_a_gpu_that_torch_cannot_use_are_named(home, monkeypatch):
    nonsense = Grade(word="do not use", reasons=("a choice loses 9.9% at worst",))
    monkeypatch.setattr(checks, "grade", lambda profile: nonsense)
    ProfileStore().save(fitting("measured"))
    check = found()["profile"]
    assert check.status == "warn"
    assert check.found.endswith("; do not use: a choice loses 9.9% at worst")
    assert checks.next_step(list(found().values())).startswith("Run `rooftree calibrate --time-b")
    gpu = SimpleNamespace(read=lambda: {"gpu_name": "NVIDIA H200"})
    monkeypatch.setattr(checks.Gpu, "open", lambda index: gpu)
    device = found()["device"]
    assert device.status == "warn" and "NVIDIA H200" in device.found
    assert "CUDA build of torch" in device.advice


def test_the_default_target_of_a_cpu_is_the_demo_model(smollm2_folder):
    config = json.loads((smollm2_folder / "config.json").read_text())
    made = ModelArchitecture.from_hf_config(config)
    assert made.hash == find_target(checks.default_target(torch.device("cpu"))).architecture.hash
