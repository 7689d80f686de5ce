"""The parts of the GPU suite that check: a first text, kernels, logits and the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.models.llama.modeling_llama import rotate_half

from costmodel.errors import RooftreeError
from costmodel.statistics import Ints
from decoder.device import parse_dtype, select_device, synchronise
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model.attention import RowBlock, TreeVisible
from decoder.model.kv_cache import KVCache
from decoder.model.loading import LoadedModel
from decoder.model.making import make_target
from decoder.model.runtime.capture import CudaCapture
from decoder.model.runtime.tables import LayerCache, RowTables, needed_words
from decoder.model.target import Step, Target
from decoder.tree.draft_tree import DraftTree
from lab.studies.gpu_parts import SEED, Part, Scale, dtype_of, open_target, random_texts

# Root mean square difference of logits over their standard deviation; bfloat16 keeps 8 bits a
# number, and differences of the layers add up. The largest of millions says less.
LOGIT_TOLERANCES = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-4}
# The same of the worst row of one kernel's results: some roundings, whatever the largest number is.
KERNEL_TOLERANCES = {"bfloat16": 0.02, "float16": 0.003, "float32": 1e-4}
# A layer of Qwen3-8B.
HIDDEN, FFN, HEADS, KV_HEADS, WIDTH = 4096, 12288, 32, 8, 128
PRODUCTS = {  # outputs and inputs
    "qkv": ((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN), "o": (HIDDEN, HEADS * WIDTH),
    "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN), "head": (151936, HIDDEN),
}  # fmt: skip
EPSILON = 1e-6
INPUT_SETS, LOOPS = 3, 20  # of a timed loop: the inputs that it turns to, and its replays
# The error of numpy 2.4 and later for arrays of one number, which Triton 3.6's interpreter makes.
SCALAR_CONVERSION = "only 0-dimensional arrays can be converted"


def run_smoke(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """A short text of a small model with each policy, greedy and sampled; all must be plain's.

    Raises RooftreeError where tokens differ in float32, which says that trees are not exact.
    """
    target = open_target(Part(part.kind, part.target, part.runtime, "float32"), scale)
    prompt = random_texts(target.architecture.vocab, scale)[0][: scale.prompt_tokens]
    prompt = prompt[: len(prompt) // 2] * 2  # so that n-grams are found
    texts: dict[str, list[list[int]]] = {}
    for policy in ("plain", "chain", "fixed:15", "bastion"):
        decoder = TreeDecoder(target, drafter=NgramDrafter(), policy=policy, max_nodes=63)
        for sampling in ({}, {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": SEED}):
            text = decoder.generate(prompt, max_new_tokens=16, **sampling).token_ids  # type: ignore[arg-type]
            texts.setdefault(policy, []).append(text)
    differing = [policy for policy, both in texts.items() if both != texts["plain"]]
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
    return {"kernels": rows, "products": list(measured_products(scale))}


def measured_kernels(scale: Scale) -> Iterator[dict[str, Any]]:
    """The error, the repeatability and the seconds of each kernel, and a library's seconds.

    Times are of captured loops over several sets of inputs.
    """
    from decoder.model.runtime import kernels  # cannot be imported without Triton

    device = select_device(scale.device)
    noise = noise_of(device, parse_dtype(scale.dtype, device))
    kinds = [partial(small_cases, kernels, noise, rows) for rows in scale.kernel_rows]
    kinds += [
        partial(attention_cases, kernels, noise, rows, context)
        for rows in scale.kernel_rows
        for context in scale.attention_contexts
    ]
    sets = ([kind() for _ in range(INPUT_SETS)] for kind in kinds)
    for cases in (alike for several in sets for alike in zip(*several, strict=True)):
        case = cases[0]
        result, truth = case.kernel(), case.reference()
        yield {
            "kernel": case.name, "rows": case.rows, "context": case.context,
            "relative_error": max(
                relative_error(ours, theirs) for ours, theirs in zip(result, truth, strict=True)
            ),
            "deterministic": all(
                torch.equal(ours, again)
                for _ in range(scale.repeats)
                for ours, again in zip(result, case.kernel(), strict=True)
            ),
            "median_s": looped_s([one.kernel for one in cases], device, scale.repeats),
            "least_bytes": case.least_bytes,
            "library_s": {
                name: looped_s([one.libraries()[name] for one in cases], device, scale.repeats)
                for name in case.libraries()
            },
        }  # fmt: skip


def measured_products(scale: Scale) -> Iterator[dict[str, Any]]:
    """The library's products of a layer and the head, beside the bytes of their weights."""
    device = select_device(scale.device)
    noise = noise_of(device, parse_dtype(scale.dtype, device))
    for name, (outputs, inputs) in PRODUCTS.items() if scale.device == "cuda" else ():
        weights = [noise(outputs, inputs) for _ in range(INPUT_SETS)]
        for rows in scale.kernel_rows:
            x = noise(rows, inputs)
            calls = [partial(functional.linear, x, weight) for weight in weights]
            took_s = looped_s(calls, device, scale.repeats)
            yield {"product": name, "rows": rows, "median_s": took_s, "bytes": weights[0].nbytes}


