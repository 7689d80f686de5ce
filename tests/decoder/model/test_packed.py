"""Packed weights: the outputs of the model's own layers, one copy of the weights, fallbacks."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from costmodel.errors import InputError
from decoder.cpu import VARIABLE, this_cpu
from decoder.drafters.checkpoint import read_config
from decoder.drafters.dflash.model import DFlashModel
from decoder.drafters.eagle3 import Eagle3Drafter
from decoder.model.loading import borrow_model
from decoder.model.making import make_target, quantised
from decoder.model.runtime import tiles
from decoder.model.runtime.eager import ModelStep
from decoder.model.runtime.layers import run_layers
from decoder.model.runtime.linear import PlainLinear, TiledLinear, join, plain_state
from decoder.model.runtime.packed import compile_ahead, packed_of
from decoder.model.target import Step
from decoder.profiling.measured_profile import profile_key
from decoder.tree.draft_tree import EMPTY
from lab.drafters.dflash2.model import DFlash2Model
from lab.drafters.domino.model import DominoModel
from tests.decoder.draft_models import PUBLISHED, draft_target, eagle3_folder
from tests.decoder.model.row_decoding import paths_of
from tests.decoder.model.test_fused import FUSIBLE, with_biases
from tests.decoder.models import FAMILIES, PROMPT, plain_logits, random_model, random_tree

pytestmark = pytest.mark.cpu_kind

BFLOAT16 = pytest.param(
    torch.bfloat16,
    id="bfloat16",
    marks=pytest.mark.skipif(not this_cpu().bfloat16, reason="this CPU packs no bfloat16"),
)
DTYPES = [pytest.param(torch.float32, id="float32"), BFLOAT16]
# In bfloat16 each of some thirty operations may round to the other side.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.15}


def target_of(model, runtime="auto"):
    return make_target(borrow_model(model), runtime=runtime)


def as_published(model):
    """The model with weights that are bfloat16 numbers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)
    return model


def outputs(target, sequences=1):
    """Logits of prompts, of trees behind them and of plain steps, and features."""
    target.capture((0, 1, 2))
    target.reserve(80, sequences)
    parts = [target.prefill(torch.tensor(PROMPT[s:]), s) for s in range(sequences)]
    trees = [Step(5, random_tree(14, s), s) for s in range(sequences)]
    for steps in (trees, [Step(7, EMPTY, s) for s in range(sequences)]):
        parts += [logits.clone() for logits in target.verify(steps)]
        parts += [target.features(s).clone() for s in range(sequences)]
        for s in range(sequences):
            target.commit([0], s)
    return parts


def assert_same_outputs(target, other, dtype=None, sequences=1):
    """Equal within the dtype's rounding; bit for bit without a dtype."""
    for ours, theirs in zip(outputs(target, sequences), outputs(other, sequences), strict=True):
        bound = TOLERANCE[dtype] * max(float(theirs.abs().max()), 1.0) if dtype else 0.0
        torch.testing.assert_close(ours.float(), theirs.float(), atol=bound, rtol=0)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_product_is_the_same_among_any_others(stored, given, threads, monkeypatch):
    monkeypatch.setattr(tiles, "WORTH", 0)
    torch.manual_seed(0)
    weight, scales = (torch.randn(101, 77) * 30).to(stored), torch.rand(101) + 0.5
    inputs, blocks = torch.randn(40, 77).to(given), tiles.pack(weight)
    factors = tiles.padded(scales) if stored == torch.int8 else torch.empty(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def products(rows):
        out = torch.ones(rows, blocks.shape[0] * tiles.OUTPUTS)
        tiles.add_product(out, inputs[-rows:], blocks, factors)
        return out

    try:
        all_rows = products(40)
        for rows in range(1, 40):
            assert torch.equal(products(rows), all_rows[-rows:])
    finally:
        torch.set_num_threads(before)
    scaled = weight.double() * (scales[:, None] if stored == torch.int8 else 1)
    wanted = 1 + inputs.double() @ scaled.t()
    torch.testing.assert_close(all_rows[:, :101].double(), wanted, atol=5e-3, rtol=0)
    assert torch.equal(tiles.unpacked(blocks, 101, 77), weight)
    assert torch.equal(tiles.rows_of(blocks, torch.tensor([100, 3]), 77), weight[[100, 3]])


def rows_of(target, steps):
    """Logits and features of each row of these steps, which are then dropped."""
    parts = target.verify(steps)
    features = [target.features(s).clone() for s in range(len(steps))]
    for s in range(len(steps)):
        target.commit([], s)
    return list(zip(parts, features, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "sizes"), [
    *((family, {}) for family in FUSIBLE), ("mistral", {"sliding_window": 12}),
])  # fmt: skip
def test_a_row_of_a_tree_is_bit_for_bit_a_plain_step(family, sizes, dtype):
    """Behind a prompt and the row's ancestors, each decoded alone; beside another sequence."""
    target = target_of(random_model(family, dtype=dtype, **sizes))
    target.capture((0, 1, 2))
    target.reserve(80, 2)
    for s in range(2):
        target.prefill(torch.tensor(PROMPT[s:]), s)
    trees = [random_tree(30, s) for s in range(2)]
    wanted = rows_of(target, [Step(5, tree, s) for s, tree in enumerate(trees)])
    lengths = list(target.cache.lengths)
    for s, tree in enumerate(trees):
        for row, path in enumerate(paths_of(tree)):
            for one in path:
                token = int(tree.row_tokens(5)[one])
                logits = target.verify([Step(token, EMPTY, s)])[0]
                features = target.features(s)
                target.commit([0], s)
            assert torch.equal(logits[0], wanted[s][0][row])
            assert torch.equal(features[0], wanted[s][1][row])
            target.cache.lengths[:] = lengths


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["plain", "published", "int8"])
def test_layers_are_compiled_once_and_ahead(form, dtype):
    """For any number of rows, sequences and captured layers, on a tiny model's forward."""
    model = random_model("qwen3", dtype=dtype)
    model, int8 = as_published(model) if form == "published" else model, form == "int8"
    compile_ahead(ModelStep(model, owned=False), int8=int8).join()
    before = len(run_layers.signatures)
    loaded = borrow_model(model)
    outputs(make_target(quantised(loaded, "int8") if int8 else loaded), sequences=2)
    assert before and len(run_layers.signatures) == before


