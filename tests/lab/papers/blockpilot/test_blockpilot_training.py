"""BlockPilot's sweeps and training, against rounds decoded by hand and made-up rules."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from lab.papers.blockpilot import recipe, sweeps
from lab.papers.blockpilot.drafter import BlockPilotDrafter, PilotConfig
from lab.papers.blockpilot.recipe import PilotTraining, distinct, train_predictor
from lab.papers.blockpilot.sweeps import BlockSizeSample, Sweep, Sweeper, best_candidates
from lab.training.corpus import TrainingText, read_corpus
from tests.decoder.draft_models import VOCAB, dflash_folder, draft_target
from tests.decoder.drafters.test_dflash import reference
from tests.decoder.models import greedy, plain_logits
from tests.lab.papers.blockpilot.test_blockpilot import hidden_row

PROMPTS = [[5, 17, 3, 88, 41], [9], [2, 2, 60, 7, 1, 30], [44, 8]]
SWEEP = Sweep(radius=1, max_new_tokens=12)
CANDIDATES = (4, 5, 6)
CONFIG = PilotConfig(
    drafter="draft", drafter_hash="0" * 12, block_size=5, candidates=CANDIDATES, vocab=VOCAB,
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
        assert sweeper.candidates == CANDIDATES
        for number, prompt in enumerate(PROMPTS):
            sample = sweeper.sample(number)
            logits = plain_logits(target.model, prompt)[-1].float()
            torch.testing.assert_close(sample.input, logits, atol=1e-4, rtol=0)
            parts = config, tensors, target, prompt
            rounds = [rounds_by_hand(*parts, size, 12) for size in CANDIDATES]
            assert sample.rounds.tolist() == rounds
            assert sample.decoded == 11
            torch.testing.assert_close(sample.lengths, 11 / torch.tensor(rounds).double())

    def test_rounds_at_temperature_1_are_those_of_the_walk_rule(self, tmp_path, monkeypatch):
        """A seed gives one text under every walked tree, so each block size must decode it."""
        monkeypatch.setattr(sweeps, "MOST_ROWS", 12)  # the blocks of a text in several parts
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
            for size, rounds in zip(CANDIDATES, sample.rounds.tolist(), strict=True):
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
            sweeper_of(tmp_path, draft_target(dtype=torch.float64), causal=(True, False))


def sample_of(rounds, logits=None):
    logits = torch.zeros(VOCAB) if logits is None else logits
    return BlockSizeSample(input=logits, decoded=12, rounds=torch.tensor(rounds))


class TestLabels:
    def test_the_longest_and_of_equals_the_smallest_block(self):
        samples = [sample_of(r) for r in ([6, 4, 5], [6, 4, 4], [3, 3, 3], [6, 5, 4], [0, 0, 0])]
        assert best_candidates(samples).tolist() == [1, 1, 0, 2, -1]

    def test_what_a_cycle_costs(self):
        """Cycles of 1, 2 and 4 s: a block that is twice as dear must accept twice as much."""
        samples = [sample_of(rounds) for rounds in ([6, 4, 3], [12, 3, 2], [12, 6, 2])]
        assert best_candidates(samples).tolist() == [2, 2, 2]
        # 2, 1.5, 1; 1, 2, 1.5; 1, 1, 1.5 tokens a second
        costs = torch.tensor([1.0, 2.0, 4.0])
        assert best_candidates(samples, costs).tolist() == [0, 1, 2]


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


class TestTraining:
    def test_it_learns_a_rule(self):
        result = train(made_up(200))
        unseen = made_up(100, seed=1)
        found = recipe.measure(result.predictor, unseen, best_candidates(unseen))
        assert found.right > 0.9 and found.samples == 100
        assert found.hindsight == 4.0
        assert found.chosen == pytest.approx(2.0 + 2.0 * found.right)
        assert max(found.fixed) < 3.0
        assert (result.trained.samples, result.held_out.samples) == (150, 50)
        assert result.predictor.config.candidates == CANDIDATES


class TestRecipe:
    def test_from_collected_texts_to_a_drafter(self, tmp_path):
        """Two of the texts have the same prompt."""
        target = draft_target(dtype=torch.float64)
        dflash_folder(tmp_path / "draft")
        texts = tmp_path / "texts"
        texts.mkdir()
        prompts = (PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[2])
        records = [{"tokens": [*one, 1, 2, 3], "prompt_tokens": len(one)} for one in prompts]
        lines = [json.dumps(record) for record in records]
        (texts / "texts-000.jsonl").write_text("\n".join(lines) + "\n")
        corpus = read_corpus(texts, VOCAB)
        found = [list(text.tokens[: text.prompt_tokens]) for text in distinct(corpus, 9)]
        assert found == [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
        chosen = distinct(corpus, 2)
        training = PilotTraining(epochs=2, hidden=8, learning_rate=1e-2)
        wanted = recipe.PilotRecipe(sweep=SWEEP, training=training)
        places = str(tmp_path / "draft"), chosen, tmp_path / "out"
        folder, *_ = recipe.train_blockpilot(target, *places, wanted)
        drafter = load_drafter(str(folder), target)
        assert isinstance(drafter, BlockPilotDrafter)
        assert drafter.predictor.config.candidates == CANDIDATES
        assert recipe.drafter_name(str(tmp_path / "draft"), folder) == "../../draft"
        assert recipe.drafter_name("some/drafter", tmp_path) == "some/drafter"
        decoder = TreeDecoder(target, drafter=drafter, policy="chain")
        result = decoder.generate(PROMPTS[3], max_new_tokens=12)
        assert result.token_ids == greedy(target.model, PROMPTS[3], 12)
