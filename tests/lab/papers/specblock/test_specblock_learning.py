"""SpecBlock drafters learn: a tiny one end to end, and the recipe that trains one."""

from dataclasses import replace

import pytest
import torch

from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from decoder.model.loading import load_model
from lab.commands.train_drafter import with_settings
from lab.papers.specblock.training.objective import SpecBlockSettings
from lab.papers.specblock.training.recipe import RUN, train_specblock
from lab.training.corpus import Collecting
from lab.training.loop import TrainingSettings, learning_rate, train
from lab.training.recipe import Recipe
from profiler.commands.options import NamedValue
from tests.decoder.models import greedy, target_of
from tests.tiny_folder import write_tokenizer, write_weights


class Slope:
    """An objective of one weight, whose gradient is always 1."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1, bias=False)

    def loss(self, example, generator, step):
        return self.model.weight.sum(), {}

    def validate(self, examples):
        return {}


class TestPublishedRecipe:
    WORDS = ("epochs=20", "batch=96", "learning_rate=5e-5", "warmup=0.015", "betas=[0.9,0.999]",
             "vocabulary=32000", "from_scratch=true", "blocks=3", "rank_from_step=2000",
             "anchors=9999", "answer_tokens=8192")  # fmt: skip

    def test_every_published_value_can_be_set(self, monkeypatch, tmp_path):
        """As words of `--set`; 20 epochs of 100 texts are 21 steps of 96."""
        given = [NamedValue().convert(word, None, None) for word in self.WORDS]
        parts = Collecting(), SpecBlockSettings(), replace(RUN, autocast=False)
        collecting, sizes, run = with_settings(given, *parts)
        assert (sizes.vocabulary, sizes.from_scratch, sizes.rank_from_step) == (32000, True, 2000)
        assert (sizes.blocks, run.clip, collecting.answer_tokens) == (3, 0.5, 8192)
        made = []
        adam = torch.optim.AdamW
        monkeypatch.setattr(
            torch.optim, "AdamW", lambda *a, **k: made.append(adam(*a, **k)) or made[-1]
        )
        history = train(Slope(), [None] * 100, [], run, tmp_path)
        assert history[-1]["step"] == 21
        assert made[0].defaults["betas"] == (0.9, 0.999) and made[0].defaults["lr"] == 5e-5
        long = replace(run, steps=2000)
        rates = [learning_rate(step, long) / 5e-5 for step in (0, 14, 29, 30, 1015, 1999)]
        assert rates == pytest.approx([1 / 30, 15 / 30, 1, 1, 0.55, 0.1], abs=1e-3)


class TestRecipe:
    RECIPE = Recipe(
        collecting=Collecting(batches=2, batch_texts=4, prompt_tokens=6, answer_tokens=16),
        drafter=SpecBlockSettings(vocabulary=40, anchors=6, rank_from_step=2),
        settings=TrainingSettings(steps=6, batch=2, warmup=2, autocast=False, save_every=3, seed=5),
    )

    @pytest.mark.slow
    def test_one_that_goes_on_from_it_keeps_its_weights(self, tmp_path):
        weights = write_weights(tmp_path / "target", num_hidden_layers=4, eos_token_id=None)
        folder = write_tokenizer(weights)
        cpu = torch.device("cpu")
        options = {"weights": "pretrained", "dtype": torch.float32, "download": False}
        target, *others = (load_model(str(folder), device=cpu, **options) for _ in range(3))
        trained = train_specblock(others[0], tmp_path / "run", self.RECIPE)
        assert [row["step"] for row in trained.history] == [3, 6]
        target = target_of(target.model)
        drafter = load_drafter(str(trained.folder), target)
        assert drafter.name == "specblock"
        assert len(drafter.tokens) == 40
        assert drafter.model.examples.tolist() == [12, 8]
        still = replace(self.RECIPE.settings, steps=1, learning_rate=1e-9)
        again = replace(self.RECIPE, settings=still, start=str(trained.folder))
        onward = train_specblock(others[1], tmp_path / "on", again)
        further = load_drafter(str(onward.folder), target)
        assert further.model.examples.tolist() == [14, 10]  # the rank head stays in
        for name, weight in drafter.model.named_parameters():
            found = further.model.get_parameter(name)
            torch.testing.assert_close(found, weight, atol=1e-6, rtol=0, msg=name)
        decoder = TreeDecoder(target, drafter=drafter, policy="fixed:12")
        found = decoder.generate([5, 6, 7], max_new_tokens=12).token_ids
        assert found == greedy(target.model, [5, 6, 7], 12)
