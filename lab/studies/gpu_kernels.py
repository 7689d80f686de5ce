"""The part of the GPU suite for kernels: each beside a library's, and a whole layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from costmodel.errors import RooftreeError
from decoder.device import parse_dtype, select_device, synchronise
from decoder.model.attention import RowBlock, attending
from decoder.model.kv_cache import CacheShape, KVCache
from decoder.model.runtime.capture import CudaCapture
from decoder.model.runtime.fused import FusedForward, TableAttention
from decoder.model.runtime.tables import RowTables, needed_words
from decoder.tree.draft_tree import visibility
from lab.studies.gpu_parts import Part, Scale

# Norm of a row's difference over the norm of its true values, of the worst row: some roundings.
KERNEL_TOLERANCES = {"bfloat16": 0.02, "float16": 0.003, "float32": 1e-4}
# A layer of Qwen3-8B.
HIDDEN, FFN, HEADS, KV_HEADS, WIDTH = 4096, 12288, 32, 8, 128
PRODUCTS = {  # outputs and inputs
    "qkv": ((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN), "o": (HIDDEN, HEADS * WIDTH),
    "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN), "head": (151936, HIDDEN),
}  # fmt: skip
LAYER = Qwen3Config(
    hidden_size=HIDDEN, intermediate_size=FFN, num_attention_heads=HEADS, head_dim=WIDTH,
    num_key_value_heads=KV_HEADS, num_hidden_layers=1,
)  # fmt: skip
EPSILON = 1e-6
INPUT_SETS, LOOPS = 3, 20  # of a timed loop: the inputs that it turns to, and its replays
# The error of numpy 2.4 and later for arrays of one number, which Triton 3.6's interpreter makes.
SCALAR_CONVERSION = "only 0-dimensional arrays can be converted"


def run_kernels(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Each Triton kernel at the sizes of Qwen3-8B against PyTorch's operations, and its seconds.

    Nothing is measured, with the reason, where Triton's interpreter fails under this NumPy.
    Raises RooftreeError where a difference is more than rounding, or two calls differ.
    """
    from triton.runtime.errors import InterpreterError  # only where Triton is

    try:
        with torch.no_grad(), every_shape_compiled():
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


def every_shape_compiled() -> Any:
    """Inside it torch.compile compiles a function for more than 8 shapes."""
    return torch._dynamo.config.patch(recompile_limit=256)


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
    with torch.device(device):
        layer = Qwen3DecoderLayer(LAYER, 0).to(parse_dtype(scale.dtype, device))
    sets = [zip(*(kind() for _ in range(INPUT_SETS)), strict=True) for kind in kinds]
    sets += [layer_cases(layer, noise, rows, scale) for rows in scale.kernel_rows[::2]]
    for cases in chain(*sets):
        case = cases[0]
        result, truth = case.kernel(), case.reference()
        libraries = [one.libraries() for one in cases]
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
                name: looped_s([one[name] for one in libraries], device, scale.repeats)
                for name in libraries[0]
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


