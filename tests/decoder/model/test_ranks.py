"""Two processes that share a target: the results of one process alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from costmodel.architecture import ModelArchitecture
from costmodel.errors import DeviceError, InputError
from decoder.model.loading import load_model
from decoder.model.ranks import ALONE, Ranks, SplitHead, join, rank_device
from decoder.model.runtime.graphs import GraphRuntime
from decoder.model.sharding import Piece, RandomWeights, build_shard, local_architecture
from decoder.model.target import Step
from tests.decoder.models import greedy, plain_logits, random_model, target_of
from tests.decoder.rank_program import (
    NEW_TOKENS,
    POLICIES,
    PROMPT,
    decoded,
    tree_of,
)
from tests.torchrun import torchrun

STORED = ("llama-gqa", "llama-mha-tied", "qwen3")  # 97 tokens, so that the heads are uneven


class Shared:
    """Results of two processes, and the models that they shared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for family in STORED:
            random_model(family).save_pretrained(folder / f"fits-{family}")
        random_model("qwen3").config.save_pretrained(folder / "fits-random")
        for family in ("qwen2", "qwen3-moe"):
            random_model(family).config.save_pretrained(folder / f"refused-{family}")
        ended = torchrun("tests.decoder.rank_program", str(folder), ROOFTREE_HOME=str(folder))
        assert ended.returncode == 0, ended.stderr
        self.ranks: list[dict[str, Any]] = [
            torch.load(folder / f"rank{rank}.pt") for rank in range(2)
        ]

    def whole(self, name: str) -> Any:
        """The model as one process has it."""
        folder = self.folder / f"fits-{name}"
        if name != "random":
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        config = AutoConfig.from_pretrained(folder)
        source = RandomWeights(deviation=config.initializer_range)
        return build_shard(config, (torch.float64, torch.device("cpu")), ALONE, source)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(tmp_path_factory.mktemp("shared"))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", [*STORED, "random"])
def test_logits_are_those_of_the_whole_model(shared: Shared, name: str, fused: bool) -> None:
    model = shared.whole(name)
    tree = tree_of(0, model.config.vocab_size)
    expected = [plain_logits(model, PROMPT)[-1]]
    text = list(PROMPT)
    for root in (7, 8):
        rows = [[root]]
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            rows.append([*rows[parent], token])
        expected.append(torch.stack([plain_logits(model, text + row)[-1] for row in rows]))
        text += rows[1]
    for rank in shared.ranks:
        for actual, wanted in zip(rank[f"fits-{name} {fused}"], expected, strict=True):
            # The models' norms are in float32.
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_text_and_trees_are_those_of_one_process(shared: Shared, policy: str) -> None:
    """With `bastion` after a probe of their own, from which every process has the same costs."""
    model = shared.whole("llama-gqa")
    (text, trees), (other_text, other_trees) = (rank[policy] for rank in shared.ranks)
    assert text == other_text == greedy(model, PROMPT, NEW_TOKENS)
    assert trees == other_trees
    if policy != "bastion":  # whose sizes hang on times
        assert (text, trees) == decoded(target_of(model), policy)


@pytest.mark.slow
def test_each_process_holds_its_part_alone(shared: Shared) -> None:
    for name in STORED:
        model = shared.whole(name)
        config = model.config
        layers = sum(
            parameter.numel()
            for layer in model.model.layers
            for parameter in layer.parameters()
            if parameter.ndim == 2
        )
        whole = sum(parameter.numel() for parameter in model.parameters())
        vocab, hidden = config.vocab_size, config.hidden_size
        for rank, rows in zip(shared.ranks, (49, 48), strict=True):
            kv_heads, held = rank[f"fits-{name} sizes"]
            assert kv_heads == config.num_key_value_heads // 2
            # A tied head is a part of the embedding, which all have.
            head = rows - (0 if config.tie_word_embeddings else vocab)
            assert held == whole - layers // 2 + head * hidden


@pytest.mark.slow
def test_the_probed_profile_is_of_their_degree(shared: Shared) -> None:
    names = {Path(rank["probed"]).name for rank in shared.ranks}
    assert names == {"fits-llama-gqa.float64.eager.tp2.yaml"}


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused_by_all(shared: Shared) -> None:
    for rank in shared.ranks:
        degree, family = rank["refused"]
        assert "4 heads, 1 KV heads and an FFN of 48 columns are not all multiples of 2" in degree
        assert "Degrees that divide them: 1 (" in degree
        assert "refused-qwen3-moe cannot be shared" in family and "Llama, Mistral" in family


