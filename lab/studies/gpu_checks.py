"""The parts of the GPU suite that check: a first text, kernels, logits and the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from costmodel.errors import RooftreeError
from costmodel.statistics import Ints
from decoder.device import parse_dtype, select_device, synchronise
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model.attention import RowBlock, TreeVisible
from decoder.model.kv_cache import KVCache
from decoder.model.making import make_target
from decoder.model.runtime.fused import reference_table_attention
from decoder.model.runtime.tables import LayerCache, RowTables, needed_words
from decoder.model.target import Step, Target
from decoder.tree.draft_tree import DraftTree
from lab.studies.gpu_parts import SEED, Part, Scale, dtype_of, load, open_target, random_texts

# Root mean square difference of logits over their standard deviation; bfloat16 keeps 8 bits a
# number, and differences of the layers add up. The largest of millions says less.
LOGIT_TOLERANCES = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-4}
# The same of the worst row of one kernel's results: some roundings, whatever the largest number is.
KERNEL_TOLERANCES = {"bfloat16": 0.02, "float16": 0.003, "float32": 1e-4}
# A layer of Qwen3-8B.
HIDDEN, FFN, HEADS, KV_HEADS, WIDTH = 4096, 12288, 32, 8, 128
EPSILON = 1e-6
# The error of numpy 2.4 and later for arrays of one number, which Triton 3.6's interpreter makes.
SCALAR_CONVERSION = "only 0-dimensional arrays can be converted"


def run_smoke(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """A short text of a small model with each policy; all must be the plain one.

    Raises RooftreeError where tokens differ in float32, which says that trees are not exact.
    """
    target = open_target(Part(part.kind, part.target, part.runtime, "float32"), scale)
    prompt = random_texts(target.architecture.vocab, scale)[0][: scale.prompt_tokens]
    prompt = prompt[: len(prompt) // 2] * 2  # so that n-grams are found
    texts = {}
    for policy in ("plain", "chain", "fixed:15", "bastion"):
        decoder = TreeDecoder(target, drafter=NgramDrafter(), policy=policy, max_nodes=63)
        texts[policy] = decoder.generate(prompt, max_new_tokens=16).token_ids
    differing = [policy for policy, text in texts.items() if text != texts["plain"]]
    if differing:
        (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        raise RooftreeError(
            f"{', '.join(differing)} wrote another text than plain decoding",
            hint=f"{folder / 'texts.json'} has both.",
        )
    return {"policies": list(texts), "warnings": list(target.runtime.warnings)}


def run_kernels(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Each Triton kernel at the sizes of Qwen3-8B against PyTorch's operations, and its seconds.

    Nothing is measured, with the reason, where Triton's interpreter fails under this NumPy.
    Raises RooftreeError where a difference is more than rounding, or two calls differ.
    """
    from triton.runtime.errors import InterpreterError  # only where Triton is

    try:
        rows = list(measured_kernels(scale))
    except InterpreterError as error:
        if SCALAR_CONVERSION not in str(error):
            raise
        reason = f"Triton's interpreter fails under numpy {np.__version__}: {error}"
        print(f"skipped: {reason}")
        return {"kernels": [], "skipped": reason}
    wrong = [
        f"{row['kernel']} at {row['rows']} rows"
        for row in rows
        if row["relative_error"] > KERNEL_TOLERANCES[scale.dtype] or not row["deterministic"]
    ]
    (folder / "kernels.json").write_text(json.dumps(rows), encoding="utf-8")
    if wrong:
        raise RooftreeError(
            f"wrong: {', '.join(wrong)}", hint=f"{folder / 'kernels.json'} has the differences."
        )
    return {"kernels": rows}


def measured_kernels(scale: Scale) -> Iterator[dict[str, Any]]:
    """The error, the repeatability and the seconds of each kernel."""
    from decoder.model.runtime import kernels  # cannot be imported without Triton

    device = select_device(scale.device)
    noise = noise_of(device, parse_dtype(scale.dtype, device))
    cases = [case for rows in scale.kernel_rows for case in small_cases(kernels, noise, rows)]
    for rows in scale.kernel_rows:
        cases += attention_cases(kernels, noise, rows, scale.verify_context)
    for case in cases:
        result, truth = case.kernel(), case.reference()
        yield {
            "kernel": case.name,
            "rows": case.rows,
            "relative_error": max(
                relative_error(ours, theirs) for ours, theirs in zip(result, truth, strict=True)
            ),
            "deterministic": all(
                torch.equal(ours, again)
                for _ in range(scale.repeats)
                for ours, again in zip(result, case.kernel(), strict=True)
            ),
            "median_s": median_s(case.kernel, device, scale.repeats),
        }


