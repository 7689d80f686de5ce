"""What a plan implies for an engine's speculative settings, as text to type in.

Names as the engines' own pages have them:

- vLLM: `--speculative-config` with `method`, `model`, `num_speculative_tokens` and
  `num_speculative_tokens_per_batch_size`, a list of [first batch, last batch, tokens]
  (docs.vllm.ai, v0.25.0, features/speculative_decoding/dynamic_speculative_decoding; tested there
  with Eagle, Eagle-3 and DFlash; it cannot be used with data parallelism). Chains only.
- SGLang: `--speculative-algorithm DFLASH`, `--speculative-draft-model-path` and
  `--speculative-num-draft-tokens`, the rows of a verification, one more than are drafted
  (docs.sglang.io, 0.5.11, and the drafters' model cards). One size for all batches; chains only.
- transformers: this project's own decoder, which chooses the tree at each step from a profile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from costmodel.capacity.operating import OperatingPoint
from costmodel.errors import InputError

ENGINES = ("vllm", "sglang", "transformers")
VERSIONS = {"vllm": "vLLM 0.25", "sglang": "SGLang 0.5.11", "transformers": "rooftree 0.1"}
# Published DFlash drafters (z-lab on the Hugging Face hub).
DRAFTERS = {
    "qwen3-4b": "z-lab/Qwen3-4B-DFlash-b16",
    "qwen3-8b": "z-lab/Qwen3-8B-DFlash-b16",
    "llama-3.1-8b-instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
}
_NO_DRAFTER = "PATH_OF_A_DFLASH_DRAFTER"


def export(
    engine: str,
    target: str,
    tensor_parallel: int,
    points: Sequence[OperatingPoint],
    load: OperatingPoint,
) -> str:
    """Settings for one engine.

    `points`: the best chain or plain step at each concurrency for vLLM and SGLang, any for
    transformers; `load`: where the rate leaves a server. Raises InputError for another engine.
    """
    if engine == "vllm":
        return _vllm(target, tensor_parallel, points)
    if engine == "sglang":
        return _sglang(target, tensor_parallel, points, load)
    if engine == "transformers":
        return _transformers(target, load)
    raise InputError(f"no export is for '{engine}'", hint=f"Use one of: {', '.join(ENGINES)}")


def batch_table(points: Sequence[OperatingPoint]) -> list[list[int]]:
    """[first batch, last batch, drafted tokens], neighbours of equal size joined.

    A size holds from its concurrency up to the one before the next that was tried.
    """
    ordered = sorted(points, key=lambda point: point.running)
    table: list[list[int]] = []
    for i, point in enumerate(ordered):
        last = ordered[i + 1].running - 1 if i + 1 < len(ordered) else point.running
        if table and table[-1][2] == point.nodes:
            table[-1][1] = last
        else:
            table.append([point.running if table else 1, last, point.nodes])
    return table


def drafter_of(target: str) -> str:
    """A published drafter of this target, or a placeholder that says what is needed."""
    return DRAFTERS.get(target.lower().rpartition("/")[2], _NO_DRAFTER)


def _vllm(target: str, tensor_parallel: int, points: Sequence[OperatingPoint]) -> str:
    table = batch_table(points)
    most = max(tokens for _, _, tokens in table)
    lines = [f"# {VERSIONS['vllm']} and later; drafts are chains there", f"vllm serve {target} \\"]
    lines.append(f"  --tensor-parallel-size {tensor_parallel} \\")
    lines.append(f"  --max-num-seqs {table[-1][1]}" + (" \\" if most else ""))
    if most:
        config = {
            "method": "dflash",
            "model": drafter_of(target),
            "num_speculative_tokens": most,
            "num_speculative_tokens_per_batch_size": table,
        }
        lines.append(f"  --speculative-config '{json.dumps(config)}'")
    else:
        lines.append("# no --speculative-config: the plan drafts nothing at any batch")
    return "\n".join(lines) + "\n"


def _sglang(
    target: str, tensor_parallel: int, points: Sequence[OperatingPoint], load: OperatingPoint
) -> str:
    most = max(point.running for point in points)
    size = next((p.nodes for p in points if p.running >= load.running), points[-1].nodes)
    lines = [
        f"# {VERSIONS['sglang']} and later; one size for all batches, that of"
        f" {load.running} requests at once",
        "python -m sglang.launch_server \\",
        f"  --model-path {target} \\",
        f"  --tp-size {tensor_parallel} \\",
        f"  --max-running-requests {most}" + (" \\" if size else ""),
    ]
    if size:
        lines += [
            "  --speculative-algorithm DFLASH \\",
            f"  --speculative-draft-model-path {drafter_of(target)} \\",
            f"  --speculative-num-draft-tokens {size + 1}",
        ]
    else:
        lines.append("# no --speculative-algorithm: the plan drafts nothing there")
    return "\n".join(lines) + "\n"


def _transformers(target: str, load: OperatingPoint) -> str:
    policy = {"plain": '"plain"', "chain": '"chain"', "tree": '"bastion"'}[load.shape]
    chosen = {
        "plain": "the plan drafts nothing at this load",
        "chain": f"the plan's best at this load is a chain of {load.nodes} tokens",
        "tree": f"sizes come from the profile at every step; the plan's best is {load.nodes} nodes",
    }[load.shape]
    drafter = "" if load.shape == "plain" else f', drafter="{drafter_of(target)}"'
    lines = [
        f"# {VERSIONS['transformers']}; {chosen}",
        "from decoder import TreeDecoder",
        "",
        f'decoder = TreeDecoder.from_pretrained("{target}"{drafter}, policy={policy})',
    ]
    return "\n".join(lines) + "\n"
