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


@pytest.fixture(scope="module")
def decoded(smollm2_folder, profile):
    """What each arm of the program came to, and all that it wrote."""
    arms = {
        "plain": "plain", "profile": profile, "table": "table",
        "no profile": profile.with_name("missing.yaml"),
    }  # fmt: skip
    done = run(PROGRAM, smollm2_folder, *arms.values(), ROOFTREE_HOME=profile.parent)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(arms, lines, strict=True)), done.stdout + done.stderr


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


def test_texts_are_those_of_the_plain_engine(decoded):
    arms, _ = decoded
    assert arms["profile"]["piloted"]
    assert arms["profile"]["verified"] > 0
    assert [arm["texts"] == arms["plain"]["texts"] for arm in arms.values()] == [True] * 4


def test_a_table_by_batch_and_context_is_followed(decoded):
    steered = decoded[0]["table"]
    assert steered["piloted"] and {2, 5} <= set(steered["asked"]) <= {0, 2, 5}


def test_without_a_profile_vllm_goes_on_by_itself(decoded):
    arms, output = decoded
    assert not arms["no profile"]["piloted"]
    assert output.count("Draft lengths are vLLM's own from now on") == 1
