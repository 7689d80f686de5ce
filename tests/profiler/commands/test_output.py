"""The output of every command: one form of JSON."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from costmodel.io import shipped_directory
from costmodel.profile.store import ProfileStore
from decoder.model.demo_model import FILES, demo_model_folder
from lab.bench.analysis.summary import derived
from lab.bench.record import write_result
from lab.papers.blockpilot.recipe import PilotFigures
from lab.training.recipe import Trained
from profiler.calibrate.run import CalibrationResult
from tests.costmodel.conftest import altered, without_tables
from tests.lab.bench.made_bench import PLAIN_ARM, make_result, policy_arm
from tests.profiler.made_profile import make_profile
from tests.source_files import commands
from tests.tiny_folder import isolate

ROOT = Path(__file__).parents[3]
TIMES = ROOT / "tests/integrations/data/times.csv"
SHIPPED = str(shipped_directory() / "h100-sxm" / "qwen3-8b.bfloat16.kernels.tp1.yaml")
ARMS = [PLAIN_ARM, *(policy_arm(policy, "ngram") for policy in ("bastion", "fixed:7"))]
RESULT = make_result(ARMS, per_set=2, repeats=1)


def arguments(folder: Path, target: Path) -> dict[str, str]:
    """The words of each command by its name, and files to run them on."""
    write_result(RESULT, folder / "result.json", **derived(RESULT))
    demo_model_folder().mkdir(parents=True)
    for name in FILES:
        (demo_model_folder() / name).write_text("{}")
    profile, made = ProfileStore().save(make_profile()), f"--output {folder}/made"
    on_target = f"--target {target}"
    here = f"{on_target} --device cpu --dtype float32"
    return {
        "bench": here, "bench show": f"{folder}/result.json",
        "calibrate": f"{here} --contexts 32,128 --max-nodes 15",
        "compose": f"--target qwen3-8b {made}", "demo-model": "--run", "devices": "", "doctor": "",
        "export": f"{SHIPPED} --engine vllm --acceptance 0.7",
        "fit": f"{TIMES} --device rtx-a6000 --target Llama-3.1-8B-Instruct",
        "generate": f"{here} --prompt a --prompt b --policy plain --max-new-tokens 2",
        "plan": f"--target Qwen/Qwen3-8B --gpus l40s,{SHIPPED} --prompt-tokens 1000 --rate 5/s"
        " --output-tokens 400 --acceptance gsm8k --price l40s=0.9 --max-running 2",
        "profiles list": "", "profiles plot": f"{profile} {folder}/a.png",
        "profiles show": f"{profile}", "profiles validate": f"{profile} {SHIPPED}",
        "support": "", "targets": "", "train-drafter": f"{on_target} {made}",
        "train-blockpilot": f"{on_target} --drafter some/drafter --texts x {made}",
        "transfer": f"{SHIPPED} h100-pcie {made}",
    }  # fmt: skip


@pytest.fixture
def replaced(tmp_path, monkeypatch):
    """What takes long or needs a download is replaced by what it would return."""
    figures = PilotFigures(samples=2, chosen=2.0, fixed=(1.5, 1.8), hindsight=2.1, right=0.5)
    pilot = SimpleNamespace(
        predictor=SimpleNamespace(config=SimpleNamespace(candidates=(4, 8))),
        epoch=3, trained=figures, held_out=None,
    )  # fmt: skip
    trained = Trained(tmp_path / "drafter", (64, 8), 900, [{"step": 1.0, "loss": float("nan")}])
    one = {"tokens_per_s": 10.0, "speedup": 1.0, "tokens_per_verification": 1.0}
    arms = dict.fromkeys(("plain", "chain", "fixed:15", "bastion"), one)
    rows = [{"name": "all", "prompt": "p", "text": "t", "same_tokens": True, "arms": arms}]
    comparison = {"profile": "none", "drafter": "ngram", "prompts": rows, "pooled": rows[0]}
    held_out = {"mape": 0.1, "p95": 0.2, "worst": 0.3, "regret": None, "regret_worst": None}
    fits = {"linear": {"held_out": held_out}, "physical": {"held_out": held_out}}
    device = make_profile()
    calibrated = CalibrationResult(
        profile=altered(device, provenance={"duration_s": 3.0}), path=tmp_path / "a.yaml",
        picture=tmp_path / "a.png", aside="",
        warnings=(), resumed_samples=0, unmeasured=(), skipped={},
    )  # fmt: skip
    made: dict[str, Any] = {
        "lab.bench.session.bench": RESULT,
        "profiler.calibrate.run.calibrate": calibrated,
        "profiler.calibrate.imported.fit_table": {
            "target": "a", "device": "b", "fitted": 9, "points": 9, "selected": "linear",
            "calibrations": fits,
        },
        "costmodel.compose.profiles.compose": device,
        "profiler.demo.compare": comparison,
        "lab.training.recipe.train_dflash": trained,
        "lab.papers.blockpilot.recipe.train_blockpilot": (tmp_path / "pilot", pilot, []),
        "lab.training.corpus.read_corpus": [],
    }  # fmt: skip
    monkeypatch.setattr("costmodel.compose.support.published_tables", without_tables)
    for name, value in made.items():
        monkeypatch.setattr(name, lambda *words, value=value, **options: value)
    isolate(monkeypatch, tmp_path)


SOURCES = {"calibrate fleet", "calibrate url", "calibrate vllm"}  # their output is calibrate's
# Every command that does something by itself.
EVERY = {
    name for name, command in commands()
    if name and (command.params or not isinstance(command, click.Group))
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(EVERY - SOURCES))
def test_json_is_alone_on_stdout_with_its_version(name, replaced, tmp_path, tiny_target, run):
    words = arguments(tmp_path, tiny_target)[name].split()
    code, out, _ = run(*name.split(), *words, "--json")
    assert code == 0
    documents = out.splitlines() if name == "generate" else [out]
    assert len(documents) == (2 if name == "generate" else 1)
    for document in documents:
        record = json.loads(document, parse_constant=pytest.fail)  # NaN, Infinity
        assert record["schema_version"] == 1
        assert list(record) == sorted(record)
