"""BlockPilot: blocks of any size, the predictor, its training, and the choice after the prompt."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from decoder.profiling.startup import ProfileChoice
from lab.papers.blockpilot import drafter as pilot
from lab.papers.blockpilot import recipe
from lab.papers.blockpilot.drafter import PilotConfig
from lab.papers.blockpilot.recipe import (
    BlockSizeSample,
    PilotTraining,
    Sweep,
    Sweeper,
    best_candidates,
    distinct,
    train_predictor,
)
from lab.training.corpus import TrainingText
from tests.decoder import draft_models as made
from tests.decoder.draft_models import PROMPT, VOCAB, dflash_folder, draft_target, sessions_of
from tests.decoder.drafters.test_dflash import reference
from tests.decoder.models import greedy, plain_logits, request
from tests.tiny_folder import change_config

BLOCK = 5  # of the random drafter's training
CANDIDATES = (3, 4, 5, 6, 7)


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


@torch.inference_mode()
@pytest.mark.parametrize("changed", [{}, made.WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize("size", [2, 4, 5, 7, 10])
def test_blocks_of_another_size_are_the_references(tmp_path, size, changed):
    """The straight-line reference, told that the checkpoint's block has this size."""
    target = draft_target()
    folder, config, tensors = dflash_folder(tmp_path / "draft", **changed)
    drafter = DFlashDrafter(target, folder, size)
    assert drafter.max_depth == size - 1
    for session, context in made.rounds(target, drafter, PROMPT, [1, 0, 3]):
        expected = reference(config | {"block_size": size}, tensors, target, context)
        lattice = session.draft(context, request(size - 1, VOCAB, whole=True))
        assert lattice.whole.shape == (size - 1, VOCAB)
        torch.testing.assert_close(lattice.whole, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("layers", "kind"), [
    (1, "logits"), (2, "logits"), (3, "logits"), (2, "softmax"), (2, "normalised"),
])  # fmt: skip
def test_the_predictor_is_a_straight_line_of_layers(tmp_path, layers, kind):
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
@pytest.mark.parametrize(
    "changed", [{}, {"input": "hidden", "width": 3 * made.HIDDEN, "hidden": 32}]
)
def test_the_size_is_the_predictors_and_the_drafts_have_its_depth(tmp_path, changed):
    random = np.random.default_rng(1)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (1, 4, 9, 6, 12, 3, 7)]
    target = draft_target(dtype=torch.float64)
    drafter = load_drafter(str(pilot_folder(tmp_path, target, **changed)), target)
    given, decoder = sessions_of(drafter), decoder_with(drafter, target)
    texts, sizes = [], []
    for prompt in prompts:
        result = decoder.generate(prompt, max_new_tokens=20)
        texts.append(greedy(target.model, prompt, 20))
        assert result.token_ids == texts[-1]
        logits = plain_logits(target.model, prompt)[-1]
        scores = drafter.predictor(hidden_row(target, prompt) if changed else logits)
        sizes.append(CANDIDATES[int(scores.argmax())])
        # A chain is as deep as the block, but for the end of the text.
        assert max(result.stats.tree_nodes) == result.stats.tree_nodes[0] == sizes[-1] - 1
    assert len(set(sizes)) > 2  # else the test would not see whether the prompt matters
    together = decoder.generate_batch(prompts, max_new_tokens=20)
    assert [result.token_ids for result in together] == texts
    assert [session.block_size for session in given] == 2 * sizes


@pytest.mark.parametrize(("fields", "problem"), [
    ({"candidates": [4, 3]}, "'candidates' must be a list of block sizes, ascending"),
    ({"candidates": [1, 2]}, "block sizes of 2 to 10"),
    ({"candidates": [3, 4, 5]}, "of a wrong shape"),
    ({"drafter": "."}, "which is no DFlash drafter"),
    ({"drafter": "/nowhere/at/all"}, "there is no folder"),
    ({"input": "tokens"}, "'input' must be one of logits, softmax, normalised, hidden"),
    ({"block_size": 6}, "its block size is 6 and the drafter's 5"),
    ({"drafter_hash": "0" * 12}, "its hash is 000000000000"),
    ({"num_layers": 3}, "missing"),
])  # fmt: skip
def test_damaged_configs(tmp_path, fields, problem):
    target = draft_target()
    folder = pilot_folder(tmp_path, target)
    change_config(folder, **fields)
    with pytest.raises(InputError, match=problem):
        load_drafter(str(folder), target)