def test_degrees_that_fit_are_named() -> None:
    architecture = ModelArchitecture(
        name="a", layers=2, hidden=64, heads=24, kv_heads=12, head_dim=8, ffn=90, vocab=7,
        tied=False,
    )  # fmt: skip
    for size in (1, 2, 3, 6):
        local = local_architecture(architecture, size)
        assert (local.heads, local.kv_heads, local.ffn) == (24 // size, 12 // size, 90 // size)
        assert (local.vocab, local.head_dim, local.layers) == (7, 8, 2)
    for size in (4, 5, 12):
        with pytest.raises(InputError, match=r"divide them: 1, 2, 3, 6 \("):
            local_architecture(architecture, size)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_random_pieces_are_cut_from_one_tensor(axis: int, size: int) -> None:
    """Also where a piece begins inside a chunk of one seed."""
    shape = (600, 9) if axis == 0 else (9, 600)
    pieces = []
    for rank in range(size):
        own = tuple(n // size if i == axis else n for i, n in enumerate(shape))
        start = rank * own[axis]
        piece = Piece(whole=shape, axis=axis, start=start, stop=start + own[axis])
        part = torch.empty(own)
        assert RandomWeights(deviation=0.5).fill("x.weight", part, piece)
        pieces.append(part)
    whole = torch.empty(shape)
    RandomWeights(deviation=0.5).fill("x.weight", whole, Piece(whole=shape, axis=axis, stop=600))
    assert torch.equal(torch.cat(pieces, axis), whole)
    assert abs(whole.std().item() - 0.5) < 0.03
    assert len(torch.unique(whole)) > 0.99 * whole.numel()
    other = torch.empty(shape)
    RandomWeights(deviation=0.5).fill("y.weight", other, Piece(whole=shape, axis=axis, stop=600))
    assert not torch.equal(whole, other)


def test_the_last_ranks_may_have_no_part_of_a_small_vocabulary() -> None:
    rows = [SplitHead(5, Ranks(rank, 4)).rows for rank in range(4)]
    assert [range(5)[part] for part in rows] == [range(0, 2), range(2, 4), range(4, 5), range(0)]


class Unasked(Ranks):
    """One of some ranks of which the others are never asked."""

    def largest(self, value: float) -> float:
        return value

    def connect(self, device: torch.device) -> None:
        """Nobody is there."""


class TestDevices:
    @pytest.fixture(autouse=True)
    def two_gpus(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
        chosen: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    @pytest.mark.parametrize("name", [None, "cuda"])
    def test_each_process_has_the_gpu_of_its_number(
        self, monkeypatch: pytest.MonkeyPatch, two_gpus: list[torch.device], name: str | None
    ) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert rank_device(name, Unasked(1, 2)) == torch.device("cuda:1")
        assert two_gpus == [torch.device("cuda:1")]

    def test_more_processes_than_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_RANK", "2")
        with pytest.raises(DeviceError, match=r"no cuda:2: torch sees 2"):
            rank_device(None, Unasked(2, 3))

    def test_a_number_is_not_for_all_of_them(self) -> None:
        with pytest.raises(DeviceError, match=r"each of the 2 processes.*not cuda:1"):
            rank_device("cuda:1", Unasked(0, 2))
        assert rank_device("cuda:1", ALONE) == torch.device("cuda:1")

    def test_several_machines_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(DeviceError, match="4 processes are on several machines"):
            join(dist.HashStore(), rank=0, size=4)


class TestDamagedWeights:
    def load(self, folder: Path) -> None:
        load_model(
            str(folder), dtype=torch.float32, device=torch.device("cpu"), ranks=Unasked(0, 2)
        )

    def test_a_tensor_that_is_missing(self, tmp_path: Path) -> None:
        random_model("llama-gqa").save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(InputError, match=r"2 missing or of a wrong shape, as model\.norm"):
            self.load(tmp_path)

    def test_a_file_that_is_cut_short(self, tmp_path: Path) -> None:
        random_model("llama-gqa").save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(InputError, match="cannot load the weights in"):
            self.load(tmp_path)

    def test_quantised_weights(self, tmp_path: Path) -> None:
        model = random_model("llama-gqa")
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="quantised weights cannot be shared"):
            self.load(tmp_path)


class Answering(Ranks):
    """A rank of two whose counterpart always says the same."""

    def __init__(self, other: str) -> None:
        super().__init__(0, 2)
        self.other = other

    def any_text(self, text: str) -> str:
        return text or self.other


class CountedCapture:
    """Replays by calling again, as if it had been captured."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, function: Any) -> Any:
        self.recorded += 1
        return function

    def used_bytes(self) -> int:
        return 0


@pytest.mark.parametrize("other", ["", "out of memory elsewhere"])
def test_a_forward_that_another_cannot_capture_runs_eagerly_here_too(other: str) -> None:
    target = target_of(random_model("llama-gqa"))
    target.reserve(64)
    target.prefill(torch.tensor(PROMPT))
    tree = tree_of(1, 97)
    expected = target.verify([Step(7, tree)])[0].clone()
    capture = CountedCapture()
    runtime = GraphRuntime(target._step, target._eager, capture, 1 << 30, Answering(other))
    target.runtime = runtime
    target.cache.truncate(len(PROMPT))
    torch.testing.assert_close(target.verify([Step(7, tree)])[0], expected)
    assert capture.recorded == 1
    assert len(runtime.shapes(target.cache)) == (0 if other else 1)
    assert runtime.warnings == ((f"a forward of 16 rows runs eagerly: {other}",) if other else ())


def test_a_rehearsal_is_of_this_process_alone() -> None:
    ranks = Ranks(1, 2)  # without a group, so that any exchange would be an error
    with ranks.muted():
        assert torch.equal(ranks.sum_(torch.arange(3)), torch.arange(3))
        gathered = ranks.gather(torch.arange(4).view(2, 2))
    assert gathered.tolist() == [[[0, 1], [2, 3]]] * 2
    with pytest.raises(ValueError, match="process group"):
        ranks.sum_(torch.arange(3))
    assert np.isclose(ALONE.largest(2.5), 2.5)
