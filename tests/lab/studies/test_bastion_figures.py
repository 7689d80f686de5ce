"""The pictures of the BASTION paper: their figures against sums by hand."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from lab.studies.bastion_figures import drawn_trees, side_by_side, speed_ups, two_trees
from tests.lab.bench.made_bench import make_result


def test_bars_are_mean_speed_ups_by_device():
    """Mean seconds of a later token, of transformers' plain decoding over the arm's, by set."""
    result = make_result()
    set_of = {prompt.id: prompt.set for prompt in result.prompts}

    def later_s(arm, prompt_set):
        return fmean(
            one.decode_s / one.decoded_tokens
            for one in result.of(arm)
            if set_of[one.prompt] == prompt_set and one.decoded_tokens
        )

    arm = "bastion+demo"
    ratios = [later_s("transformers:plain", one) / later_s(arm, one) for one in result.sets]
    assert speed_ups(result)[arm] == pytest.approx(fmean(ratios))
    assert "plain" not in speed_ups(result) and "transformers:assisted" not in speed_ups(result)
    other = replace(result, environment=replace(result.environment, device="Made GPU"))
    (axes,) = side_by_side([result, other]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        result.environment.device, "Made GPU",
    ]  # fmt: skip
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights[arm] == pytest.approx([fmean(ratios)] * 2)


def test_two_trees_of_seventeen_rows():
    trees, _ = two_trees()
    beam, best = trees["beam 4x4"], trees["best first"]
    assert (beam.rows, best.rows) == (17, 17)
    assert np.bincount(beam.row_depths()).tolist() == [1, 4, 4, 4, 4]
    assert best.scores.sum() > beam.scores.sum()
    assert len(drawn_trees().axes) == 2
