"""The Markdown of a stored run against sums over its responses."""

import re
from functools import partial

from lab.studies.bench_tables import arm_table, main_arms
from tests.lab.bench.made_bench import make_result, raw_rate

RESULT = make_result(repeats=1)


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


rate = partial(raw_rate, RESULT)


def ratio(cell):
    return float(re.match(r"(\d+\.\d\d)x", cell)[1])


def close(cell, expected):
    return abs(ratio(cell) - expected) < 0.0051


def test_a_row_divides_by_plain_chain_and_prompt_lookup():
    [row] = arm_table(RESULT, ["bastion+demo"])[2:]
    name, length, plain, chain, lookup, single, best = cells(row)
    assert name == "bastion+demo"
    assert close(plain, rate(name) / rate("plain"))
    assert close(chain, rate(name) / rate("chain+demo"))
    assert close(lookup, rate(name) / rate("transformers:prompt-lookup"))
    assert re.search(r" \(\d\.\d\d-\d\.\d\d\)$", plain)
    own = [one for one in RESULT.responses if one.arm == name]
    rounds = sum(len(one.rounds.nodes) for one in own)
    assert abs(float(length) - sum(len(one.tokens) - 1 for one in own) / rounds) < 0.0051
    fixed = [arm.name for arm in RESULT.arms if re.fullmatch(r"fixed:\d+\+demo", arm.name)]
    sizes = ["plain", *fixed]
    assert close(single, rate(name) / max(map(rate, sizes)))
    tokens = seconds = 0
    for prompt_set in RESULT.sets:
        picked = max(sizes, key=lambda arm: rate(arm, prompt_set))
        inside = {one.id for one in RESULT.prompts if one.set == prompt_set}
        for one in RESULT.responses:
            if one.arm == picked and one.prompt in inside:
                tokens += len(one.tokens) - one.first_tokens
                seconds += one.total_s - one.first_token_s
    assert close(best, rate(name) * seconds / tokens)


def test_the_main_arms_are_policies_best_sizes_and_peers():
    names = main_arms(RESULT)
    fixed = [name for name in names if name.startswith("fixed:")]
    for drafter, best in zip(("demo", "ngram"), fixed, strict=True):
        arms = [arm.name for arm in RESULT.arms if arm.nodes and arm.name.endswith(f"+{drafter}")]
        sizes = [name for name in arms if name.startswith("fixed:")]
        assert best == max(sizes, key=rate)
    assert {"plain", "chain+ngram", "bastion+demo", "transformers:plain"} <= set(names)
    assert not any("[" in name or name.startswith(("beam", "dynatree")) for name in names)