Call = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A kernel's call, and the same in float32 operations of PyTorch."""

    name: str
    rows: int
    kernel: Call
    reference: Call


Noise = Callable[..., torch.Tensor]  # of a shape


def noise_of(device: torch.device, dtype: torch.dtype) -> Noise:
    """Random tensors of one dtype on one device."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device).to(dtype)


def small_cases(kernels: Any, noise: Noise, rows: int) -> Iterator[KernelCase]:
    x, added, weight = noise(rows, HIDDEN), noise(rows, HIDDEN), noise(HIDDEN)
    gate_up = noise(rows, 2 * FFN)

    def normed(values: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(values.float(), (HIDDEN,), weight.float(), EPSILON)

    def gated() -> tuple[torch.Tensor, ...]:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up,)

    yield KernelCase(
        name="rms_norm",
        rows=rows,
        kernel=lambda: (kernels.rms_norm(x, weight, EPSILON),),
        reference=lambda: (normed(x),),
    )
    yield KernelCase(
        name="add_rms_norm",
        rows=rows,
        kernel=lambda: kernels.add_rms_norm(x, added, weight, EPSILON),
        reference=lambda: (x + added, normed(x + added)),
    )
    yield KernelCase(
        name="swiglu", rows=rows, kernel=lambda: (kernels.swiglu(gate_up),), reference=gated
    )


def attention_cases(kernels: Any, noise: Noise, rows: int, context: int) -> Iterator[KernelCase]:
    like, shape = noise(1), SimpleNamespace(layers=1, kv_heads=KV_HEADS, head_dim=WIDTH)
    cache = KVCache(
        shape, capacity=context + rows, sequences=1, dtype=like.dtype, device=like.device
    )
    cache.data.copy_(noise(*cache.data.shape))
    cache.lengths = [context]
    random = np.random.default_rng(rows)
    parents = np.array([random.integers(0, node + 1) for node in range(rows - 1)], dtype=np.int64)
    visible = TreeVisible(parents) if rows > 1 else None
    numbers = np.arange(rows, dtype=np.int64)
    block = RowBlock(0, numbers, numbers, visible)
    tables = RowTables(rows, 1, needed_words(cache, [block]), like.device)
    tables.fill(cache, [block])
    keys, values = cache.data[0]
    query, scale = noise(rows, HEADS, WIDTH), WIDTH**-0.5
    yield KernelCase(
        name="table_attention",
        rows=rows,
        kernel=lambda: (kernels.table_attention(query, keys, values, tables, scale),),
        reference=lambda: (
            reference_table_attention(query.float(), keys.float(), values.float(), tables, scale),
        ),
    )
    layer = LayerCache(keys, values, tables.owners, tables.slots)
    yield rotation_case(kernels, noise, rows, layer)


def rotation_case(kernels: Any, noise: Noise, rows: int, layer: LayerCache) -> KernelCase:
    qkv, norms = noise(rows, (HEADS + 2 * KV_HEADS) * WIDTH), (noise(WIDTH), noise(WIDTH))
    angles = noise(rows, WIDTH // 2).float().repeat(1, 2)
    cosines, sines = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)

    def stored() -> tuple[torch.Tensor, ...]:
        query = kernels.rotate_and_store(qkv, (cosines, sines), (*norms, EPSILON), layer)
        place = (layer.owners, slice(None), layer.slots)
        return query, layer.keys[place], layer.values[place]

    def reference() -> tuple[torch.Tensor, ...]:
        heads = qkv.float().view(rows, -1, WIDTH).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        turned = []
        for part, weight in zip(heads, norms, strict=False):
            normed = functional.rms_norm(part, (WIDTH,), weight.float(), EPSILON)
            cosine, sine = cosines.float()[:, None], sines.float()[:, None]
            turned.append(normed * cosine + rotate_half(normed) * sine)
        return turned[0], turned[1], heads[2]

    return KernelCase(name="rotate_and_store", rows=rows, kernel=stored, reference=reference)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The norm of a row's difference over the norm of its true values, of the worst row."""
    ours, theirs = ours.double().flatten(1), theirs.double().flatten(1)
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


