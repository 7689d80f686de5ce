"""The GPU suite on a CPU: every part in tiny, and going on where it stopped."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from costmodel.errors import InputError, RooftreeError
from costmodel.io import shipped_directory
from costmodel.profile.profile import Profile
from lab.studies import gpu_checks, gpu_kernels, gpu_suite
from lab.studies.gpu_parts import TINY, TOGETHER, Part, Scale, all_parts, planned_s, processes
from lab.studies.gpu_suite import run_part, store_archive
from tests.tiny_folder import fake_clock, isolate, write_config

TINY_OF_ONE = replace(TINY, targets=("tiny",))


@pytest.fixture
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scale:
    write_config(tmp_path / "tiny", num_hidden_layers=6)  # EAGLE-3 reads three of them
    isolate(monkeypatch, tmp_path)
    fake_clock(monkeypatch)
    return replace(TINY, targets=(str(tmp_path / "tiny"),))


def test_the_documented_commands_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short enough to be sent as one line, and well within ten minutes."""
    text = (Path(__file__).parents[3] / "docs" / "gpu-runs.md").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if line.startswith("export ")]
    assert commands and max(map(len, commands)) <= 2000
    for command in commands:
        arguments = shlex.split(command.partition("lab.studies.gpu_suite")[2])
        monkeypatch.setattr(sys, "argv", ["gpu_suite", *arguments])
        options = gpu_suite.parse()
        assert options.minutes <= 9 and options.archive.name == options.resume.name
        assert not options.parts and not options.tiny


def test_the_planned_parts_fit_three_commands_of_nine_minutes():
    """The first brings the first target's profile, plain tokens/s, and rows over the roofline."""
    commands: list[list[str]] = [[]]
    left_s = limit_s = 9 * 60 - gpu_suite.PACKING_S
    for group in processes(all_parts(Scale())):
        for done, part in enumerate(group):
            if planned_s([part]) > left_s:
                commands.append([])
                left_s = limit_s
            left_s -= part.planned_s if done and commands[-1] else planned_s([part])
            commands[-1].append(part.name)
    assert len(commands) <= 3, commands
    wanted = {f"{kind}.qwen3-8b.graphs" for kind in ("calibrate", "replay", "forwards", "logits")}
    assert wanted <= set(commands[0])


def test_kernels_that_a_library_beats_are_named(tmp_path):
    def row(rows, own_s, **library_s):
        return {
            "kernel": "attention", "rows": rows, "context": 1024, "median_s": own_s,
            "library_s": library_s,
        }  # fmt: skip

    assert gpu_suite.losses(tmp_path) == []
    rows = [row(1, 1e-5, SDPA=2e-5), row(64, 3e-5, SDPA=4e-5, flex=2e-5), row(2, 1e-5)]
    (tmp_path / "kernels").mkdir()
    stored = json.dumps({"result": {"kernels": rows}})
    (tmp_path / "kernels" / "result.json").write_text(stored)
    assert gpu_suite.losses(tmp_path)[1:] == ["attention | 64 | 1024 | 30.0 | 20.0 | flex"]


def test_the_tests_of_a_tiny_run_are_there():
    """In a file that has `gpu` tests; without any, pytest fails."""
    files = [path.read_text(encoding="utf-8") for path in Path("tests").rglob("test_*.py")]
    marked = [text for text in files if "@pytest.mark.gpu" in text]
    assert sum(f"\ndef {TINY.tests[1]}(" in text for text in marked) == 1


def test_a_layer_is_the_same_by_our_runtime_and_by_the_library(monkeypatch):
    sizes = {"HIDDEN": 64, "FFN": 96, "HEADS": 4, "KV_HEADS": 2, "WIDTH": 16}
    fields = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = dict(zip((*fields, "head_dim"), sizes.values(), strict=True))
    for name, size in sizes.items():
        monkeypatch.setattr(gpu_kernels, name, size)
    compiled = CompileCounter()  # by its eager backend; a compiler takes half a minute
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    noise = gpu_kernels.noise_of(torch.device("cpu"), torch.float32)
    layer = Qwen3DecoderLayer(Qwen3Config(num_hidden_layers=1, **config), 0)
    torch._dynamo.reset()
    with torch.no_grad(), gpu_kernels.every_shape_compiled():
        for shapes in range(1, 10):  # more than torch compiles for by itself
            [(case,)] = gpu_kernels.layer_cases(layer, noise, 2 * shapes, TINY)
            [truth], [ours] = case.reference(), case.kernel()
            [theirs] = case.library["flex_attention"]()
            assert max(gpu_kernels.relative_error(one, truth) for one in (ours, theirs)) < 1e-6
            assert compiled.frame_count == shapes


