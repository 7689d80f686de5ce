"""Profiles of other tools' times: what they say, what they refuse, and who takes them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from costmodel import imports
from costmodel.calibration.points import Points
from costmodel.catalog import DeviceFingerprint, find_device, find_target
from costmodel.errors import InputError, ProfileError
from costmodel.imports import ImportedTable, TimedModel, imported_profile, read_times
from costmodel.planning.search import plan
from costmodel.profile.lookup import find_profile
from costmodel.profile.profile import Profile
from costmodel.profile.schema import PeaksSection
from costmodel.profile.store import ProfileStore
from tests.costmodel.conftest import altered, grid
from tests.costmodel.planning.conftest import asked
from tests.integrations import written_times as files
from tests.integrations.written_times import BATCHES, CONTEXTS, ROWS, forward_s, write_points

CPU = DeviceFingerprint(
    kind="cpu", name="AMD EPYC", memory_bytes=2**34, threads=1, instruction_set="avx512"
)
PEAKS = PeaksSection(source="measured", flops_per_s=2e11, bytes_per_s=2e10)
LLAMA = Path(__file__).parents[2] / "integrations" / "data" / "llama_bench.jsonl"


def subject(device: str = "h100-sxm", target: str = "Qwen/Qwen3-8B") -> TimedModel:
    spec = find_device(device)
    device = DeviceFingerprint(kind="cuda", name=spec.name, memory_bytes=spec.memory_bytes)
    peaks = {"flops_per_s": spec.peak_flops_per_s, "bytes_per_s": spec.peak_bytes_per_s}
    return TimedModel(
        device=device, peaks=PeaksSection(source="datasheet", **peaks),
        architecture=find_target(target).architecture,
    )  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_points(tmp_path_factory.mktemp("table") / "forward.csv")


@pytest.fixture(scope="module")
def profile(path) -> Profile:
    table = read_times("csv", path, None)
    return imported_profile(table, subject(), path=path, source="vLLM 0.33.0")


def test_it_says_where_it_is_from_and_its_times_are_those_of_the_file(profile, tmp_path):
    made = profile.provenance
    assert made.kind == "imported" and made.points == len(ROWS) * len(CONTEXTS) * len(BATCHES)
    assert made.source == "CSV table, vLLM 0.33.0, file forward.csv"
    for words in ("host time", "no draft and no acceptance", "32 rows", "batch 4"):
        assert words in made.note
    assert (profile.runtime.kind, profile.runtime.dtype) == ("kernels", "bfloat16")
    assert not profile.drafters and profile.stages.accept is None
    again = Profile.from_bytes(profile.to_yaml(tmp_path / "p.yaml").encode(), "p")
    assert again.to_yaml() == profile.to_yaml()
    assert profile.surface is not None and profile.stages.plain is not None
    calibration = profile.verify_calibration()
    for batch in BATCHES:
        for context in CONTEXTS:
            predicted = calibration.predict_s(ROWS, context, batch)
            expected = [forward_s(rows, context, batch) for rows in ROWS]
            assert predicted == pytest.approx(expected, rel=0.03)
            assert profile.stages.plain.seconds(context, batch) == pytest.approx(expected[0])
    assert profile.provenance.error_bar is not None and profile.provenance.error_bar < 0.03


def test_it_is_stored_found_and_never_replaces_a_measured_one(profile, tmp_path):
    store = ProfileStore([tmp_path])
    stored = store.save(profile)
    assert stored.name == "qwen3-8b.bfloat16.kernels.tp1.yaml"
    found = find_profile("h100-sxm", "qwen3-8b", store=store)
    assert found.to_yaml() == profile.to_yaml()
    altered(profile, provenance={"kind": "measured"}).to_yaml(stored)
    assert store.save(profile) != stored
    with pytest.raises(ProfileError, match="is imported"):
        store.put(profile, stored, replace=True)
    # A decoder takes it as a prior.
    store = ProfileStore([tmp_path / "other"])
    store.save(profile)
    key = dataclasses.replace(profile.key, runtime="graphs", attention="sdpa")
    found = store.find(key)
    assert found.online_correction and not found.same
    assert "is imported, not measured here" in found.warnings[0]


def test_a_plan_takes_it_and_a_version_is_asked_for(profile, tmp_path, path):
    mine = tmp_path / "mine.yaml"
    profile.to_yaml(mine)
    result = plan(asked(gpus=(str(mine),), acceptance="0.8"), ProfileStore([tmp_path]))
    assert result.best is not None and result.best.origin is not None
    assert result.best.origin.kind == "imported"
    assert any("imported from another tool" in note for note in result.notes)
    assert not any("not measured on the GPU" in note for note in result.notes)
    table = read_times("csv", path, None)
    with pytest.raises(InputError, match="does not say which version") as raised:
        imported_profile(table, subject(), path=path)
    assert "--source" in raised.value.hint


def table_of(name: str, path: Path, factor: float) -> ImportedTable:
    """A file of one format whose times are multiplied, as it is read."""
    if name == "llama-bench":
        lines = [json.loads(line) for line in LLAMA.read_text().splitlines()]
        slower = [x | {"samples_ns": [factor * t for t in x["samples_ns"]]} for x in lines]
        files.write_lines(path, slower)
    elif name == "sglang-dspark":
        rates = [1 / forward_s(rows, 512, 1) / factor for rows in ROWS]
        steps = {"sample_batch_tokens": ROWS, "sample_steps_per_sec": rates}
        files.write_json(path, steps | {"max_batch_tokens": ROWS[-1]})
    else:
        write_points(path, factor)
    return read_times(name, path, 512 if name == "sglang-dspark" else None)


@pytest.mark.parametrize("name", ["csv", "sglang-dspark", "llama-bench"])
def test_a_wrong_unit_is_refused_in_every_format(tmp_path, name):
    path, one = tmp_path / "file", subject()
    if name == "llama-bench":
        one = dataclasses.replace(subject(target="SmolLM2-135M-Instruct"), device=CPU, peaks=PEAKS)
    sound = table_of(name, path, 1.0)
    assert imports.check_times(sound.points, one.roofline(sound), path) == ""
    slow = 12.0 if name == "llama-bench" else 1e3
    wrong = {1e-3: "times faster than", slow: "wrong unit or device"}
    for factor, message in wrong.items():
        with pytest.raises(InputError, match=message) as raised:
            imported_profile(table_of(name, path, factor), one, path=path, source="a tool 1.0")
        assert "\n" not in str(raised.value)


def test_another_device_or_model_is_refused():
    table = read_times("llama-bench", LLAMA, None)
    with pytest.raises(InputError, match="was measured on AMD EPYC, not on NVIDIA H100"):
        imported_profile(table, subject(), path=LLAMA, source="a build")
    on_cpu = dataclasses.replace(subject(), device=CPU)
    with pytest.raises(InputError, match=r"0\.135 billion parameters, and Qwen/Qwen3-8B has 8"):
        imported_profile(table, on_cpu, path=LLAMA, source="a build")
    table = dataclasses.replace(table, processor="h200_sxm", threads=None)
    with pytest.raises(InputError, match="measured on h200_sxm"):
        imported_profile(table, subject(), path=LLAMA, source="a build")


def test_a_profile_of_a_published_run_on_a_gb10():
    path = LLAMA.with_name("llama_batched_bench.md")
    peaks = PeaksSection(source="datasheet", flops_per_s=1.2e14, bytes_per_s=2.73e11)
    one = dataclasses.replace(subject(target="Qwen/Qwen3-30B-A3B"), peaks=peaks)
    profile = imported_profile(read_times("llama-batched-bench", path, None), one, path=path)
    assert profile.runtime.quantization == "q8_0" and "verifications" in profile.provenance.note
    assert set(profile.stages.plain.batch) == {1, 2, 4, 8, 16, 32}
    assert profile.provenance.error_bar < 0.15


def test_a_large_table_is_fitted_to_a_part_and_checked_on_the_rest(monkeypatch):
    monkeypatch.setattr(imports, "MOST_FITTED", 14)
    rows, context = grid(np.arange(1, 33, 3), np.arange(1, 14, 3) * 512)
    points = Points(rows=rows, context=context, seconds=forward_s(rows, context, 1))
    other = {"points": points, "processor": None, "threads": None, "parameters": 0}
    table = dataclasses.replace(read_times("llama-bench", LLAMA, None), **other)
    profile = imported_profile(table, subject(), path=LLAMA, source="made up")
    assert profile.surface is not None and len(profile.surface.rows) == imports.MOST_FITTED
    assert profile.held_out is not None
    assert profile.held_out.error.points == len(points) - imports.MOST_FITTED
    assert profile.held_out.error.worst < 0.02
