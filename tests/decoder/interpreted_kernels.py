"""Triton kernels in Triton's interpreter; run by test_triton.py, which switches it on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from decoder.model.runtime import kernels
from decoder.model.runtime.kernels import Launch, add_rms_norm, swiglu, table_attention
from decoder.model.runtime.tables import RowTables
from decoder.model.target import Step
from tests.decoder.models import PROMPT, random_model, random_tree, target_of
from tests.decoder.table_cases import TableCase, assert_finite_padding, cases, one_sequence

LAUNCHES = st.builds(
    Launch, block_rows=st.sampled_from([16, 32]), block_keys=st.sampled_from([16, 32]),
    parts=st.integers(1, 5),
)  # fmt: skip


@given(case=cases, launch=st.none() | LAUNCHES)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_the_kernel_is_full_masked_attention_in_drawn_cases(case, launch):
    made = TableCase(case)
    scale = made.width**-0.5
    output = table_attention(made.query, made.keys, made.values, made.tables, scale, launch)
    truth = made.truth()
    torch.testing.assert_close(output[: len(truth)].double(), truth, atol=1e-5, rtol=1e-5)
    assert_finite_padding(made, output)


def test_what_lies_behind_the_rows_is_never_read(monkeypatch):
    """Slots behind the tail may hold anything, NaN included; so may parts that no key is left for.

    40 keys make three parts of 16, and 3 keys make one, of five that are launched.
    """
    partials = []

    def empty(*sizes, **where):
        partials.append(torch.full(sizes, float("nan"), **where))
        return partials[-1]

    sizes = {"kv_heads": 2, "group": 2, "width": 24, "seed": 1}
    rows = {"rows": [5, 2], "prefixes": [40, 3, 0], "pending": 2, "padding": 3}
    made = TableCase(rows | sizes)
    truth = made.truth()
    for sequence in range(made.cache.sequences):
        rows = 5 if sequence == 0 else 2
        made.cache.data[:, :, sequence, :, made.cache.end(sequence) + rows :] = float("nan")
    monkeypatch.setattr(torch, "empty", empty)
    launch = Launch(block_rows=16, block_keys=16, parts=5)
    output = table_attention(made.query, made.keys, made.values, made.tables, 24**-0.5, launch)
    written = partials[0].isfinite().all(-1).all(-1)  # [parts and tail, rows]
    assert written[:, :5].all(1).tolist() == [True, True, True, False, False, True]
    assert written[:, 5:].all(1).tolist() == [True, False, False, False, False, True]
    torch.testing.assert_close(output[: len(truth)].double(), truth, atol=1e-5, rtol=1e-5)
    assert_finite_padding(made, output)


def test_float64_is_refused():
    made = one_sequence(1, dtype=torch.float64)
    with pytest.raises(InputError, match="no float64"):
        table_attention(made.query, made.keys, made.values, made.tables, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # bfloat16 is cut off there
@pytest.mark.parametrize("columns", [24, 576])
def test_a_sum_and_its_norm(columns, dtype):
    """The sum is rounded before the norm, as where transformers adds the residual."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, generator = LlamaRMSNorm(columns, eps=1e-5).to(dtype), torch.Generator().manual_seed(1)
    wide = torch.randn(5, 2 * columns, generator=generator).to(dtype)
    rows, added = wide[:, :columns], torch.randn(5, columns, generator=generator).to(dtype)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
        total, normed = add_rms_norm(rows, added, norm.weight, 1e-5)
        torch.testing.assert_close(total, rows + added, rtol=0, atol=0)
        torch.testing.assert_close(normed, norm(rows + added))


@pytest.mark.parametrize(("family", "rows"), [("qwen3", 17), ("qwen2", 3), ("llama-gqa", 1)])
def test_a_model_of_kernels_is_the_model(family, rows, monkeypatch):
    """Prompt, tree and features, with all kernels of the fused layers, against the model's own."""
    model, found = random_model(family, dtype=torch.float32), []
    tree = random_tree(rows, 0)
    for target in (target_of(model, "eager"), target_of(model, "eager")):
        target.capture((0, 1))
        target.reserve(60)
        prompt = target.prefill(torch.tensor(PROMPT)).clone()
        logits = target.verify([Step(5, tree)])[0].clone()
        found.append((prompt, logits, target.features().clone()))
        for module in ("fused", "eager"):
            name = f"decoder.model.runtime.{module}.kernels_usable"
            monkeypatch.setattr(name, lambda device: True)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [24, 1500])
def test_swiglu(width):
    gate_up = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:]
    torch.testing.assert_close(swiglu(gate_up), expected)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (3, 1, 24)])
def test_rotate_and_store(heads, kv_heads, width, normed):
    """Against transformers' own norm and rotation, and plain indexing."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    generator = torch.Generator().manual_seed(0)
    rows = 5
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * width, generator=generator)
    angle = torch.randn(rows, width // 2, generator=generator).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    query_norm, key_norm = Qwen3RMSNorm(width, eps=1e-5), Qwen3RMSNorm(width, eps=1e-5)
    with torch.no_grad():
        query_norm.weight.normal_(generator=generator)
        key_norm.weight.normal_(generator=generator)
    keys, values = torch.zeros(2, 2, kv_heads, 30, width)
    tables = RowTables(rows, 2, 1, torch.device("cpu"))
    owners, slots = torch.tensor([0, 0, 1, 1, 0]), torch.tensor([3, 4, 20, 22, 9])
    tables.owners, tables.slots = owners, slots
    norms = (query_norm.weight, key_norm.weight, 1e-5) if normed else None
    with torch.no_grad():
        output = kernels.rotate_and_store(qkv, (cos, sin), norms, keys, values, tables)
        query, key, value = qkv.view(1, rows, -1, width).split([heads, kv_heads, kv_heads], dim=2)
        if normed:
            query, key = query_norm(query), key_norm(key)
        query, key = apply_rotary_pos_emb(
            query.transpose(1, 2), key.transpose(1, 2), cos[None], sin[None]
        )
    torch.testing.assert_close(output, query[0].transpose(0, 1))
    for row in range(rows):
        place = (owners[row], slice(None), slots[row])
        torch.testing.assert_close(keys[place], key[0, :, row])
        torch.testing.assert_close(values[place], value[0, row])
    assert int((keys != 0).any(-1).sum()) == int((values != 0).any(-1).sum()) == rows * kv_heads
