"""BlockPilot's collection and training, against rounds decoded by hand and made-up rules."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from costmodel.errors import InputError
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from lab.papers.blockpilot.drafter import BlockPilotDrafter, save_predictor
from lab.papers.blockpilot.recipe import (
    PilotRecipe,
    PilotTraining,
    distinct,
    drafter_name,
    measure,
    train_blockpilot,
    train_predictor,
)
from lab.papers.blockpilot.sources import TextSource
from lab.papers.blockpilot.sweeps import (
    BlockSizeSample,
    Sweep,
    Sweeps,
    best_candidates,
    collect_sweeps,
    cycle_s,
    read_sweeps,
)
from lab.training.corpus import TrainingText, read_corpus
from tests.decoder.draft_models import VOCAB, dflash_folder, draft_target
from tests.decoder.drafters.test_dflash import reference
from tests.decoder.models import greedy, plain_logits

PROMPTS = [[5, 17, 3, 88, 41], [9], [2, 2, 60, 7, 1, 30], [44, 8]]
SWEEP = Sweep(radius=1, max_new_tokens=12)
CANDIDATES = (4, 5, 6)


def swept(tmp_path, prompts=PROMPTS, sweep=SWEEP, name="swept", target=None):
    """A collection with a random drafter, or one that is like it; returns it and its folder."""
    target = target or draft_target(dtype=torch.float64)
    source = source_of(tmp_path, target, texts_of(target, prompts, sweep.max_new_tokens), sweep)
    return collect_sweeps(source, tmp_path / name), tmp_path / name


def source_of(tmp_path, target, texts, sweep=SWEEP):
    model = DFlashDrafter(target, dflash_folder(tmp_path / "draft")[0]).model
    return TextSource(target, model, texts, sweep)


def texts_of(target, prompts=PROMPTS, new_tokens=12):
    return [
        TrainingText((*prompt, *greedy(target.model, prompt, new_tokens)), len(prompt))
        for prompt in prompts
    ]


def same(one, other):
    """Equal but for the seconds."""
    parts = ("prompt", "logits", "decoded", "rounds")
    return len(one.samples) == len(other.samples) and all(
        torch.equal(getattr(a, part), getattr(b, part))
        for a, b in zip(one.samples, other.samples, strict=True)
        for part in parts
    )


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
class TestCollection:
    @torch.inference_mode()
    def test_what_is_collected(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        found, _ = swept(tmp_path, target=target)
        _, config, tensors = dflash_folder(tmp_path / "draft")
        tensors = {name: tensor.double() for name, tensor in tensors.items()}
        assert (found.block_size, found.candidates, found.vocab) == (5, CANDIDATES, VOCAB)
        for sample, prompt in zip(found.samples, PROMPTS, strict=True):
            assert sample.prompt.tolist() == prompt
            logits = plain_logits(target.model, prompt)[-1].float()
            torch.testing.assert_close(sample.logits, logits, atol=1e-4, rtol=0)
            rounds = [
                rounds_by_hand(config, tensors, target, prompt, size, 12) for size in CANDIDATES
            ]
            assert sample.rounds.tolist() == rounds
            assert sample.decoded.tolist() == [11] * 3
            torch.testing.assert_close(sample.lengths, 11 / torch.tensor(rounds).double())
            assert (sample.decode_s > 0).all()

    def test_a_stopped_run_goes_on_and_gives_the_same(self, tmp_path):
        whole, _ = swept(tmp_path)
        first, folder = swept(tmp_path, PROMPTS[:2], name="stopped")
        assert len(first.samples) == 2
        (folder / ".000002.safetensors.x.tmp").write_bytes(b"killed while this was written")
        kept = (folder / "000000.safetensors").stat().st_mtime_ns
        resumed, _ = swept(tmp_path, name="stopped")
        assert same(whole, resumed)
        assert (folder / "000000.safetensors").stat().st_mtime_ns == kept
        assert same(whole, read_sweeps(folder))

    def test_a_text_without_a_round_has_no_label(self, tmp_path):
        found, _ = swept(tmp_path, PROMPTS[:1], Sweep(radius=1, max_new_tokens=1))
        assert found.samples[0].rounds.tolist() == found.samples[0].decoded.tolist() == [0] * 3
        assert found.samples[0].lengths is None
        assert best_candidates(found.samples).tolist() == [-1]
        with pytest.raises(InputError, match="no prompt of the collection"):
            train_predictor(found, "draft", PilotTraining(epochs=1))

    def test_another_collection_in_the_folder(self, tmp_path):
        swept(tmp_path, PROMPTS[:1])
        with pytest.raises(InputError, match="max_new_tokens 12 instead of 13"):
            swept(tmp_path, sweep=Sweep(radius=1, max_new_tokens=13))
        with pytest.raises(InputError, match="another prompt"):
            swept(tmp_path, [[1, 2, 3]])

    def test_damaged_files(self, tmp_path):
        _, folder = swept(tmp_path, PROMPTS[:2])
        with pytest.raises(InputError, match="holds no collection"):
            read_sweeps(tmp_path / "nowhere")
        place = folder / "000001.safetensors"
        good = place.read_bytes()
        place.write_bytes(good[: len(good) // 2])
        for use in (lambda: read_sweeps(folder), lambda: swept(tmp_path, PROMPTS[:2])):
            with pytest.raises(InputError, match="cannot read") as raised:
                use()
            assert "000001" in raised.value.problem
        tensors = load_file(folder / "000000.safetensors")
        save_file({name: t for name, t in tensors.items() if name != "rounds"}, place)
        with pytest.raises(InputError, match="cannot read"):
            read_sweeps(folder)
        save_file(tensors | {"rounds": tensors["rounds"][:2]}, place)
        with pytest.raises(InputError, match="holds rounds of another type or shape"):
            read_sweeps(folder)
        save_file(tensors | {"logits": tensors["logits"].double()}, place)
        with pytest.raises(InputError, match="holds logits of another type or shape"):
            read_sweeps(folder)
        place.unlink()
        swept(tmp_path, PROMPTS[:2])
        settings = json.loads((folder / "collection.json").read_text())
        for text in ("{", "[]", json.dumps(settings | {"candidates": 3})):
            (folder / "collection.json").write_text(text)
            with pytest.raises(InputError, match=r"cannot (be )?read|is damaged"):
                read_sweeps(folder)
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "collection.json").write_text(json.dumps(settings))
        with pytest.raises(InputError, match="holds no prompts"):
            read_sweeps(folder)


def sample_of(rounds, seconds=(1.0, 1.0, 1.0), logits=None, decoded=12):
    return BlockSizeSample(
        prompt=torch.tensor([1]),
        logits=torch.zeros(VOCAB) if logits is None else logits,
        decoded=torch.full((3,), decoded),
        rounds=torch.tensor(rounds),
        decode_s=torch.tensor(seconds, dtype=torch.float64),
    )


class TestLabels:
    def test_the_longest_and_of_equals_the_smallest_block(self):
        samples = [sample_of(r) for r in ([6, 4, 5], [6, 4, 4], [3, 3, 3], [6, 5, 4], [0, 0, 0])]
        assert best_candidates(samples).tolist() == [1, 1, 0, 2, -1]

    def test_what_a_cycle_costs(self):
        """Cycles of 1, 2 and 4 s: a block that is twice as dear must accept twice as much."""
        samples = [
            sample_of([6, 4, 3], (6.0, 8.0, 12.0)),
            sample_of([12, 3, 2], (12.0, 6.0, 8.0)),
            sample_of([12, 6, 2], (12.0, 12.0, 8.0)),
        ]
        assert cycle_s(samples).tolist() == [1.0, 2.0, 4.0]
        assert best_candidates(samples, "length").tolist() == [2, 2, 2]
        # 2, 1.5, 1; 1, 2, 1.5; 1, 1, 1.5 tokens a second
        assert best_candidates(samples, "rate").tolist() == [0, 1, 2]


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
    return Sweeps(
        block_size=5, candidates=CANDIDATES, vocab=VOCAB, drafter_hash="0" * 12, samples=samples
    )


SETTINGS = PilotTraining(epochs=15, learning_rate=1e-3, hidden=32, held_out=0.25)


class TestTraining:
    def test_it_learns_a_rule(self):
        result = train_predictor(made_up(200), "draft", SETTINGS)
        unseen = made_up(100, seed=1)
        found = measure(result.predictor, unseen.samples, best_candidates(unseen.samples))
        assert found.right > 0.9 and found.samples == 100
        assert found.hindsight == 4.0
        assert found.chosen == pytest.approx(2.0 + 2.0 * found.right)
        assert max(found.fixed) < 3.0
        assert (result.trained.samples, result.held_out.samples) == (150, 50)
        assert result.predictor.config.candidates == CANDIDATES

    def test_figures_by_hand(self):
        samples = [sample_of([6, 4, 3]), sample_of([3, 4, 6]), sample_of([4, 3, 6])]

        class Second(torch.nn.Module):
            """Chooses the second block for all."""

            def __init__(self):
                super().__init__()
                self.scores = torch.nn.Linear(1, 1)

            def forward(self, logits):
                return torch.tensor([[0.0, 1.0, 0.5]]).expand(len(logits), -1)

        found = measure(Second(), samples, best_candidates(samples))
        assert found.chosen == pytest.approx((3 + 3 + 4) / 3)
        assert found.fixed == pytest.approx(((2 + 4 + 3) / 3, (3 + 3 + 4) / 3, (4 + 2 + 2) / 3))
        assert found.hindsight == pytest.approx(4.0)
        assert found.right == pytest.approx(1 / 3)

    def test_a_seed_gives_the_same_weights(self):
        torch.manual_seed(1)  # which must not matter
        one = train_predictor(made_up(40), "draft", SETTINGS)
        torch.manual_seed(2)
        two = train_predictor(made_up(40), "draft", SETTINGS)
        for name, tensor in one.predictor.state_dict().items():
            assert torch.equal(tensor, two.predictor.state_dict()[name])
        other = train_predictor(made_up(40), "draft", PilotTraining(epochs=1, hidden=32, seed=1))
        assert not torch.equal(other.predictor.scores.weight, one.predictor.scores.weight)

    def test_the_best_epoch_on_held_out_prompts_is_kept(self):
        """Labels without a rule: what is kept is no worse there than the last epoch."""
        sweeps = made_up(60)
        noise = torch.Generator().manual_seed(9)
        samples = [
            sample_of(torch.randint(3, 9, (3,), generator=noise).tolist(), logits=sample.logits)
            for sample in sweeps.samples
        ]
        random = Sweeps(
            block_size=5,
            candidates=CANDIDATES,
            vocab=VOCAB,
            drafter_hash="0" * 12,
            samples=samples,
        )
        kept = train_predictor(random, "draft", SETTINGS)
        ends = [
            train_predictor(
                random,
                "draft",
                PilotTraining(epochs=epoch, learning_rate=1e-3, hidden=32, held_out=0.25),
            )
            for epoch in (1, kept.epoch)
        ]
        assert kept.held_out.chosen >= ends[0].held_out.chosen
        assert kept.held_out == ends[1].held_out and kept.epoch < SETTINGS.epochs

    def test_from_the_collection_to_the_drafter(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        sweeps, _ = swept(tmp_path, target=target)
        name = drafter_name(str(tmp_path / "draft"), tmp_path / "pilot")
        assert name == "../draft"
        result = train_predictor(sweeps, name, PilotTraining(epochs=2, hidden=8))
        save_predictor(tmp_path / "pilot", result.predictor)
        drafter = load_drafter(str(tmp_path / "pilot"), target)
        assert isinstance(drafter, BlockPilotDrafter)
        assert drafter.predictor.config.candidates == CANDIDATES
        assert drafter_name("somebody/some-drafter", tmp_path) == "somebody/some-drafter"


@pytest.mark.slow
class TestTexts:
    def test_they_are_cut_where_decoding_would_stop(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        long = source_of(tmp_path, target, texts_of(target, new_tokens=20))
        short = source_of(tmp_path, target, texts_of(target))
        for number in range(len(PROMPTS)):
            one, other = long.sample(number), short.sample(number)
            assert torch.equal(one.rounds, other.rounds)
            assert one.decoded.tolist() == [11] * 3

    def test_drafters_with_windows_are_refused(self, tmp_path):
        target = draft_target(dtype=torch.float64)
        model = DFlashDrafter(target, dflash_folder(tmp_path / "draft")[0]).model
        model.config = replace(model.config, causal=(True, False))
        with pytest.raises(InputError, match="only rows before them"):
            TextSource(target, model, [], SWEEP)


class TestRecipe:
    def test_from_collected_texts_to_a_drafter(self, tmp_path):
        """Two of the texts have the same prompt; a second run only trains again."""
        target = draft_target(dtype=torch.float64)
        dflash_folder(tmp_path / "draft")
        texts = tmp_path / "texts"
        texts.mkdir()
        lines = [
            json.dumps({"tokens": [*prompt, 1, 2, 3], "prompt_tokens": len(prompt)})
            for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[2])
        ]
        (texts / "texts-000.jsonl").write_text("\n".join(lines) + "\n")
        corpus = read_corpus(texts, VOCAB)
        found = [list(text.tokens[: text.prompt_tokens]) for text in distinct(corpus, 9)]
        assert found == [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
        chosen = distinct(corpus, 2)
        recipe = PilotRecipe(
            sweep=SWEEP, training=PilotTraining(epochs=2, hidden=8, learning_rate=1e-2)
        )
        said, folders = [], []
        for _ in range(2):
            folder, result = train_blockpilot(
                target, str(tmp_path / "draft"), chosen, tmp_path / "out", recipe, said.append
            )
            folders.append((folder, result.predictor.scores.weight.clone()))
        assert said == ["prompt 1 of 2", "prompt 2 of 2"]
        assert torch.equal(folders[0][1], folders[1][1])
        drafter = load_drafter(str(folders[0][0]), target)
        assert isinstance(drafter, BlockPilotDrafter)
        decoder = TreeDecoder(target, drafter=drafter, policy="chain")
        result = decoder.generate(PROMPTS[3], max_new_tokens=12)
        assert result.token_ids == greedy(target.model, PROMPTS[3], 12)