Call = Callable[..., Any]  # a kernel's gives the tensors of its result


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
        ("rms_norm", lambda: kernels.add_rms_norm(x, None, weight, EPSILON)[1:],
         lambda: (normed(x),), 2 * x.nbytes),
        ("add_rms_norm", lambda: kernels.add_rms_norm(x, added, weight, EPSILON),
         lambda: (x + added, normed(x + added)), 4 * x.nbytes),
        ("swiglu", lambda: (kernels.swiglu(gate_up),), gated, gate_up.nbytes * 3 // 2),
    ):  # fmt: skip
        yield KernelCase(
            name=name, rows=rows, kernel=kernel, reference=reference, least_bytes=least_bytes
        )
    yield rotation_case(kernels, noise, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRows:
    """Rows of a random tree behind a context, with noise in their cache.

    seen    boolean [rows, context + rows]
    stored  keys and values [1, kv_heads, context + rows, head_dim]
    """

    cache: KVCache
    tables: RowTables
    seen: torch.Tensor
    stored: tuple[torch.Tensor, ...]

    def masked(self, *sources: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            *sources, attn_mask=self.seen, scale=WIDTH**-0.5, enable_gqa=True
        )

    def flexible(self) -> Call:
        """`flex_attention` under the same mask, for torch.compile."""
        seen = self.seen
        blocks = create_block_mask(
            lambda b, h, row, key: seen[row, key], None, None, *seen.shape, device=seen.device
        )
        return partial(flex_attention, block_mask=blocks, scale=WIDTH**-0.5, enable_gqa=True)


def tree_rows(noise: Noise, rows: int, context: int) -> TreeRows:
    like, shape = noise(1), CacheShape(layers=1, kv_heads=KV_HEADS, head_dim=WIDTH)
    where = {"dtype": like.dtype, "device": like.device}
    where |= {"capacity": context + rows, "zeros": lambda shape, **_: noise(*shape)}
    cache = KVCache(shape, sequences=1, **where)
    cache.lengths = [context]
    random = np.random.default_rng(rows)
    parents = np.array([random.integers(0, node + 1) for node in range(rows - 1)], dtype=np.int64)
    visible = visibility(parents) if rows > 1 else None
    numbers = np.arange(rows, dtype=np.int64)
    block = RowBlock(0, numbers, numbers, visible)
    tables = RowTables(rows, 1, needed_words(cache, [block]), like.device)
    tables.fill(cache, [block])
    seen = torch.ones(rows, context + rows, dtype=torch.bool, device=like.device)
    if visible is not None:
        seen[:, context:] = torch.from_numpy(visible).to(like.device)
    stored = tuple(cache.data[0, :, :, :, : context + rows])
    return TreeRows(cache=cache, tables=tables, seen=seen, stored=stored)


def attention_cases(kernels: Any, noise: Noise, rows: int, context: int) -> Iterator[KernelCase]:
    tree, query = tree_rows(noise, rows, context), noise(rows, HEADS, WIDTH)
    inputs = (query.transpose(0, 1)[None], *tree.stored)
    keys, values = tree.cache.data[0]
    flex = torch.compile(tree.flexible(), dynamic=False)
    yield KernelCase(
        name="table_attention", rows=rows, context=context,
        library={"SDPA": lambda: tree.masked(*inputs), "flex_attention": lambda: flex(*inputs)},
        kernel=lambda: (kernels.table_attention(query, keys, values, tree.tables, WIDTH**-0.5),),
        reference=lambda: (tree.masked(*(one.float() for one in inputs))[0].transpose(0, 1),),
        least_bytes=2 * (context + rows) * KV_HEADS * WIDTH * query.itemsize,
    )  # fmt: skip


def layer_cases(
    layer: Any, noise: Noise, rows: int, scale: Scale
) -> Iterator[tuple[KernelCase, ...]]:
    """A whole layer as the runtimes run it, and compiled around `flex_attention`.

    One set of inputs will do, as the weights alone are more than a GPU's cache holds.
    """
    context = scale.attention_contexts[0]
    tree, x, fused = tree_rows(noise, rows, context), noise(rows, HIDDEN), FusedForward(layer)
    angles = noise(rows, WIDTH // 2).float().repeat(1, 2)[None]
    rope = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    flex = torch.compile(partial(composed_layer, layer, attend=tree.flexible()), dynamic=False)

    def ours() -> tuple[torch.Tensor, ...]:
        with attending(TableAttention(tree.cache.data, tree.tables)):
            return tuple(fused(x[None], rope))

    def exact() -> tuple[torch.Tensor, ...]:
        sources = (x.float(), tuple(one.float() for one in (*rope, *tree.stored)))
        return (composed_layer(deepcopy(layer).float(), *sources, attend=tree.masked),)

    case = KernelCase(
        name="layer", rows=rows, context=context, kernel=ours, reference=exact,
        library={"flex_attention": lambda: (flex(x, (*rope, *tree.stored)),)},
        least_bytes=sum(weight.nbytes for weight in layer.parameters()),
    )  # fmt: skip
    yield (case,)


def composed_layer(
    layer: Any, x: torch.Tensor, given: tuple[torch.Tensor, ...], attend: Call
) -> torch.Tensor:
    """The output [rows, hidden] of a layer's own modules; stores the rows' keys and values.

    given  cosines and sines [1, rows, head_dim], and the keys and values of `TreeRows`
    """
    (cos, sin, keys, values), own, rows = given, layer.self_attn, len(x)
    normed = layer.input_layernorm(x)
    query, key, value = (
        project(normed).view(1, rows, -1, WIDTH) for project in (own.q_proj, own.k_proj, own.v_proj)
    )
    query, key = own.q_norm(query).transpose(1, 2), own.k_norm(key).transpose(1, 2)
    query, keys[:, :, -rows:] = apply_rotary_pos_emb(query, key, cos, sin)
    values[:, :, -rows:] = value.transpose(1, 2)
    x = x + own.o_proj(attend(query, keys, values)[0].transpose(0, 1).reshape(rows, -1))
    out: torch.Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


def rotation_case(kernels: Any, noise: Noise, rows: int) -> KernelCase:
    keys, values = noise(2, 1, KV_HEADS, rows, WIDTH)
    tables = RowTables(rows, 1, 1, keys.device)
    tables.slots.copy_(torch.arange(rows, device=keys.device))
    qkv, norms = noise(rows, (HEADS + 2 * KV_HEADS) * WIDTH), (noise(WIDTH), noise(WIDTH))
    angles = noise(rows, WIDTH // 2).float().repeat(1, 2)
    cosines, sines = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)

    def stored() -> tuple[torch.Tensor, ...]:
        stored = keys, values, tables
        query = kernels.rotate_and_store(qkv, (cosines, sines), (*norms, EPSILON), *stored)
        place = (tables.owners, slice(None), tables.slots)
        return query, keys[place], values[place]

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
