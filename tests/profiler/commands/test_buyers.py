"""Questions of buyers, one command each: the order of devices, batches and contexts, 80 columns."""

import json
from itertools import pairwise

import pytest

from costmodel.catalog import find_device

CHAT = "--prompt-tokens 1000 --output-tokens 400"
EIGHT = "b300,b200,h200,h100-sxm,h100-pcie,a100-sxm-80gb,l40s,rtx-a6000"
MIXED = "--target Qwen/Qwen3-30B-A3B --gpus b200,h100-sxm --rate 5/s --output-tokens 400"
# The devices of --gpus stand in the order of their speed. The number: billions of bytes that a
# token reads at least, of the model's published size and precision.
QUESTIONS = {
    "chat": (f"--target Qwen/Qwen3-8B --gpus {EIGHT} --rate 20/s {CHAT}", 15.1),
    "batch 8": (f"--target Qwen/Qwen3-8B --gpus l40s --rate 2/s --max-running 8 {CHAT}", 15.1),
    "70B": ("--target Llama-3.3-70B-Instruct --gpus h100-sxm --tp 4 --weights fp8 --rate 5/s"
            f" {CHAT}", 69.0),
    "gpt-oss": (f"--target openai/gpt-oss-20b --gpus b200,h100-sxm --rate 5/s {CHAT}", 1.7),
    "32B": (f"--target Qwen/Qwen3-32B --gpus rtx-pro-6000-server --tp 2 --rate 1/s {CHAT}", 64.0),
    "mixture, 1k": (f"{MIXED} --prompt-tokens 1000", 5.5),
    "mixture, 8k": (f"{MIXED} --prompt-tokens 8000", 5.5),
    "mixture, 32k": (f"{MIXED} --prompt-tokens 32000", 5.5),
    "DGX Spark": (f"--target Qwen/Qwen3-8B --gpus gb10 --rate 0.2/s {CHAT}", 15.1),
    "at home": ("--target Qwen/Qwen3-8B --gpus rtx-5090,rtx-4090,rtx-3090 --rate 1/s"
                f" {CHAT}", 15.1),
}  # fmt: skip
COMPOSED = ("70B", "gpt-oss", "32B")  # from operator tables
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in COMPOSED else name for name in QUESTIONS
]


@pytest.mark.parametrize("name", NAMES)
def test_one_command_answers(run, monkeypatch, name):
    if name in COMPOSED:
        pytest.importorskip("aiconfigurator_core")
    words, read_gb = QUESTIONS[name]
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("plan", *words.split())
    assert code == 0 and out.startswith("Best: ")
    assert [line for line in (out + err).splitlines() if len(line) > 80] == []
    options = json.loads(run("plan", *words.split(), "--json")[1])["options"]
    fleets = {one["gpu"]: one["sizing"]["gpus"]["value"] for one in options}
    times = {o["gpu"]: {p["running"]: p["tpot_s"] for p in o["by_concurrency"]} for o in options}
    assert list(fleets.values()) == sorted(fleets.values())
    degree = int(words.partition("--tp ")[2][:1] or 1)
    for gpu, by_running in times.items():
        assert all(more >= 0.99 * less for less, more in pairwise(by_running.values()))
        bound_s = read_gb * 1e9 / degree / find_device(gpu).peak_bytes_per_s
        assert bound_s < by_running[1] < (15 if read_gb < 10 else 3.5) * bound_s
    for faster, slower in pairwise(words.partition("--gpus ")[2].split()[0].split(",")):
        both = times[faster].keys() & times[slower].keys()
        # A B200 waits for its host with few requests of a small model, as measured servers do.
        assert both and all(times[faster][at] < 1.1 * times[slower][at] for at in both)
        assert fleets[faster] <= fleets[slower]
