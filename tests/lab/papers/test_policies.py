"""The papers' policies by name: their texts are those of plain decoding, in float64."""

import pytest

from decoder.engine import TreeDecoder
from decoder.policies.bastion import parse_policy
from tests.decoder.models import OracleDrafter, StairCost, greedy, random_model, target_of

PROMPT = [5, 17, 3, 88, 5, 17, 3, 41, 5, 17]
POLICIES = (
    "bastion:paper", "bastion:printed", "beam:3x4", "static-tree:3x3", "dynatree",
    "dynatree:printed",
)  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", POLICIES)
def test_greedy_output_is_that_of_plain_decoding(name, rank):
    model = random_model("qwen3")
    text = greedy(model, PROMPT, 24)
    drafter = OracleDrafter(PROMPT + text, 97, rank=rank)
    decoder = TreeDecoder(target_of(model), policy="plain", drafter=drafter)
    decoder.policy = parse_policy(name, lambda *kind: StairCost(), max_nodes=60)
    result = decoder.generate(PROMPT, max_new_tokens=24)
    assert result.token_ids == text
    # DynaTree's fixed tree is lost with its first token, which is always the most probable.
    lost = name.startswith("static-tree") and rank == 1
    assert (result.stats.accepted_tokens == 0) == lost