Call = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A kernel's call, the same in float32 operations of PyTorch, and by a library.

    least_bytes  that must be read and written
    library      other ways than to compile the reference, on a GPU
    """

    name: str
    rows: int
    kernel: Call
    reference: Call
    least_bytes: int
    context: int = 0
    library: dict[str, Call] | None = None

    def libraries(self) -> dict[str, Call]:
        if not torch.cuda.is_available():
            return {}
        return self.library or {"torch.compile": torch.compile(self.reference, dynamic=False)}


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

    for name, kernel, reference, least_bytes in (
        ("rms_norm", lambda: (kernels.rms_norm(x, weight, EPSILON),),
         lambda: (normed(x),), 2 * x.nbytes),
        ("add_rms_norm", lambda: kernels.add_rms_norm(x, added, weight, EPSILON),
         lambda: (x + added, normed(x + added)), 4 * x.nbytes),
        ("swiglu", lambda: (kernels.swiglu(gate_up),), gated, gate_up.nbytes * 3 // 2),
    ):  # fmt: skip
        yield KernelCase(
            name=name, rows=rows, kernel=kernel, reference=reference, least_bytes=least_bytes
        )
    yield rotation_case(kernels, noise, rows)


def attention_cases(kernels: Any, noise: Noise, rows: int, context: int) -> Iterator[KernelCase]:
    like, shape = noise(1), SimpleNamespace(layers=1, kv_heads=KV_HEADS, head_dim=WIDTH)
    where = {"dtype": like.dtype, "device": like.device}
    cache = KVCache(shape, capacity=context + rows, sequences=1, zeros=_noisy(noise), **where)
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
    seen = torch.ones(rows, context + rows, dtype=torch.bool, device=like.device)
    if visible is not None:
        seen[:, context:] = torch.from_numpy(visible.dense()).to(like.device)
    inputs = (query.transpose(0, 1)[None], *cache.data[0, :, :, :, : context + rows])
    whole = {"scale": scale, "enable_gqa": True}

    def masked(*numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed = functional.scaled_dot_product_attention(*numbers, attn_mask=seen, **whole)
        return (mixed[0].transpose(0, 1),)

    library: dict[str, Call] = {}
    if like.device.type == "cuda":
        flex = torch.compile(flex_attention, dynamic=False)
        blocks = create_block_mask(lambda b, h, row, key: seen[row, key], None, None, *seen.shape)
        library = {
            "SDPA": lambda: masked(*inputs),
            "flex_attention": lambda: (flex(*inputs, block_mask=blocks, **whole),),
        }
    yield KernelCase(
        name="table_attention", rows=rows, context=context, library=library,
        kernel=lambda: (kernels.table_attention(query, keys, values, tables, scale),),
        reference=lambda: masked(*(one.float() for one in inputs)),
        least_bytes=2 * (context + rows) * KV_HEADS * WIDTH * like.itemsize,
    )  # fmt: skip


def rotation_case(kernels: Any, noise: Noise, rows: int) -> KernelCase:
    keys, values = noise(2, 1, KV_HEADS, rows, WIDTH)
    slots = torch.arange(rows, device=keys.device)
    layer = LayerCache(keys, values, torch.zeros_like(slots), slots)
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

    return KernelCase(
        name="rotate_and_store", rows=rows, kernel=stored, reference=reference,
        least_bytes=2 * qkv.nbytes,
    )  # fmt: skip


def _noisy(noise: Noise) -> Callable[..., torch.Tensor]:
    """In place of `torch.zeros`."""
    return lambda shape, **_: noise(*shape)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The norm of a row's difference over the norm of its true values, of the worst row."""
    ours, theirs = ours.double().flatten(1), theirs.double().flatten(1)
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


