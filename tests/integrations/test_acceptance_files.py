"""Acceptance from Model-Optimizer's profiles and vLLM's counters, and what is written for both."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import InputError
from costmodel.planning.acceptance import find_acceptance, from_file
from integrations.model_optimizer.settings import speculation_profile
from integrations.vllm.read import read_metrics
from profiler.cli import run

# Rates and tokens a step of nvidia/MiniMax-M2.7-DFlash on MT-Bench, as Model-Optimizer's pull
# requests 2247 and 2313 state them; the histogram is worked out from them and their 112,844 steps.
PUBLISHED = {
    "schema_version": "1.0",
    "measured": True,
    "method": "dflash",
    "draft_checkpoint": {"id": "nvidia/MiniMax-M2.7-DFlash"},
    "target_model": {"id": "MiniMaxAI/MiniMax-M2.7"},
    "num_speculative_tokens": 3,
    "conditional_accept_rates": [0.816082, 0.776577, 0.749591],
    "marginal_accept_rates": [0.816082, 0.633750, 0.475055],
    "mean_accept_length": 2.924887,
    "accept_length_model": "measured_per_k",
    "accept_length_by_k": {"3": 2.924887},
    "acceptance_length_histogram": {"1": 20754, "2": 20575, "3": 17907, "4": 53608},
}
NAMES = """vllm:spec_decode_num_drafts_total{engine="0",model_name="me/m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="me/m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="me/m"} 140.0
vllm:generation_tokens_total{engine="0",model_name="me/m"} 350.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="me/m"} 10.0
"""
BY_POSITION = (
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="me/m",position='
)
COUNTERS = NAMES + "".join(
    f'{BY_POSITION}"{i}"}} {n}\n' for i, n in enumerate(("80.0", "40.0", "2e1"))
)


def stored(folder, data) -> Path:
    path = folder / "file"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_published_profile_gives_its_lengths(tmp_path):
    read = from_file(stored(tmp_path, PUBLISHED))
    assert read.committed("chain", 3) == pytest.approx(2.9249, abs=1e-3)
    assert read.committed("chain", 1) == pytest.approx(1.816, abs=1e-3)
    assert read.measured.drafter == "nvidia/MiniMax-M2.7-DFlash" and read.spread == 0.05
    assert "drafts of 3 tokens alone" in read.doubts[0]
    by_k = PUBLISHED | {"accept_length_by_k": {"1": 1.7, "3": 2.8}}
    read = from_file(stored(tmp_path, by_k))
    assert read.chain[[1, 3]] == pytest.approx([1.7, 2.8]) and not read.doubts


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"measured": False, "note": "run specdec_bench"}, "no rates: run specdec_bench"),
        ({"conditional_accept_rates": None}, "nothing was measured"),
        ({"marginal_accept_rates": [0.9, 0.8, 0.7]}, "disagree"),
        ({"accept_length_by_k": {"x": 1}}, "cannot be read"),
    ],
)
def test_profiles_that_say_nothing_are_refused(tmp_path, changed, said):
    with pytest.raises(InputError, match=said):
        from_file(stored(tmp_path, PUBLISHED | changed))


def test_counters_of_vllm_are_read_as_they_are(tmp_path):
    """100 drafts in 350 - 140 - 10 = 200 rounds; 80, 40 and 20 accepted at three positions."""
    read = from_file(stored(tmp_path, f"# HELP vllm:x a counter\n{COUNTERS}"))
    assert read.chain == pytest.approx([1, 1.4, 1.6, 1.7]) and read.drafted_share == 0.5
    assert (read.measured.target, read.spread, read.doubts) == ("me/m", 0.1, ())
    short = COUNTERS.replace("300.0", "200.0")
    assert "2.0 of 3 tokens" in from_file(stored(tmp_path, short)).doubts[0]
    with pytest.raises(InputError, match="drafted nothing yet"):
        from_file(stored(tmp_path, COUNTERS.replace(" 100.0", " 0.0")))
    assert read_metrics("vllm:num_requests_running{} 1") is None


def test_what_is_written_reads_back(tmp_path):
    given = find_acceptance("mt_bench", "Qwen/Qwen3-8B")
    written = speculation_profile(given, "Qwen/Qwen3-8B", "dflash")
    assert not written["measured"] and written["method"] == "dflash"
    assert 1 + sum(written["marginal_accept_rates"]) == pytest.approx(given.chain[-1], abs=1e-4)
    assert from_file(stored(tmp_path, written | {"measured": True})).chain == pytest.approx(
        given.chain, abs=1e-4
    )


def test_exports_for_both(tmp_path, capsys):
    """vLLM's synthetic rates are of all positions up to each one, as many as the longest draft."""
    asked = ["export", "h100-sxm/qwen3-8b", "--acceptance", str(stored(tmp_path, COUNTERS))]
    assert run([*asked, "--engine", "model-optimizer"]) == 2
    assert "not of Qwen/Qwen3-8B" in capsys.readouterr().err
    (tmp_path / "file").write_text(COUNTERS.replace("me/m", "Qwen/Qwen3-8B"))
    assert run([*asked, "--engine", "model-optimizer"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["measured"] and record["conditional_accept_rates"] == [0.4, 0.5, 0.5]
    assert run([*asked, "--engine", "vllm-synthetic"]) == 0
    config = json.loads(re.search(r"--speculative-config '(.*)'", capsys.readouterr().out)[1])
    most = config["num_speculative_tokens"]
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == list(np.round([0.4, 0.2, 0.1][:most], 6))
