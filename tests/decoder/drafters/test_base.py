"""The least that a drafter of one's own must have: a name, `start` and `draft`."""

import numpy as np
import pytest

from decoder.drafters.base import Drafter, DraftSession
from decoder.tree.draft_tree import Lattice
from tests.decoder.models import decoder_of, greedy, random_model

PROMPT = [3, 1, 4, 1, 5]


class Repeat(Drafter, DraftSession):
    """Drafts the last token over and over."""

    name = "repeat"

    def start(self, prompt, features, logits=None):
        return self

    def draft(self, context, request):
        tokens = np.full((request.depth, 1), context[-1])
        return Lattice(tokens, np.full(tokens.shape, 0.5))


@pytest.mark.parametrize("policy", ["fixed:4", "chain", "bastion", "plain"])
def test_an_object_of_ones_own_decodes_as_plain_decoding_does(tmp_path, monkeypatch, policy):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    model = random_model("qwen3")
    decoder = decoder_of(model, policy, Repeat())
    assert decoder.generate(PROMPT, max_new_tokens=20).token_ids == greedy(model, PROMPT, 20)
    texts = [result.token_ids for result in decoder.generate_batch([PROMPT, [9]], max_new_tokens=9)]
    assert texts == [greedy(model, prompt, 9) for prompt in (PROMPT, [9])]