@pytest.mark.slow
def test_every_measuring_part_in_tiny(scale: Scale, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for part in all_parts(scale):
        if part.kind not in ("tests", "kernels") and not part.dtype:
            record = run_part(part, scale, tmp_path / "work")
            found[part.kind] = json.loads(json.dumps(record, allow_nan=False))["result"]
    assert found["smoke"]["policies"] == ["plain", "chain", "fixed:15", "bastion"]
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
    replay = found["replay"]
    best, plain = (sum(n for n, _ in replay["rows"][name]) / sum(s for _, s in replay["rows"][name])
                   for name in (replay["best_fixed"], "plain"))  # fmt: skip
    assert best == max(replay["tokens_per_s"][name] for name in ("fixed:3", "fixed:7"))
    assert replay["tokens_per_s"]["plain"] == plain
    stages = replay["bastion_stages_s"]
    outside = (stages["build_s"] + stages["accept_s"] + stages["commit_s"]) / sum(stages.values())
    assert replay["share_outside_forwards"] == pytest.approx(outside)
    assert [row["rows"] for row in found["logits"]["compared"]] == [0, 1, 8]
    assert all(row["same_argmax"] == 1.0 for row in found["logits"]["compared"])
    assert all(row["against_eager"] == 0.0 for row in found["logits"]["compared"][1:])
    table = found["launches"]["rows"]["1"]
    assert any("mm" in event["name"] for event in table["kernels"])
    assert table["launches"] >= len(table["kernels"]) and table["kernels_s"] > 0
    assert table["forward_s"] > 0 and found["launches"]["of_a_text"]["rounds"] > 1
    assert found["texts"] == {"first_difference": [None, None], "same": 2, "texts": 2}
    assert set(found["drafters"]["drafters"]) == {"dflash", "eagle3"}
    for drafter in found["drafters"]["drafters"].values():
        assert drafter["draft_s"][0] > 0 and drafter["rounds"] > 1


def test_logits_that_are_wrong_are_no_result(scale: Scale, tmp_path: Path, monkeypatch) -> None:
    real = gpu_checks.transformers_logits
    monkeypatch.setattr(gpu_checks, "transformers_logits", lambda *sources: real(*sources) + 0.1)
    part = Part("logits", scale.targets[0], "eager")
    with pytest.raises(RooftreeError, match=r"logits of \[0, 1, 8\] rows differ"):
        run_part(part, scale, tmp_path)
    assert (tmp_path / part.name / "logits.json").is_file()


@pytest.mark.slow
def test_the_kernels_of_a_layer_in_the_interpreter(tmp_path: Path) -> None:
    """In a process of its own, because importing the kernels chooses the interpreter."""
    write_config(tmp_path / "tiny")
    archive, work = tmp_path / "suite.tar.gz", tmp_path / "work"
    command = [sys.executable, "-m", "lab.studies.gpu_suite", "--archive", str(archive)]
    command += ["--tiny", str(tmp_path / "tiny"), "--work", str(work), "--parts", "kernels"]
    eagerly = os.environ | {"TORCH_COMPILE_DISABLE": "1"}  # a compiler takes half a minute
    done = subprocess.run(command, env=eagerly, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((work / "kernels" / "result.json").read_text())["result"]["kernels"]
    assert [row["kernel"] for row in rows] == [
        "rms_norm", "add_rms_norm", "swiglu", "rotate_and_store", "table_attention", "layer",
    ]  # fmt: skip
    assert all(row["relative_error"] < 1e-5 and row["deterministic"] for row in rows)


def test_without_a_gpu_it_says_that_it_needs_one(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--archive", str(tmp_path / "suite.tar.gz")])
    with pytest.raises(SystemExit, match="measures a CUDA device and there is none"):
        gpu_suite.main()


def test_only_what_is_missing_is_run_again(scale: Scale, tmp_path: Path, monkeypatch) -> None:
    """Of parts that write a file; a broken one fails after writing some."""
    broken, done = {"forwards.tiny.eager"}, []

    def limited(group: list[Part], options: argparse.Namespace, limit_s: float) -> str:
        for part in group:
            done.append(part.name)
            folder = options.work / part.name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "log.txt").write_text("so far")
            if part.name in broken:
                return "stopped after 120 s"
            (folder / "result.json").write_text('{"result": {"kernels": []}}')
        return ""

    def start() -> list[str]:
        done.clear()
        gpu_suite.main()
        return list(done)

    monkeypatch.setattr(gpu_suite, "run_limited", limited)
    archive = str(tmp_path / "suite.tar.gz")
    words = ["--archive", archive, "--resume", archive, "--work", str(tmp_path / "one")]
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *words, "--tiny", scale.targets[0]])
    with pytest.raises(SystemExit, match=r"not measured: forwards\.tiny\.eager, replay"):
        start()
    behind = len(TOGETHER) - 2  # parts of its process, which were not reached
    assert len(done) == len(all_parts(TINY_OF_ONE)) - behind
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    assert "forwards.tiny.eager/log.txt" in names  # what a failed part left helps to mend it
    assert "forwards.tiny.eager/result.json" not in names
    assert "forwards.tiny.eager/failed.json" in names
    broken.clear()
    again = [f"{kind}.tiny.eager" for kind in TOGETHER[2:]]
    assert start() == [*again, "forwards.tiny.eager"]
    assert start() == []


