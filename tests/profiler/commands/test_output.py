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
from lab.bench.record import Result, write_result
from lab.papers.blockpilot.recipe import PilotFigures
from lab.training.recipe import Trained
from profiler import checks, cli
from profiler.calibrate.run import CalibrationResult
from profiler.measure.machine import Activity
from tests.costmodel.conftest import altered, without_tables
from tests.lab.bench.made_bench import PLAIN_ARM, make_result, policy_arm
from tests.profiler.made_profile import make_profile
from tests.source_files import commands
from tests.tiny_folder import isolate, write_all

ROOT = Path(__file__).parents[3]
TIMES = ROOT / "tests/integrations/data/times.csv"
SHIPPED = str(shipped_directory() / "h100-sxm" / "qwen3-8b.bfloat16.kernels.tp1.yaml")
TRAFFIC = ["--prompt-tokens", "1000", "--output-tokens", "400", "--rate", "5/s"]


@pytest.fixture(scope="module")
def result():
    arms = [PLAIN_ARM, *(policy_arm(policy, "ngram") for policy in ("bastion", "fixed:7"))]
    return make_result(arms, per_set=2, repeats=1)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(write_all(tmp_path_factory.mktemp("tiny")))


class Place:
    """Files to run every command on."""

    def __init__(self, folder: Path, home: Path, target: str, result: Result) -> None:
        self.folder = folder / "made"
        self.target = target
        self.profile = str(ProfileStore([home]).save(make_profile()))
        self.result = str(folder / "result.json")
        write_result(result, self.result, **derived(result))
        demo_model_folder().mkdir(parents=True)
        for name in FILES:
            (demo_model_folder() / name).write_text("{}")

    def arguments(self) -> dict[str, list[str]]:
        """The words of each command, by its name."""
        on_cpu = ["--target", self.target, "--device", "cpu"]
        here = [*on_cpu, "--dtype", "float32"]
        return {
            "bench": here,
            "bench show": [self.result],
            "calibrate": [*here, "--contexts", "32,128", "--max-nodes", "15"],
            "compose": ["--target", "qwen3-8b", "--output", str(self.folder)],
            "demo-model": ["--run"],
            "devices": [],
            "doctor": [],
            "export": [SHIPPED, "--engine", "vllm", "--acceptance", "0.7"],
            "fit": [str(TIMES), "--device", "rtx-a6000", "--target", "Llama-3.1-8B-Instruct"],
            "generate": [*here, "--prompt", "a", "--prompt", "b", "--policy", "plain",
                         "--max-new-tokens", "2"],
            "plan": ["--target", "Qwen/Qwen3-8B", "--gpus", f"l40s,{SHIPPED}", *TRAFFIC,
                     "--acceptance", "gsm8k", "--price", "l40s=0.9", "--max-running", "2"],
            "profiles list": [],
            "profiles plot": [self.profile, str(Path(self.result).parent / "a.png")],
            "profiles show": [self.profile],
            "profiles validate": [self.profile, SHIPPED],
            "support": [],
            "targets": [],
            "train-blockpilot": [*on_cpu[:2], "--drafter", "some/drafter", "--texts", "x",
                                 "--output", str(self.folder)],
            "train-drafter": [*on_cpu[:2], "--output", str(self.folder)],
            "transfer": [SHIPPED, "h100-pcie", "--output", str(self.folder)],
        }  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch, target, result):
    """The place; what takes long or needs a download is replaced by what it would return."""
    figures = PilotFigures(samples=2, chosen=2.0, fixed=(1.5, 1.8), hindsight=2.1, right=0.5)
    pilot = SimpleNamespace(
        predictor=SimpleNamespace(config=SimpleNamespace(candidates=(4, 8))),
        epoch=3, trained=figures, held_out=None,
    )  # fmt: skip
    trained = Trained(tmp_path / "drafter", (64, 8), 900, [{"step": 1.0, "loss": float("nan")}])
    rows = [{"name": "all", "prompt": "p", "text": "t", "same_tokens": True, "arms": arms()}]
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
        "lab.bench.session.bench": result,
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
    monkeypatch.setattr(
        "costmodel.compose.support.published_tables", without_tables
    )  # reading tables takes seconds
    for name, value in made.items():
        monkeypatch.setattr(name, lambda *words, value=value, **options: value)
    monkeypatch.setattr(checks, "observe", lambda: Activity(processes=(), steal_share=0.0))
    home = isolate(monkeypatch, tmp_path)
    return Place(tmp_path, home, target, result)


def arms() -> dict[str, dict[str, float]]:
    one = {"tokens_per_s": 10.0, "speedup": 1.0, "tokens_per_verification": 1.0}
    return dict.fromkeys(("plain", "chain", "fixed:15", "bastion"), one)


SOURCES = {"calibrate fleet", "calibrate url", "calibrate vllm"}  # their output is calibrate's
# Every command that does something by itself.
EVERY = {
    name for name, command in commands()
    if name and (command.params or not isinstance(command, click.Group))
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(EVERY - SOURCES))
def test_json_is_alone_on_stdout_with_its_version(name, place, capsys):
    assert cli.run([*name.split(), *place.arguments()[name], "--json"]) == 0
    out = capsys.readouterr().out
    documents = out.splitlines() if name == "generate" else [out]
    assert len(documents) == (2 if name == "generate" else 1)
    for document in documents:
        record = json.loads(document, parse_constant=pytest.fail)  # NaN, Infinity
        assert record["schema_version"] == 1
        assert list(record) == sorted(record)