ODD = {"hidden_size": 37, "intermediate_size": 51}  # products take pairs of bfloat16 numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "change", "sizes"), [
    *((family, None, {}) for family in FAMILIES),
    *((family, with_biases, {}) for family in FUSIBLE),
    ("qwen3", None, ODD), ("qwen3", as_published, ODD),
])  # fmt: skip
def test_packed_forwards_give_what_eager_ones_give(family, change, sizes, dtype):
    models = [random_model(family, dtype=dtype, **sizes) for _ in range(2)]
    models = [change(model) if change else model for model in models]
    packed, eager = target_of(models[0]), target_of(models[1], "eager")
    assert (packed.runtime.kind, eager.runtime.kind) == ("packed", "eager")
    assert (packed_of(models[0]).layers is not None) == (family in FUSIBLE)
    assert_same_outputs(packed, eager, dtype)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("family", ["llama-mha-tied", "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_state_of_packed_weights_are_the_plain_ones(family, dtype, published):
    model, tokens = random_model(family, dtype=dtype), np.array([3, 96, 0])
    model = as_published(model) if published else model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    head = model.get_output_embeddings().weight.detach().clone()
    embedding = model.get_input_embeddings().weight.detach().clone()
    logits = plain_logits(model, PROMPT)
    target = target_of(model)
    bound = TOLERANCE[dtype] * float(logits.abs().max())
    torch.testing.assert_close(plain_logits(model, PROMPT), logits, atol=bound, rtol=0)
    assert torch.equal(target.head_rows(tokens), head[tokens])
    assert torch.equal(target.head_weight(), head)
    assert torch.equal(target.embed(torch.tensor(tokens)), embedding[tokens])
    whole = plain_state(model)
    assert whole.keys() == state.keys()
    assert all(torch.equal(whole[name], state[name]) for name in state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_replace_the_plain_ones(dtype):
    """Half the bytes of float32 for published weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    model = as_published(random_model("llama-mha-tied", dtype=dtype, **sizes))
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    target_of(model)
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert len(linears) == 15 and all(one.weight.is_meta for one in linears)
    joined = {layer.__dict__["forward"].joined for layer in linears}
    packed_bytes = sum(one.blocks.nbytes for one in joined)
    plain_bytes = sum(one.nbytes for one in model.parameters() if not one.is_meta)
    most = 0.6 if dtype == torch.float32 else 1.1
    assert packed_bytes + plain_bytes <= most * weights_bytes


def test_targets_share_the_packed_weights_of_a_model_and_refuse_others():
    model = random_model("qwen3", dtype=torch.float32)
    assert_same_outputs(target_of(model), target_of(model))
    with pytest.raises(InputError, match="were packed"):
        target_of(model, "eager")


@pytest.mark.parametrize(
    ("dtype", "owned", "cpu", "reason"),
    [
        (torch.float64, True, "", "not in torch.float64"),
        (torch.float16, True, "", "not in torch.float16"),
        (torch.float32, False, "", "borrowed"),
        (torch.bfloat16, True, "avx2", "no bfloat16 products"),
    ],
)
def test_what_cannot_be_packed_runs_eagerly_and_says_so(dtype, owned, cpu, reason, monkeypatch):
    if cpu:
        monkeypatch.setenv(VARIABLE, cpu)
    for runtime in ("auto", "packed"):
        loaded = borrow_model(random_model("qwen3", dtype=dtype))
        target = make_target(loaded, owned=owned, runtime=runtime)
        assert target.runtime.kind == "eager" and packed_of(loaded.model) is None
        said = target.runtime.warnings
        # A borrowed model is not packed by default either, so only a choice of `packed` says so.
        assert len(said) == (runtime == "packed" or owned) and all(reason in one for one in said)
        assert not make_target(loaded, owned=owned, runtime="eager").runtime.warnings


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_joined_layers_packed_and_plain(rows, biased, dtype):
    torch.manual_seed(0)
    linears = [nn.Linear(24, out, bias=biased, dtype=dtype) for out in (16, 40)]
    inputs, others = (torch.randn(rows, width, dtype=dtype) for width in (24, 56))
    with torch.no_grad():
        wanted = torch.cat([one(inputs) for one in linears], -1)
        plain = PlainLinear(linears)
        torch.testing.assert_close(plain(inputs), wanted)
        packed = join(linears)
        assert isinstance(packed, TiledLinear)
        for joined in (plain, packed):
            torch.testing.assert_close(joined(inputs), wanted)
            torch.testing.assert_close(joined.outputs_from(10, inputs), wanted[:, 10:])
            rounded = torch.finfo(dtype).eps * 8  # of sums below 8
            total = joined.added_to(others, inputs)
            torch.testing.assert_close(total, others + wanted, atol=rounded, rtol=0)
        torch.testing.assert_close(linears[1](inputs), wanted[:, 16:])


def int8_target(family="qwen3", dtype=torch.float32):
    return make_target(quantised(borrow_model(random_model(family, dtype=dtype)), "int8"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_int8_forwards_are_those_of_the_rounded_weights(family, dtype):
    target = int8_target(family, dtype)
    rounded, original = (random_model(family, dtype=dtype) for _ in range(2))
    rounded.load_state_dict(plain_state(target.model))
    plain, changed = original.state_dict(), 0
    for name, weight in rounded.state_dict().items():
        if not torch.equal(weight, plain[name]):
            step = plain[name].float().abs().amax(1, keepdim=True) / 127
            slack = 0.51 if dtype == torch.float32 else 1.1  # the scale and the product round too
            error = (weight.float() - plain[name].float()).abs()
            assert bool((error <= slack * step).all()), name
            changed += 1
    assert changed >= 9
    assert_same_outputs(target, target_of(rounded, "eager"), dtype)


def test_int8_has_a_profile_key_and_weights_of_its_own():
    target, plain = int8_target(), target_of(random_model("qwen3", dtype=torch.float32))
    key, other = profile_key(target), profile_key(plain)
    assert (key.quantization, other.quantization) == ("int8", None)
    assert list(key.differences(other)) == ["quantization"]
    assert target.loaded.head_bytes == 1 + 4 / 32  # a float32 scale for 32 weights of an output
    assert 1.0 < target.loaded.weight_bytes < target.loaded.head_bytes  # others are wider


@pytest.mark.parametrize("runtime", ["packed", "eager"])
@pytest.mark.parametrize("rounded", [True, False])
def test_the_runtime_says_what_it_reads_of_a_weight(rounded, runtime):
    model = random_model("qwen3", dtype=torch.float32)
    loaded = target_of(as_published(model) if rounded else model, runtime).loaded
    read = 2.0 if rounded and runtime == "packed" else None  # None: 4, by the dtype
    assert (loaded.weight_bytes, loaded.head_bytes) == (read, read)


def test_int8_needs_the_packed_runtime():
    with pytest.raises(InputError, match=r"not in torch.float64"):
        int8_target(dtype=torch.float64)
    loaded = quantised(borrow_model(random_model("qwen3", dtype=torch.float32)), "int8")
    with pytest.raises(InputError, match="this is eager"):
        make_target(loaded, runtime="eager")
    with pytest.raises(InputError, match="quantised already"):
        quantised(loaded, "int8")


def test_drafters_are_packed_too(tmp_path):
    folder, _, tensors = eagle3_folder(tmp_path / "eagle3")
    drafter = Eagle3Drafter(draft_target(), folder)
    assert drafter.model.fc.weight.is_meta
    assert torch.equal(plain_state(drafter.model)["fc.weight"].float(), tensors["fc.weight"])
    kinds = {"dflash": DFlashModel, "dflash2": DFlash2Model, "domino": DominoModel}
    for (name, kind), dtype in product(kinds.items(), (torch.float64, torch.float32)):
        folder = PUBLISHED[name](tmp_path / name)[0]
        model = kind.load(folder, read_config(folder), torch.empty(0, dtype=dtype))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.passes()
        assert model.fc.weight.is_meta == (dtype == torch.float32)
        assert all(torch.equal(plain_state(model)[name], state[name]) for name in state)
