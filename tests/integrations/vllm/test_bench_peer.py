"""`rooftree bench` with the real vLLM as a peer, on the demo model in float32."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.bench.record import read_result

ROOT = Path(__file__).parents[3]
PROMPTS = ("Count from one to ten, twice.", "Repeat this sentence three times: it rains.")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (docs/engines.md)"),
]


def test_texts_of_vllm_are_those_of_plain_decoding(smollm2_folder, tmp_path):
    prompts, output = tmp_path / "made.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    arguments = (
        "-m rooftree bench --device cpu --dtype float32 --policy chain --policy transformers:none "
        "--new-tokens 32 --engine vllm --engine-option vllm:modes=dflash-7"
    )
    done = subprocess.run(
        [sys.executable, *arguments.split(), "--target", smollm2_folder, "--prompts", prompts,
         "--output", output],
        env=os.environ | {"PYTHONPATH": str(ROOT), "ROOFTREE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = read_result(output)
    assert result.failed == ()
    assert result.engines[0].versions["torch"].startswith("2.")
    plain = [response.tokens for response in result.of("plain")]
    for name in ("vllm:plain", "vllm:dflash-7"):
        responses = result.of(name)
        assert [response.tokens for response in responses] == plain, name
        # The first token comes with the prefill, the others in steps of their own.
        assert all(one.first_tokens == 1 and one.total_s > one.first_token_s for one in responses)