def looped_s(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, of loops over all calls: captured ones on a GPU."""

    def loop() -> None:
        for call in calls:
            call()

    replay, times, loops = loop, [], 1
    loop()
    if device.type == "cuda":
        replay, loops = CudaCapture(device).record(loop), LOOPS
    for _ in range(repeats):
        synchronise(device)
        start_s = perf_counter()
        for _ in range(loops):
            replay()
        synchronise(device)
        times.append((perf_counter() - start_s) / loops / len(calls))
    return float(np.median(times))


def run_texts(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Where greedy texts of trees leave those of plain decoding in this dtype, at near-ties.

    first_difference  the position in each text; None: the same text
    """
    target = open_target(part, scale)
    texts = random_texts(target.architecture.vocab, replace(scale, texts=scale.compared_texts))
    positions: list[int | None] = []
    for text in texts:
        prompt = text[: scale.prompt_tokens // 2] * 2
        plain, trees = (
            TreeDecoder(target, drafter=NgramDrafter(), policy=policy, max_nodes=63)
            .generate(prompt, max_new_tokens=scale.new_tokens // 4)
            .token_ids
            for policy in ("plain", "fixed:15")
        )
        pairs = enumerate(zip(plain, trees, strict=True))
        positions.append(next((at for at, (one, other) in pairs if one != other), None))
    return {"first_difference": positions, "same": positions.count(None), "texts": len(texts)}


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
    context, most = scale.verify_context, max(scale.verify_rows)
    drawn = np.random.default_rng(SEED).random(context + most)
    before: list[Any] = []

    def see(loaded: LoadedModel) -> None:
        tokens = (drawn * loaded.architecture.vocab).astype(np.int64)
        before.extend((tokens, transformers_logits(loaded.model, tokens, context - 1)))

    target = open_target(part, scale, see)
    tokens, truth = before
    captures = timed_captures(target)
    start_s = perf_counter()
    prompt = fill(target, tokens, context, most)
    prefill_s = perf_counter() - start_s
    target.prepare(most)
    prepare_s = perf_counter() - start_s - prefill_s
    eager = make_target(target.loaded, runtime="eager")
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
        "captures": captures, "warnings": list(target.runtime.warnings),
    }  # fmt: skip


def timed_captures(target: Target) -> list[dict[str, float]]:
    """A list that gets the seconds and bytes of each capture from now on."""
    capture, seen = target.runtime.capture, []
    if capture is not None:
        record = capture.record

        def timed(function: Callable[[], None]) -> Callable[[], None]:
            start_s, before_bytes = perf_counter(), capture.memory_bytes
            replay = record(function)
            took_s, more_bytes = perf_counter() - start_s, capture.memory_bytes - before_bytes
            seen.append({"seconds": took_s, "bytes": more_bytes})
            return replay

        capture.record = timed  # type: ignore[method-assign]
    return seen


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
