"""Engines' settings: what an engine would read from them."""

from __future__ import annotations

import json
import re

import pytest

from costmodel.capacity.exports import batch_table, drafter_of, export
from costmodel.capacity.operating import OperatingPoint
from costmodel.errors import InputError


def point(running: int, nodes: int, shape: str = "chain") -> OperatingPoint:
    return OperatingPoint(
        running=running,
        shape=shape if nodes else "plain",
        nodes=nodes,
        committed=1.0 + nodes / 2,
        cycle_s=0.01,
        tpot_s=0.01,
        prefill_s=0.1,
        ttft_s=0.1,
        requests_per_s=1.0,
    )


POINTS = [point(1, 9), point(2, 9), point(4, 5), point(8, 0), point(64, 0)]
QWEN = "Qwen/Qwen3-8B"


def test_neighbours_of_one_size_are_joined_and_nothing_is_left_out():
    assert batch_table(POINTS) == [[1, 3, 9], [4, 7, 5], [8, 64, 0]]


def test_a_table_covers_every_batch_once():
    table = batch_table([point(b, n) for b, n in ((1, 7), (3, 6), (6, 6), (20, 1))])
    covered = [batch for first, last, _ in table for batch in range(first, last + 1)]
    assert covered == list(range(1, 21))


def test_vllm_gets_a_config_that_it_can_read():
    text = export("vllm", QWEN, 2, POINTS, POINTS[1])
    config = json.loads(re.search(r"--speculative-config '(.*)'", text)[1])
    assert config == {
        "method": "dflash",
        "model": "z-lab/Qwen3-8B-DFlash-b16",
        "num_speculative_tokens": 9,
        "num_speculative_tokens_per_batch_size": [[1, 3, 9], [4, 7, 5], [8, 64, 0]],
    }
    assert "--tensor-parallel-size 2" in text and "--max-num-seqs 64" in text
    assert "vLLM 0.25" in text


def test_sglang_counts_the_root():
    text = export("sglang", QWEN, 1, POINTS, POINTS[2])
    assert "--speculative-num-draft-tokens 6" in text
    assert "--speculative-algorithm DFLASH" in text and "--max-running-requests 64" in text
    assert "SGLang 0.5.11" in text


def test_plain_plans_export_no_speculation():
    for engine in ("vllm", "sglang"):
        text = export(engine, QWEN, 1, [point(1, 0), point(8, 0)], point(8, 0))
        options = [line for line in text.splitlines() if not line.startswith("#")]
        assert not any("speculative" in line for line in options)
        assert not options[-1].endswith("\\")


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (point(4, 31, "tree"), 'policy="bastion"'),
        (point(4, 5), 'policy="chain"'),
        (point(4, 0), 'policy="plain"'),
    ],
)
def test_the_own_decoder_gets_a_script_that_compiles(load, said):
    text = export("transformers", QWEN, 1, POINTS, load)
    compile(text, "export", "exec")
    assert said in text


def test_targets_without_a_published_drafter_say_what_is_needed():
    assert drafter_of("me/my-model") == "PATH_OF_A_DFLASH_DRAFTER"


def test_other_engines_are_refused():
    with pytest.raises(InputError, match="no export"):
        export("ollama", QWEN, 1, POINTS, POINTS[0])
