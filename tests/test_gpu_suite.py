"""The GPU suite on a CPU: every part in tiny, and going on where it stopped."""

from __future__ import annotations

import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_suite
from benchmarks.gpu_parts import KINDS, replay_result, run_part
from benchmarks.gpu_scale import TINY, Part, Scale, all_parts
from costmodel.errors import RooftreeError
from tests.tiny_folder import fake_clock, isolate, write_config


@pytest.fixture
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scale:
    write_config(tmp_path / "tiny")
    isolate(monkeypatch, tmp_path)
    fake_clock(monkeypatch)
    return replace(TINY, targets=(str(tmp_path / "tiny"),))


def test_every_part_has_a_kind_and_a_name_of_its_own() -> None:
    parts = all_parts(Scale())
    assert {part.kind for part in parts} == set(KINDS)
    names = [part.name for part in parts]
    assert len(set(names)) == len(names) == 1 + 3 * 2 * 4
    assert "calibrate.qwen3-8b.graphs" in names
    for part in parts:  # a profile is there before what reads it
        if part.kind in ("held-out", "replay"):
            needed = replace(part, kind="calibrate").name
            assert names.index(needed) < names.index(part.name)


@pytest.mark.slow
def test_every_measuring_part_in_tiny(scale: Scale, tmp_path: Path) -> None:
    found = {}
    for part in all_parts(scale):
        if part.kind != "tests":
            record = run_part(part, scale, tmp_path / "work")
            found[part.kind] = json.loads(json.dumps(record, allow_nan=False))["result"]
    assert found["calibrate"]["points"] > 0
    assert (tmp_path / "work" / "calibrate.tiny.eager" / "profile.yaml").is_file()
    rows = {(row["rows"], row["context"]) for row in found["forwards"]["forwards"]}
    assert rows == {(1, 16), (1, 64), (1, 32), (8, 32)}
    assert all(row["over_physical_roofline"] > 0 for row in found["forwards"]["forwards"])
    assert {point["batch"] for point in found["held-out"]["points"]} == {1}
    assert set(found["replay"]["tokens_per_s"]) == {
        "plain", "bastion", "chain", "fixed:3", "fixed:7",
    }  # fmt: skip
    assert found["replay"]["acceptance"].startswith("simulated")


def test_a_part_without_its_profile_says_so(scale: Scale, tmp_path: Path) -> None:
    with pytest.raises(RooftreeError, match="there is no profile for replay"):
        run_part(Part("replay", scale.targets[0], "eager"), scale, tmp_path / "work")


def test_what_bastion_is_compared_with() -> None:
    rows = {
        "plain": [(10.0, 2.0), (10.0, 2.0)],
        "bastion": [(10.0, 1.0), (10.0, 1.0)],
        "chain": [(10.0, 1.5), (10.0, 1.5)],
        "fixed:3": [(10.0, 1.25), (10.0, 1.25)],
        "fixed:7": [(10.0, 1.0), (10.0, 1.1)],
    }
    stages = {"draft_s": 0.2, "build_s": 0.1, "verify_s": 1.6, "accept_s": 0.1, "commit_s": 0.0}
    found = replay_result(rows, stages)
    assert found["best_fixed"] == "fixed:7"
    assert found["tokens_per_s"]["plain"] == 5.0
    assert found["bastion_over"]["plain"]["ratio"] == pytest.approx(2.0)
    assert found["share_outside_forwards"] == pytest.approx(0.1)


def test_without_a_gpu_it_says_that_it_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="measures a CUDA device and there is none"):
        gpu_suite.main()


class TestResuming:
    @pytest.fixture
    def run(self, scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """Runs the suite with parts that write a file; `broken` ones fail."""
        done: list[str] = []
        broken: set[str] = set()

        def limited(part: Part, options: object) -> str:
            done.append(part.name)
            if part.name in broken:
                return "stopped after 530 s"
            folder = tmp_path / "out" / "work" / part.name
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(part.name)
            return ""

        monkeypatch.setattr(gpu_suite, "run_limited", limited)

        def start(*arguments: str) -> list[str]:
            done.clear()
            command = ["gpu_suite", "--out", str(tmp_path / "out"), "--tiny", scale.targets[0]]
            monkeypatch.setattr(sys, "argv", [*command, *arguments])
            gpu_suite.main()
            return list(done)

        start.broken, start.done = broken, done
        return start

    def test_only_what_is_missing_is_run_again(self, run, tmp_path: Path) -> None:
        run.broken.add("forwards.tiny.eager")
        with pytest.raises(SystemExit, match="not measured: forwards"):
            run()
        assert len(run.done) == 5
        run.broken.clear()
        assert run() == ["forwards.tiny.eager"]
        assert run() == []
        with tarfile.open(tmp_path / "out" / "forwards.tiny.eager.tar.gz") as archive:
            assert archive.getnames() == ["forwards.tiny.eager", "forwards.tiny.eager/result.json"]

    def test_archives_that_were_carried_here_are_unpacked(self, run, tmp_path: Path) -> None:
        run("--parts", "calibrate")
        work = tmp_path / "out" / "work"
        (work / "calibrate.tiny.eager" / "result.json").unlink()
        (work / "calibrate.tiny.eager").rmdir()
        assert run("--parts", "calibrate", "held-out") == ["held-out.tiny.eager"]
        assert (work / "calibrate.tiny.eager" / "result.json").is_file()

    def test_no_part_begins_after_the_time(self, run) -> None:
        with pytest.raises(SystemExit, match="not measured: tests, calibrate"):
            run("--minutes", "0")
        assert run.done == []