def test_a_part_that_takes_too_long_leaves_no_process(tmp_path: Path, monkeypatch) -> None:
    """What it started, too, would hold the device's memory."""
    command = ["sh", "-c", "sleep 600 & echo $!; sleep 600"]
    monkeypatch.setattr(gpu_suite, "child_command", lambda group, options: command)
    options = argparse.Namespace(work=tmp_path, tiny=None)
    assert gpu_suite.run_limited([Part("tests")], options, 2.0) == "stopped after 2 s"
    grandchild = int((tmp_path / "tests" / "log.txt").read_text())
    assert any(has_ended(grandchild) or time.sleep(0.1) for _ in range(600))


def has_ended(process: int) -> bool:
    """Whether a process is gone, or waits to be collected; a signal takes a moment."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_a_kernel_is_above_its_roundings_and_below_a_fault(seed):
    generator = torch.Generator().manual_seed(seed)
    gate, up = torch.randn(2, 256, 12288, generator=generator).bfloat16()
    active = torch.nn.functional.silu(gate.float())
    ours, truth = active.bfloat16() * up, active * up.float()
    assert gpu_kernels.relative_error(ours, truth) < gpu_kernels.KERNEL_TOLERANCES["bfloat16"] / 3
    ours[100, :64] = 0.0  # one tile of one row
    assert gpu_kernels.relative_error(ours, truth) > gpu_kernels.KERNEL_TOLERANCES["bfloat16"]


class TestStoring:
    def archive(self, folder: Path, device: str) -> Path:
        part = folder / "work" / "calibrate.tiny.eager"
        part.mkdir(parents=True)
        shipped = next(shipped_directory().glob("h100-sxm/*.yaml"))
        (part / "profile.yaml").write_bytes(shipped.read_bytes())
        (part / "result.json").write_text(
            json.dumps({"scale": {"device": device}, "environment": {"device": "NVIDIA H100"}})
        )
        gpu_suite.note(folder / "work", Part("texts", "tiny"), "stopped after 240 s", folder / "no")
        gpu_suite.pack(folder / "work", folder / "gpu.tar.gz")
        return folder / "gpu.tar.gz"

    def test_profiles_and_results_go_to_their_places(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr("lab.studies.common.RESULTS", tmp_path / "results")
        written = store_archive(self.archive(tmp_path, "cuda"), tmp_path / "calibrations")
        assert [path.parent.name for path in written] == ["h100-sxm", "results"]
        assert Profile.from_yaml(written[0]).device.name
        stored = json.loads(written[1].read_text())
        assert list(stored["parts"]) == ["calibrate.tiny.eager"]
        assert stored["failed"]["texts.tiny"]["reason"] == "stopped after 240 s"

    def test_numbers_of_a_cpu_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"calibrate\.tiny\.eager ran on a CPU"):
            store_archive(self.archive(tmp_path, "cpu"), tmp_path / "calibrations")
        assert not (tmp_path / "calibrations").exists()
