"""Which sequence of which cache a drafter's session gets."""

from types import SimpleNamespace

import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.caches import FeatureSession, PlacedText, SharedCaches
from decoder.model.kv_cache import CacheShape

SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=4)
PLACE = (SHAPE, torch.float32, torch.device("cpu"))


def reserved(tokens, sequences):
    return SimpleNamespace(cache=SimpleNamespace(capacity=tokens, sequences=sequences))


@torch.inference_mode()
def fill(text, tokens, seed):
    """Commit some noise; what was written."""
    noise = torch.randn(2, 2, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
    text.cache.data[:, :, text.sequence, :, text.length : text.length + tokens] = noise
    text.cache.lengths[text.sequence] += tokens
    return noise


def placed(caches, rows):
    text = PlacedText(caches)
    text.make_room(rows)
    return text


def test_texts_of_a_batch_share_a_cache_and_the_next_batch_gets_it_again():
    caches = SharedCaches(*PLACE, reserved(1024, 3))
    first = [placed(caches, 10) for _ in range(3)]
    assert len({id(text.cache) for text in first}) == 1
    assert sorted(text.sequence for text in first) == [0, 1, 2]
    fill(first[0], 7, 0)
    cache = first[0].cache
    del first
    again = [placed(caches, 10) for _ in range(3)]
    for text in again:
        assert text.cache is cache
        assert (text.length, cache.end(text.sequence)) == (0, 0)


def test_a_text_that_goes_on_keeps_its_place():
    caches = SharedCaches(*PLACE, reserved(1024, 1))
    old = placed(caches, 10)
    noise, cache = fill(old, 5, 1), old.cache
    new = placed(caches, 10)
    assert new.cache is not cache
    fill(new, 9, 2)
    old.make_room(10)
    assert old.cache is cache
    torch.testing.assert_close(cache.data[:, :, 0, :, :5], noise)


class Waiting(FeatureSession):
    draft = take_in = None


def test_a_target_that_gives_no_features_is_an_error():
    with pytest.raises(InputError, match="an EAGLE-3 drafter needs the target's features"):
        Waiting("an EAGLE-3 drafter").observe((), None)
