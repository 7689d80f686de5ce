"""BlockPilot: blocks of any size, the predictor, and the choice after the prompt."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from costmodel.errors import InputError
from decoder.drafters.base import DraftRequest
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from decoder.profiling.probe import steady_draft
from decoder.profiling.startup import ProfileChoice
from decoder.tree.growth import TopPaths
from lab.papers.blockpilot.drafter import (
    BlockPilotDrafter,
    BlockPredictor,
    PilotConfig,
    local_candidates,
    save_predictor,
)
from tests.decoder.draft_models import VOCAB, dflash_folder, draft_target, rounds, sessions_of
from tests.decoder.drafters.test_dflash import WINDOWED, reference
from tests.decoder.models import OracleDrafter, greedy, plain_logits
from tests.tiny_folder import isolate, write_weights

PROMPT = [5, 17, 3, 88, 41, 2, 2, 60]
BLOCK = 5  # of the random drafter's training
CANDIDATES = (3, 4, 5, 6, 7)


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A data directory of one's own, and peaks that are known at once."""
    return isolate(monkeypatch, tmp_path)


def whole(depth):
    return DraftRequest(depth=depth, width=VOCAB, growth=TopPaths(), whole=True)


def config_of(target, folder, **changed):
    fields = {
        "drafter": str(folder),
        "drafter_hash": DFlashDrafter(target, folder).architecture_hash,
        "block_size": BLOCK,
        "candidates": CANDIDATES,
        "vocab": VOCAB,
        "hidden": 24,
    }
    return PilotConfig(**fields | changed)


def predictor_of(config, seed=0):
    """Random weights, large enough that different prompts get different block sizes."""
    model = BlockPredictor(config)
    model.draw(torch.Generator().manual_seed(seed))
    return model.eval().requires_grad_(False)


def pilot_folder(tmp_path, target, **changed):
    """A predictor's folder with its drafter beside it; returns the folder."""
    drafter = dflash_folder(tmp_path / "draft")[0]
    config = config_of(target, drafter, drafter="../draft", **changed)
    save_predictor(tmp_path / "pilot", predictor_of(config))
    return tmp_path / "pilot"


def decoder_with(drafter, target, policy="chain"):
    return TreeDecoder(
        target, drafter=drafter, policy=policy, profile=ProfileChoice(calibrate=False)
    )