def median_s(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, launch included."""
    times = []
    for _ in range(repeats):
        synchronise(device)
        start_s = perf_counter()
        call()
        synchronise(device)
        times.append(perf_counter() - start_s)
    return float(np.median(times))


def run_tests(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """The tests that are marked `gpu`. Raises RooftreeError where one fails."""
    files = [
        str(path)
        for path in sorted(Path("tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *scale.tests, "-p", "no:cacheprovider", *files],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    (folder / "pytest.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode != 0:
        raise RooftreeError(f"tests fail: {last[0]}", hint=f"{folder / 'pytest.txt'} says why.")
    return {"summary": last[0]}


def run_logits(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Logits of the runtime against transformers' own and against eager ones.

    Of a prompt's last token, and of chains of each size, whose rows transformers computes as a
    continued prompt. Raises RooftreeError where they differ by more than rounding.
    """
    loaded = load(part, scale)
    context, most = scale.verify_context, max(scale.verify_rows)
    tokens = np.random.default_rng(SEED).integers(0, loaded.architecture.vocab, context + most)
    truth = transformers_logits(loaded.model, tokens, context - 1)
    target = make_target(loaded, runtime=part.runtime)  # type: ignore[arg-type]
    start_s = perf_counter()
    prompt = fill(target, tokens, context, most)
    prefill_s = perf_counter() - start_s
    target.prepare(most)
    prepare_s = perf_counter() - start_s - prefill_s
    eager = make_target(loaded, runtime="eager")
    fill(eager, tokens, context, most)
    compared = [{"rows": 0, **difference(prompt[None], truth[:1])}]  # of the prompt
    for rows in scale.verify_rows:
        ours, theirs = (chain(one, tokens, context, rows) for one in (target, eager))
        row = {"rows": rows, **difference(ours, truth[1 : 1 + rows])}
        compared.append(row | {"against_eager": relative_error(ours, theirs)})
    allowed = LOGIT_TOLERANCES[dtype_of(part, scale)]
    wrong = [row["rows"] for row in compared if row["rms_error"] > allowed]
    (folder / "logits.json").write_text(json.dumps(compared), encoding="utf-8")
    if wrong:
        raise RooftreeError(
            f"logits of {wrong} rows differ from transformers' by more than {allowed:.2%}",
            hint=f"{folder / 'logits.json'} has the differences.",
        )
    capture = target.runtime.capture
    return {
        "compared": compared, "allowed_rms_error": allowed, "first_prefill_s": prefill_s,
        "prepare_s": prepare_s, "capture_bytes": capture.memory_bytes if capture else 0,
        "captured_rows": list(target.runtime.buckets), "warnings": list(target.runtime.warnings),
    }  # fmt: skip


def fill(target: Target, tokens: Ints, context: int, most: int) -> torch.Tensor:
    """Prefill the context with room for `most` rows; float32 logits [vocab] on the host."""
    target.reserve(context + 2 * most)
    return target.prefill(torch.from_numpy(tokens[:context])).float().cpu()


def chain(target: Target, tokens: Ints, context: int, rows: int) -> torch.Tensor:
    """Float32 logits [rows, vocab], on the host, of a chain behind the context, not kept."""
    drafted = tokens[context + 1 : context + rows]
    places = np.arange(len(drafted), dtype=np.int64)
    tree = DraftTree(drafted, places, places + 1, np.full(len(drafted), 0.5))
    [logits] = target.verify([Step(int(tokens[context]), tree)])
    target.commit([])
    return logits.float().cpu()


@torch.inference_mode()
def transformers_logits(model: Any, tokens: Ints, first: int) -> torch.Tensor:
    """Float32 logits [tokens - first, vocab] by transformers' own forward, on the host."""
    ids = torch.from_numpy(tokens)[None].to(model.device)
    logits: torch.Tensor = model(ids, use_cache=False).logits[0, first:]
    return logits.float().cpu()


def difference(logits: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """Differences over the spread of the logits, and the share of equal first choices."""
    squares = (logits.double() - truth.double()).square().mean()
    return {
        "rms_error": float(squares.sqrt() / truth.double().std()),
        "relative_error": relative_error(logits, truth),
        "same_argmax": float((logits.argmax(-1) == truth.argmax(-1)).double().mean()),
    }
