"""The real engine on a CPU: calibrated in a small form, then steered by that profile."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from costmodel.profile.profile import Profile
from tests.conftest import CALIBRATED

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "data" / "vllm_decode.py"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
    "hidden_size": 576, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 2048,
}  # fmt: skip
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 4096}
MIMO = LLAMA | {
    "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1,
}  # fmt: skip

pytestmark = WITH_VLLM = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (docs/engines.md)"),
]


def run(*arguments: object, **environment: object) -> subprocess.CompletedProcess[str]:
    given = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"} | given,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    ends = CALIBRATED if "calibrate" in arguments else (0,)
    assert done.returncode in ends, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def profile(smollm2_folder, tmp_path_factory):
    options = "--batch 1,2 --max-nodes 7 --drafter ngram --time-budget 30s"
    return calibrated(tmp_path_factory.mktemp("home"), options, smollm2_folder)


def calibrated(home: Path, options: str, target: Path) -> Path:
    path = home / "engine.yaml"
    usual = "--engine-option enforce_eager=true --engine-option dtype=float32 --contexts 64,256"
    arguments = f"-m rooftree calibrate vllm {usual} {options} --json".split()
    done = run(*arguments, "--target", target, "--output", path, ROOFTREE_HOME=home)
    assert json.loads(done.stdout)["path"] == str(path)
    return path


def decoded(folder: Path, arm: str, profile: Path) -> tuple[dict, str]:
    done = run(PROGRAM, folder, arm, ROOFTREE_PROFILE=profile, ROOFTREE_HOME=profile.parent)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(line), done.stdout + done.stderr


@pytest.fixture(scope="module")
def plain(smollm2_folder, profile):
    return decoded(smollm2_folder, "plain", profile)[0]["texts"]


def test_the_profile_is_of_the_engine(profile):
    made = Profile.from_yaml(profile)
    engine = made.runtime.engine
    assert (made.runtime.kind, made.runtime.attention) == ("vllm", "CPU_ATTN")
    assert (engine.compilation, engine.graphs, engine.max_num_seqs) == ("none", "none", 2)
    assert engine.executor == "mp"
    assert made.target.architecture.layers == 30
    assert set(made.surface.batch) == {1, 2}
    assert made.held_out is not None
    (drafter,) = made.engine_drafters
    assert drafter == "vllm-ngram"


@pytest.mark.parametrize(("method", "config", "executor"), [
    ("draft_model", LLAMA, "mp"), ("eagle3", EAGLE3, "uni"), ("mtp", MIMO, "mp"),
])  # fmt: skip
def test_drafters_that_are_models(smollm2_folder, tmp_path, method, config, executor):
    """The executor `uni` has the worker in the engine's own process."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    drafter, target = ("mtp", folder) if method == "mtp" else (folder, smollm2_folder)
    options = f"--batch 1,2 --max-nodes 3 --drafter {drafter} --time-budget 40s"
    weights = "--engine-option load_format=dummy --engine-option skip_tokenizer_init=true"
    where = f"--engine-option distributed_executor_backend={executor}"
    made = Profile.from_yaml(calibrated(tmp_path, f"{options} {weights} {where}", target))
    assert made.key.executor == executor
    assert made.key.threads >= 1
    ((key, cost),) = made.engine_drafters.items()
    assert key.startswith(f"vllm-{method}-")
    assert set(cost.tokens) == {0, 1, 3}
    assert set(cost.batch) == {1, 2}


def test_texts_are_those_of_the_plain_engine(smollm2_folder, profile, plain):
    steered, _ = decoded(smollm2_folder, "policy", profile)
    assert steered["piloted"]
    assert steered["verified"] > 0
    assert steered["texts"] == plain


def test_a_table_by_batch_and_context_is_followed(smollm2_folder, profile, plain):
    steered, _ = decoded(smollm2_folder, "table", profile.with_name("missing.yaml"))
    assert steered["piloted"] and {2, 5} <= set(steered["asked"]) <= {0, 2, 5}
    assert steered["texts"] == plain


def test_without_a_profile_vllm_goes_on_by_itself(smollm2_folder, profile, plain):
    unsteered, output = decoded(smollm2_folder, "policy", profile.with_name("missing.yaml"))
    assert not unsteered["piloted"]
    assert output.count("Draft lengths are vLLM's own from now on") == 1
    assert unsteered["texts"] == plain