class TestBlocksOfAnotherSize:
    @torch.inference_mode()
    @pytest.mark.parametrize("changed", [{}, WINDOWED], ids=["full", "windowed"])
    @pytest.mark.parametrize("size", [2, 4, 5, 7, 10])
    def test_against_the_reference(self, tmp_path, size, changed):
        """The straight-line reference, told that the checkpoint's block has this size."""
        target = draft_target()
        folder, config, tensors = dflash_folder(tmp_path / "draft", **changed)
        drafter = DFlashDrafter(target, folder, size)
        assert drafter.max_depth == size - 1
        for session, context in rounds(target, drafter, PROMPT, [1, 0, 3]):
            expected = reference(config | {"block_size": size}, tensors, target, context)
            lattice = session.draft(context, whole(size - 1))
            assert lattice.whole.shape == (size - 1, VOCAB)
            torch.testing.assert_close(lattice.whole, expected, atol=1e-5, rtol=0)

    @torch.inference_mode()
    def test_a_shorter_block_is_not_a_cut_of_the_longer_one(self, tmp_path):
        target = draft_target()
        folder = dflash_folder(tmp_path / "draft")[0]
        drafted = []
        for size in (3, 5):
            drafter = DFlashDrafter(target, folder, size)
            ((session, context),) = rounds(target, drafter, PROMPT, [])
            drafted.append(session.draft(context, whole(2)).whole)
        assert (drafted[0] - drafted[1]).abs().max() > 1e-3

    def test_the_text_after_the_name(self, tmp_path):
        target = draft_target()
        folder = dflash_folder(tmp_path / "draft")[0]
        drafter = load_drafter(f"{folder}@block=3", target)
        assert (drafter.max_depth, drafter.name) == (2, "dflash@block=3")
        small = dflash_folder(tmp_path / "small", block_size=3)[0]
        assert drafter.architecture_hash == load_drafter(str(small), target).architecture_hash
        trained = load_drafter(str(folder), target)
        assert (trained.max_depth, trained.name) == (4, "dflash")
        same = load_drafter(f"{folder}@block=5", target)
        assert same.architecture_hash == trained.architecture_hash

    @pytest.mark.parametrize("size", ["0", "1", "11", "999"])
    def test_sizes_that_cannot_be_drafted(self, tmp_path, size):
        folder = dflash_folder(tmp_path / "draft")[0]
        with pytest.raises(InputError, match="cannot be drafted") as raised:
            load_drafter(f"{folder}@block={size}", draft_target())
        assert "2 to 10" in raised.value.hint

    def test_other_drafters_have_no_block(self, tmp_path):
        small = write_weights(tmp_path / "small", vocab_size=VOCAB)
        for name in ("ngram", str(small)):
            with pytest.raises(InputError, match="only a DFlash drafter"):
                load_drafter(f"{name}@block=4", draft_target())

    @pytest.mark.parametrize("policy", ["chain", "fixed:9"])
    @pytest.mark.parametrize("size", [2, 3, 5, 8, 10])
    def test_greedy_output_is_that_of_plain_decoding(self, tmp_path, size, policy):
        target = draft_target(dtype=torch.float64)
        folder = dflash_folder(tmp_path / "draft")[0]
        decoder = decoder_with(f"{folder}@block={size}", target, policy)
        result = decoder.generate(PROMPT, max_new_tokens=30)
        assert result.token_ids == greedy(target.model, PROMPT, 30)
        if policy == "chain":
            assert max(result.stats.tree_nodes) == size - 1


class TestPredictor:
    @pytest.mark.parametrize("layers", [1, 2, 3])
    def test_against_a_straight_line(self, tmp_path, layers):
        target = draft_target()
        folder = dflash_folder(tmp_path / "draft")[0]
        model = predictor_of(config_of(target, folder, layers=layers))
        weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 5
        rows = logits.numpy()
        for i in range(layers):
            before = rows
            rows = np.maximum(weights[f"layers.{i}.weight"] @ rows + weights[f"layers.{i}.bias"], 0)
            if i > 0:
                rows = rows + before
        scores = weights["scores.weight"] @ rows + weights["scores.bias"]
        np.testing.assert_allclose(model(logits).numpy(), scores, rtol=1e-5, atol=1e-5)
        assert model.block_size(logits) == CANDIDATES[int(scores.argmax())]

    def test_the_papers_size_for_qwen3(self):
        """Table 1: 0.32 billion parameters for a vocabulary of 151 936."""
        config = PilotConfig(
            drafter="d",
            drafter_hash="h",
            block_size=16,
            candidates=local_candidates(16),
            vocab=151_936,
        )
        with torch.device("meta"):
            model = BlockPredictor(config)
        assert round(sum(weight.numel() for weight in model.parameters()) / 1e9, 2) == 0.32

    def test_dropout_keeps_the_mean_and_its_generator(self, tmp_path):
        target = draft_target()
        folder = dflash_folder(tmp_path / "draft")[0]
        model = predictor_of(config_of(target, folder, layers=1))
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
        generator = torch.Generator().manual_seed(0)
        many = model(logits.expand(20_000, -1), 0.2, generator)
        spread = many.std(0) / 20_000**0.5
        assert ((many.mean(0) - model(logits)[0]).abs() < 5 * spread).all()
        again = model(logits.expand(20_000, -1), 0.2, torch.Generator().manual_seed(0))
        assert torch.equal(many, again)

    @pytest.mark.parametrize(
        ("block", "radius", "sizes"),
        [
            (16, 2, (14, 15, 16, 17, 18)),
            (8, 3, (5, 6, 7, 8, 9, 10, 11)),
            (3, 2, (2, 3, 4, 5)),
            (2, 3, (2, 3, 4)),
        ],
    )
    def test_candidates(self, block, radius, sizes):
        assert local_candidates(block, radius) == sizes


