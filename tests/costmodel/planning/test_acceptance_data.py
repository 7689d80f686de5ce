"""Acceptance as data, against brute force over all paths and the published lengths."""

import itertools
import json

import numpy as np
import pytest

from costmodel.acceptance import AcceptanceProcess
from costmodel.errors import InputError
from costmodel.planning.acceptance import (
    chain_curve,
    find_acceptance,
    from_file,
    from_published,
    from_rate,
    tree_curve,
)


def sure(rank1: tuple[float, ...], tail: float = 0.3) -> AcceptanceProcess:
    """Every block has the same confidences, so that the best tree can be listed."""
    return AcceptanceProcess(
        label="sure", kind="given", rank1=rank1, concentration=np.inf, tail=tail
    )


def test_best_trees_are_all_paths_sorted_chains_are_sums_and_spread_shrinks():
    process, nodes = sure((0.7, 0.6, 0.5)), 9
    table = process.rank_table(nodes)[:, 0]  # [gamma, ranks]
    scores = []
    for depth in (1, 2, 3):
        for ranks in itertools.product(range(nodes), repeat=depth):
            scores.append(float(np.prod([table[d, rank] for d, rank in enumerate(ranks)])))
    best = sorted(scores, reverse=True)[:nodes]
    assert tree_curve(process, nodes) == pytest.approx(np.cumsum([1, *best]))
    assert chain_curve(sure((0.5, 0.4))) == pytest.approx([1, 1.5, 1.7])
    assert from_rate(0.8).committed("chain", 3) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    found = from_rate(0.8)
    assert found.relative_error(1.0) == 0
    assert found.relative_error(2.0) == pytest.approx(found.spread / 2)


def test_published_lengths_come_back_and_a_tree_is_never_worse_than_a_chain_of_its_size():
    """BASTION and DDTree, table 1, Qwen3-8B, gsm8k, T = 0: chains of 6.51 and 6.57 tokens,
    trees of 8.85 at 256 and 9.54 at 512 nodes."""
    found = from_published("gsm8k", "Qwen/Qwen3-8B")
    assert found.committed("chain", 15) == pytest.approx((6.51 + 6.57) / 2, abs=0.01)
    assert 8.85 * 0.97 < found.committed("tree", 256) < 9.54
    assert found.committed("tree", 511) == pytest.approx(9.4, abs=0.25)
    assert found.kind == "published" and "bastion table 1" in found.label

    # Other targets borrow with a wider spread; trees at temperature 1 are lossless ones only.
    borrowed = from_published("gsm8k", "meta-llama/Llama-3.1-8B-Instruct")
    assert borrowed.spread > found.spread and "none for this target" in borrowed.label
    assert "bastion" not in from_published("gsm8k", "Qwen/Qwen3-8B", 1).label
    for nodes in range(16):
        assert found.committed("tree", nodes) >= found.committed("chain", nodes) - 0.02


@pytest.fixture
def read(tmp_path):
    def acceptance(data):
        (tmp_path / "result.json").write_text(json.dumps(data))
        return from_file(tmp_path / "result.json")

    return acceptance


def test_rates_by_depth_a_curve_and_rounds_of_a_file(read):
    found = read({"acceptance": {"by_depth": [0.5, 0.4], "rounds": 100}})
    assert found.committed("chain", 2) == pytest.approx(1.7)
    assert found.spread == pytest.approx(0.1)
    found = read({"nodes": [0, 4, 8], "committed": [1, 3, 4], "spread": 0.02})
    assert found.committed("tree", 6) == pytest.approx(3.5)
    assert found.spread == 0.02
    with pytest.raises(InputError, match="known to 8 nodes"):
        found.committed("tree", 9)
    # Two of three take the first token, one of the two the second; as many found no draft
    found = read({"accepted_depths": [0, 1, 2], "tree_nodes": [2, 2, 2]})
    assert found.committed("chain", 2) == pytest.approx(1 + 2 / 3 + 1 / 3)
    found = read({"accepted_depths": [0, 0, 1, 0, 2, 0], "tree_nodes": [2, 0, 2, 0, 2, 0]})
    assert found.committed("chain", 2) == pytest.approx(1 + (2 / 3 + 1 / 3) / 2)
    same = read({"by_depth": [2 / 3, 1 / 2], "rounds": 3, "drafted_share": 0.5})
    assert same.committed("chain", 2) == pytest.approx(found.committed("chain", 2))
    assert same.committed("tree", 8) == pytest.approx(found.committed("tree", 8))


@pytest.mark.parametrize(("data", "said"), [
    ({}, "no acceptance data"), ([1], "no acceptance data"), ({"by_depth": [0.0]}, "by_depth"),
    ({"by_depth": "many"}, "by_depth"), ({"by_depth": [0.5], "drafted_share": None}, "by_depth"),
    ({"by_depth": [0.5], "drafted_share": 0}, "share of rounds with a draft"),
    ({"nodes": [0, 4], "committed": [1, 0.5]}, "never fall"),
    ({"nodes": [1, 4], "committed": [1, 2]}, "ascend from 0"),
    ({"accepted_depths": [3], "tree_nodes": [2]}, "accepted_depths"),
])  # fmt: skip
def test_wrong_files_name_the_field(read, data, said):
    with pytest.raises(InputError, match=said):
        read(data)


@pytest.mark.parametrize("text", ["1.5", "0", "-1", "nan", "nonsense", "not/here.json"])
def test_wrong_names_are_refused(text):
    with pytest.raises(InputError):
        find_acceptance(text, "Qwen/Qwen3-8B")