PROMPTS = [[5, 17, 3, 88, 41], [9], [2, 2, 60, 7, 1, 30], [44, 8]]
SWEEP = Sweep(radius=1, max_new_tokens=12)
NEAR = (4, 5, 6)
CONFIG = PilotConfig(
    drafter="draft", drafter_hash="0" * 12, block_size=5, candidates=NEAR, vocab=VOCAB,
    hidden=32,
)  # fmt: skip


def sweeper_of(tmp_path, target, new_tokens=12, **changed):
    """Over texts of the target, with a random drafter; `changed` are fields of its config."""
    model = DFlashDrafter(target, dflash_folder(tmp_path / "draft")[0]).model
    model.config = replace(model.config, **changed)
    written = [(prompt, greedy(target.model, prompt, new_tokens)) for prompt in PROMPTS]
    texts = [TrainingText((*prompt, *text), len(prompt)) for prompt, text in written]
    return Sweeper(target, model, texts, SWEEP)


def rounds_by_hand(config, tensors, target, prompt, size, new_tokens):
    """Rounds until so many tokens are there, by the reference's block and plain decoding."""
    text = [*prompt, *greedy(target.model, prompt, new_tokens + size)]
    at, count = len(prompt), 0  # the last token of the text so far, which the prefill gave
    while at < len(prompt) + new_tokens - 1:
        q = reference(config | {"block_size": size}, tensors, target, np.array(text[: at + 1]))
        wanted = len(prompt) + new_tokens - 1 - at
        drafted = q.argmax(-1).tolist()[: wanted - 1]
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == text[at + 1 + accepted]:
            accepted += 1
        at, count = at + accepted + 1, count + 1
    return count