@pytest.mark.slow
class TestChoiceAfterThePrompt:
    def prompts(self):
        random = np.random.default_rng(1)
        return [random.integers(0, VOCAB, length).tolist() for length in (1, 4, 9, 6, 12, 3, 7)]

    @pytest.mark.parametrize("policy", ["chain", "fixed:9", "bastion"])
    def test_greedy_output_is_that_of_plain_decoding(self, home, tmp_path, policy):
        target = draft_target(dtype=torch.float64)
        decoder = decoder_with(str(pilot_folder(tmp_path, target)), target, policy)
        assert isinstance(decoder.drafter, BlockPilotDrafter)
        for prompt in self.prompts():
            result = decoder.generate(prompt, max_new_tokens=20)
            assert result.token_ids == greedy(target.model, prompt, 20)

    def test_the_size_is_the_predictors_and_the_drafts_have_its_depth(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        drafter = load_drafter(str(pilot_folder(tmp_path, target)), target)
        given, decoder = sessions_of(drafter), decoder_with(drafter, target)
        sizes = set()
        for prompt in self.prompts():
            result = decoder.generate(prompt, max_new_tokens=20)
            scores = drafter.predictor(plain_logits(target.model, prompt)[-1])
            size = CANDIDATES[int(scores.argmax())]
            assert given[-1].block_size == size
            # A chain is as deep as the block, but for the end of the text.
            assert max(result.stats.tree_nodes) == size - 1
            assert result.stats.tree_nodes[0] == size - 1
            sizes.add(size)
        assert len(sizes) > 2  # else the test would not see whether the prompt matters

    def test_drafts_are_those_of_a_drafter_of_that_size(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        folder = pilot_folder(tmp_path, target)
        drafter = load_drafter(str(folder), target)
        given, decoder = sessions_of(drafter), decoder_with(drafter, target)
        for prompt in self.prompts():
            piloted = decoder.generate(prompt, max_new_tokens=20).stats
            spec = f"{tmp_path / 'draft'}@block={given[-1].block_size}"
            fixed = decoder_with(spec, target).generate(prompt, max_new_tokens=20).stats
            assert piloted.tree_nodes == fixed.tree_nodes
            assert piloted.accepted_depths == fixed.accepted_depths

    def test_each_text_of_a_batch_has_its_own(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        drafter = load_drafter(str(pilot_folder(tmp_path, target)), target)
        given, decoder = sessions_of(drafter), decoder_with(drafter, target)
        results = decoder.generate_batch(self.prompts(), max_new_tokens=20)
        for prompt, result, session in zip(self.prompts(), results, given, strict=True):
            scores = drafter.predictor(plain_logits(target.model, prompt)[-1])
            assert session.block_size == CANDIDATES[int(scores.argmax())]
            assert result.token_ids == greedy(target.model, prompt, 20)

    def test_a_timed_draft_has_the_trained_size(self, tmp_path):
        target = draft_target()
        drafter = load_drafter(str(pilot_folder(tmp_path, target)), target)
        assert drafter.max_depth == max(CANDIDATES) - 1
        assert len(steady_draft(drafter, target, context=20)().tokens) == BLOCK - 1
        assert drafter.architecture_hash == drafter.dflash.architecture_hash

    def test_sampling_is_repeatable(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        decoder = decoder_with(str(pilot_folder(tmp_path, target)), target, "fixed:20")
        first, again = (
            decoder.generate(PROMPT, max_new_tokens=20, temperature=1.0, seed=4).token_ids
            for _ in range(2)
        )
        assert first == again


class Listener(OracleDrafter):
    """Drafts the truth second, and keeps the logits it is given and what they led to."""

    def __init__(self, truth):
        super().__init__(truth, VOCAB)
        self.read, self.emitted = [], []

    def read_logits(self, logits):
        self.read.append(logits.clone())

    def start(self, prompt, features, logits=None):
        self.read.append(logits.clone())
        return self

    def observe(self, emitted, features):
        self.emitted.append(list(emitted))


class TestLogitsForSessions:
    @pytest.mark.parametrize("policy", ["plain", "fixed:97", "chain"])
    def test_they_are_the_targets_own_before_each_bonus_token(self, policy):
        target = draft_target(dtype=torch.float64)
        truth = [*PROMPT, *greedy(target.model, PROMPT, 25)]
        drafter = Listener(truth)
        result = decoder_with(drafter, target, policy).generate(PROMPT, max_new_tokens=12)
        assert (result.stats.accepted_tokens > 0) == (policy == "fixed:97")
        plain = plain_logits(target.model, truth)
        at = len(PROMPT) - 1
        ends = [at + sum(map(len, drafter.emitted[:i])) for i in range(len(drafter.read))]
        for logits, end in zip(drafter.read, ends, strict=True):
            torch.testing.assert_close(logits, plain[end], atol=1e-5, rtol=0)
        assert len(drafter.read) == result.stats.rounds + 1


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


class TestFiles:
    def test_what_was_saved_is_loaded(self, tmp_path):
        target = draft_target()
        folder = pilot_folder(tmp_path, target)
        drafter = load_drafter(str(folder), target)
        saved = load_file(folder / "model.safetensors")
        loaded = drafter.predictor.state_dict()
        assert set(saved) == set(loaded)
        for name, tensor in saved.items():
            torch.testing.assert_close(loaded[name], tensor, atol=0, rtol=0)
        assert drafter.predictor.config.candidates == CANDIDATES

    @pytest.mark.parametrize(
        ("fields", "problem"),
        [
            ({"candidates": [4, 3]}, "'candidates' must be a list of block sizes, ascending"),
            ({"candidates": []}, "'candidates' must be"),
            ({"candidates": [1, 2]}, "block sizes of 2 to 10"),
            ({"candidates": [9, 11]}, "block sizes of 2 to 10"),
            ({"candidates": [4, 5.0]}, "'candidates' must be"),
            ({"candidates": [3, 4, 5]}, "of a wrong shape"),
            ({"drafter": None}, "'drafter' must be a text and is missing"),
            ({"drafter": 3}, "'drafter' must be a text"),
            ({"drafter": "."}, "which is no DFlash drafter"),
            ({"drafter": "/nowhere/at/all"}, "there is no folder"),
            ({"block_size": 1}, "'block_size' must be"),
            ({"block_size": 6}, "its block size is 6 and the drafter's 5"),
            ({"drafter_hash": "0" * 12}, "its hash is 000000000000"),
            ({"vocab_size": "97"}, "'vocab_size' must be"),
            ({"hidden_size": 25}, "of a wrong shape"),
            ({"num_layers": 3}, "missing"),
            ({"num_layers": 0}, "'num_layers' must be"),
        ],
    )
    def test_damaged_configs(self, tmp_path, fields, problem):
        target = draft_target()
        folder = pilot_folder(tmp_path, target)
        change(folder, **fields)
        with pytest.raises(InputError, match=problem):
            load_drafter(str(folder), target)

    def test_damaged_weights(self, tmp_path):
        target = draft_target()
        folder = pilot_folder(tmp_path, target)
        whole_file = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole_file[: len(whole_file) // 2])
        with pytest.raises(InputError, match="cannot read the weights"):
            load_drafter(str(folder), target)
        save_file({"layers.0.weight": torch.zeros(24, VOCAB)}, folder / "model.safetensors")
        with pytest.raises(InputError, match="5 missing"):
            load_drafter(str(folder), target)
        (folder / "model.safetensors").unlink()
        with pytest.raises(InputError, match="holds no model"):
            load_drafter(str(folder), target)

    def test_a_predictor_of_another_target(self, tmp_path):
        target = draft_target()
        folder = dflash_folder(tmp_path / "draft")[0]
        drafter = DFlashDrafter(target, folder)
        config = config_of(target, folder, vocab=VOCAB + 1)
        with pytest.raises(InputError, match="its vocabulary is 98 and the drafter's 97"):
            BlockPilotDrafter(drafter, predictor_of(config))
