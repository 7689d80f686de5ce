"""SpecBlock drafters learn: a tiny one end to end, and the recipe that trains one."""

from dataclasses import replace

import pytest
import torch

from lab.commands.train_drafter import with_settings
from lab.papers.specblock.training.objective import SpecBlockSettings
from lab.papers.specblock.training.recipe import RUN
from lab.training.corpus import Collecting
from lab.training.loop import learning_rate, train
from profiler.commands.options import NamedValue


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