@pytest.mark.slow
class TestSweep:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain", "packed"])
    @torch.inference_mode()
    def test_rounds_are_those_of_decoding(self, tmp_path, dtype):
        """Also where the target's own weights are packed, as on a CPU in float32."""
        target = draft_target(dtype=dtype)
        sweeper = sweeper_of(tmp_path, target)
        _, config, tensors = dflash_folder(tmp_path / "draft")
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        assert sweeper.candidates == NEAR
        for number, prompt in enumerate(PROMPTS):
            sample = sweeper.sample(number)
            logits = plain_logits(target.model, prompt)[-1].float()
            torch.testing.assert_close(sample.input, logits, atol=1e-4, rtol=0)
            parts = config, tensors, target, prompt
            rounds = [rounds_by_hand(*parts, size, 12) for size in NEAR]
            assert sample.rounds.tolist() == rounds
            assert sample.decoded == 11
            torch.testing.assert_close(sample.lengths, 11 / torch.tensor(rounds).double())

    def test_rounds_at_temperature_1_are_those_of_the_walk_rule(self, tmp_path, monkeypatch):
        """A seed gives one text under every walked tree, so each block size must decode it."""
        monkeypatch.setattr(recipe, "MOST_ROWS", 12)  # the blocks of a text in several parts
        target = draft_target(dtype=torch.float64)
        with torch.no_grad():
            target.model.lm_head.weight[:3] *= 8  # likelier tokens, which drafts can meet
        folder = str(dflash_folder(tmp_path / "draft")[0])

        def decoded(number, **options):
            decoder = TreeDecoder(target, acceptance="walk", **options)
            sampling = {"temperature": 1.0, "seed": number}
            return decoder.generate(PROMPTS[number], max_new_tokens=12, **sampling)

        texts = [decoded(number, policy="plain").token_ids for number in range(3)]
        both = zip(PROMPTS, texts, strict=False)
        sampled = [TrainingText((*prompt, *text), len(prompt)) for prompt, text in both]
        settings = replace(SWEEP, temperature=1.0, input="hidden")
        sweeper = Sweeper(target, DFlashDrafter(target, folder).model, sampled, settings)
        saved = 0
        for number, text in enumerate(texts):
            sample = sweeper.sample(number)
            row = hidden_row(target, PROMPTS[number]).float()
            torch.testing.assert_close(sample.input, row, atol=1e-4, rtol=1e-4)
            for size, rounds in zip(NEAR, sample.rounds.tolist(), strict=True):
                result = decoded(number, policy="chain", drafter=f"{folder}@block={size}")
                assert (result.token_ids, result.stats.rounds) == (text, rounds)
                saved += 11 - rounds
        assert saved > 9

    def test_texts_are_cut_where_decoding_would_stop(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        long, short = (sweeper_of(tmp_path, target, tokens) for tokens in (20, 12))
        for number in range(len(PROMPTS)):
            one, other = long.sample(number), short.sample(number)
            assert torch.equal(one.rounds, other.rounds)
            assert one.decoded == 11

    def test_a_text_of_one_new_token_has_no_rounds_and_no_label(self, tmp_path):
        sample = sweeper_of(tmp_path, draft_target(dtype=torch.float64), 1).sample(0)
        assert (sample.decoded, sample.rounds.tolist()) == (0, [0] * 3)
        assert sample.lengths is None
        labels = best_candidates([sample])
        assert labels.tolist() == [-1]
        with pytest.raises(InputError, match="no text tells"):
            train_predictor([sample], labels, CONFIG, PilotTraining(epochs=1))

    def test_drafters_with_windows_are_refused(self, tmp_path):
        with pytest.raises(InputError, match="only rows before them"):
            sweeper_of(
                tmp_path, draft_target(dtype=torch.float64), kinds=((None, True), (None, False))
            )


def sample_of(rounds, logits=None):
    logits = torch.zeros(VOCAB) if logits is None else logits
    return BlockSizeSample(input=logits, decoded=12, rounds=torch.tensor(rounds))


def test_the_best_block_is_the_longest_and_of_equals_the_smallest():
    samples = [sample_of(r) for r in ([6, 4, 5], [6, 4, 4], [3, 3, 3], [6, 5, 4], [0, 0, 0])]
    assert best_candidates(samples).tolist() == [1, 1, 0, 2, -1]
    samples = [sample_of(rounds) for rounds in ([6, 4, 3], [12, 3, 2], [12, 6, 2])]
    assert best_candidates(samples).tolist() == [2, 2, 2]
    # 2, 1.5, 1; 1, 2, 1.5; 1, 1, 1.5 tokens a second, where cycles take 1, 2 and 4 s
    assert best_candidates(samples, torch.tensor([1.0, 2.0, 4.0])).tolist() == [0, 1, 2]


def made_up(count, seed=0):
    """The best block follows from which of three tokens the target finds likeliest."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        logits = torch.randn(VOCAB, generator=generator)
        best = int(torch.randint(3, (), generator=generator))
        logits[[10, 40, 70]] = -4.0
        logits[[10, 40, 70][best]] = 8.0
        rounds = [6, 6, 6]
        rounds[best] = 3
        samples.append(sample_of(rounds, logits=logits))
    return samples


SETTINGS = PilotTraining(epochs=15, learning_rate=1e-3, hidden=32, held_out=0.25)


def train(samples, **changed):
    settings = replace(SETTINGS, **changed)
    return train_predictor(samples, best_candidates(samples), CONFIG, settings)


def test_it_learns_a_rule():
    result = train(made_up(200))
    unseen = made_up(100, seed=1)
    found = recipe.measure(result.predictor, unseen, best_candidates(unseen))
    assert found.right > 0.9 and found.samples == 100
    assert found.hindsight == 4.0
    assert found.chosen == pytest.approx(2.0 + 2.0 * found.right)
    assert max(found.fixed) < 3.0
    assert (result.trained.samples, result.held_out.samples) == (150, 50)
    assert result.predictor.config.candidates == NEAR


def test_a_prompt_is_swept_once_and_a_drafter_nearby_is_named_from_there(tmp_path):
    """Two of the texts have the same prompt."""
    prompts = (PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[2])
    corpus = [TrainingText((*one, 1, 2, 3), len(one)) for one in prompts]
    found = [list(text.tokens[: text.prompt_tokens]) for text in distinct(corpus, 9)]
    assert found == [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
    assert len(distinct(corpus, 2)) == 2
    folder = dflash_folder(tmp_path / "draft")[0]
    assert recipe.drafter_name(str(folder), tmp_path / "out" / "drafter") == "../../draft"
    assert recipe.drafter_name("some/drafter", tmp_path) == "some/drafter"
