"""BlockPilot: blocks of any size, the predictor, and the choice after the prompt."""

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.base import DraftRequest
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from decoder.profiling.startup import ProfileChoice
from decoder.tree.growth import TopPaths
from lab.papers.blockpilot import drafter as pilot
from lab.papers.blockpilot.drafter import PilotConfig
from tests.decoder import draft_models as made
from tests.decoder.draft_models import PROMPT, VOCAB, dflash_folder, draft_target, sessions_of
from tests.decoder.drafters.test_dflash import reference
from tests.decoder.models import greedy, plain_logits
from tests.tiny_folder import change_config

BLOCK = 5  # of the random drafter's training
CANDIDATES = (3, 4, 5, 6, 7)


def whole(depth):
    return DraftRequest(depth=depth, width=VOCAB, growth=TopPaths(), whole=True)


def config_of(target, folder, **changed):
    fields = {
        "drafter": str(folder), "drafter_hash": DFlashDrafter(target, folder).architecture_hash,
        "block_size": BLOCK, "candidates": CANDIDATES, "vocab": VOCAB, "hidden": 24,
    }  # fmt: skip
    return PilotConfig(**fields | changed)


def predictor_of(config, seed=0):
    """Random weights, large enough that different prompts get different block sizes."""
    model = pilot.BlockPredictor(config)
    model.draw(torch.Generator().manual_seed(seed))
    return model.eval().requires_grad_(False)


def pilot_folder(tmp_path, target, **changed):
    """A predictor's folder with its drafter beside it; returns the folder."""
    drafter = dflash_folder(tmp_path / "draft")[0]
    config = config_of(target, drafter, drafter="../draft", **changed)
    pilot.save_predictor(tmp_path / "pilot", predictor_of(config))
    return tmp_path / "pilot"


def hidden_row(target, prompt):
    """Outputs of layers 0, 2 and 4, which the drafter reads, at the prompt's last token."""
    states = made.plain_states(target, prompt)
    return torch.cat([states[number + 1][-1] for number in (0, 2, 4)])


def decoder_with(drafter, target, policy="chain"):
    profile = ProfileChoice(calibrate=False)
    return TreeDecoder(target, drafter=drafter, policy=policy, profile=profile)


class TestBlocksOfAnotherSize:
    @torch.inference_mode()
    @pytest.mark.parametrize("changed", [{}, made.WINDOWED], ids=["full", "windowed"])
    @pytest.mark.parametrize("size", [2, 4, 5, 7, 10])
    def test_against_the_reference(self, tmp_path, size, changed):
        """The straight-line reference, told that the checkpoint's block has this size."""
        target = draft_target()
        folder, config, tensors = dflash_folder(tmp_path / "draft", **changed)
        drafter = DFlashDrafter(target, folder, size)
        assert drafter.max_depth == size - 1
        for session, context in made.rounds(target, drafter, PROMPT, [1, 0, 3]):
            expected = reference(config | {"block_size": size}, tensors, target, context)
            lattice = session.draft(context, whole(size - 1))
            assert lattice.whole.shape == (size - 1, VOCAB)
            torch.testing.assert_close(lattice.whole, expected, atol=1e-5, rtol=0)


class TestPredictor:
    @pytest.mark.parametrize(("layers", "kind"), [
        (1, "logits"), (2, "logits"), (3, "logits"), (2, "softmax"), (2, "normalised"),
    ])  # fmt: skip
    def test_against_a_straight_line(self, tmp_path, layers, kind):
        target = draft_target()
        folder = dflash_folder(tmp_path / "draft")[0]
        model = predictor_of(config_of(target, folder, layers=layers, input=kind))
        weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 5
        rows = logits.double().numpy()
        if kind == "softmax":
            rows = np.exp(rows) / np.exp(rows).sum()
        if kind == "normalised":
            rows = (rows - rows.mean()) / rows.std()
        for i in range(layers):
            before = rows
            rows = np.maximum(weights[f"layers.{i}.weight"] @ rows + weights[f"layers.{i}.bias"], 0)
            if i > 0:
                rows = rows + before
        scores = weights["scores.weight"] @ rows + weights["scores.bias"]
        np.testing.assert_allclose(model(logits).numpy(), scores, rtol=1e-5, atol=1e-5)
        assert model.block_size(logits) == CANDIDATES[int(scores.argmax())]


@pytest.mark.slow
class TestChoiceAfterThePrompt:
    def prompts(self):
        random = np.random.default_rng(1)
        return [random.integers(0, VOCAB, length).tolist() for length in (1, 4, 9, 6, 12, 3, 7)]

    @pytest.mark.parametrize(
        "changed", [{}, {"input": "hidden", "width": 3 * made.HIDDEN, "hidden": 32}]
    )
    def test_the_size_is_the_predictors_and_the_drafts_have_its_depth(self, tmp_path, changed):
        target = draft_target(dtype=torch.float64)
        drafter = load_drafter(str(pilot_folder(tmp_path, target, **changed)), target)
        given, decoder = sessions_of(drafter), decoder_with(drafter, target)
        sizes = set()
        for prompt in self.prompts():
            result = decoder.generate(prompt, max_new_tokens=20)
            assert result.token_ids == greedy(target.model, prompt, 20)
            logits = plain_logits(target.model, prompt)[-1]
            scores = drafter.predictor(hidden_row(target, prompt) if changed else logits)
            size = CANDIDATES[int(scores.argmax())]
            assert given[-1].block_size == size
            # A chain is as deep as the block, but for the end of the text.
            assert max(result.stats.tree_nodes) == size - 1
            assert result.stats.tree_nodes[0] == size - 1
            sizes.add(size)
        assert len(sizes) > 2  # else the test would not see whether the prompt matters

    def test_each_text_of_a_batch_has_its_own(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        drafter = load_drafter(str(pilot_folder(tmp_path, target)), target)
        given, decoder = sessions_of(drafter), decoder_with(drafter, target)
        results = decoder.generate_batch(self.prompts(), max_new_tokens=20)
        for prompt, result, session in zip(self.prompts(), results, given, strict=True):
            scores = drafter.predictor(plain_logits(target.model, prompt)[-1])
            assert session.block_size == CANDIDATES[int(scores.argmax())]
            assert result.token_ids == greedy(target.model, prompt, 20)


class TestFiles:
    @pytest.mark.parametrize(("fields", "problem"), [
        ({"candidates": [4, 3]}, "'candidates' must be a list of block sizes, ascending"),
        ({"candidates": [1, 2]}, "block sizes of 2 to 10"),
        ({"candidates": [3, 4, 5]}, "of a wrong shape"),
        ({"drafter": None}, "'drafter' must be a text and is missing"),
        ({"drafter": "."}, "which is no DFlash drafter"),
        ({"drafter": "/nowhere/at/all"}, "there is no folder"),
        ({"block_size": 1}, "'block_size' must be"),
        ({"input": "tokens"}, "'input' must be one of logits, softmax, normalised, hidden"),
        ({"block_size": 6}, "its block size is 6 and the drafter's 5"),
        ({"drafter_hash": "0" * 12}, "its hash is 000000000000"),
        ({"num_layers": 3}, "missing"),
    ])  # fmt: skip
    def test_damaged_configs(self, tmp_path, fields, problem):
        target = draft_target()
        folder = pilot_folder(tmp_path, target)
        change_config(folder, **fields)
        with pytest.raises(InputError, match=problem):
            load_drafter(str(folder), target)
