"""Which sequence of which cache a drafter's session gets."""

from types import SimpleNamespace

import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.caches import DraftCacheShape, SharedCaches, WaitingFeatures

SHAPE = DraftCacheShape(layers=2, kv_heads=2, head_dim=4)
PLACE = (SHAPE, torch.float32, torch.device("cpu"))


class Session:
    pass


def reserved(tokens, sequences):
    return SimpleNamespace(cache=SimpleNamespace(capacity=tokens, sequences=sequences))


@torch.inference_mode()
def fill(place, tokens, seed):
    """Commit some noise; what was written."""
    noise = torch.randn(2, 2, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
    place.cache.data[:, :, place.sequence, :, place.end : place.end + tokens] = noise
    place.cache.lengths[place.sequence] += tokens
    return noise


def test_sessions_of_a_batch_share_a_cache_and_the_next_batch_gets_it_again():
    caches = SharedCaches(*PLACE, reserved(1024, 3))
    first = [Session() for _ in range(3)]
    places = [caches.room(session, None, 10) for session in first]
    assert len({id(place.cache) for place in places}) == 1
    assert sorted(place.sequence for place in places) == [0, 1, 2]
    fill(places[0], 7, 0)
    del first
    again = [Session() for _ in range(3)]
    for session in again:
        place = caches.room(session, None, 10)
        assert place.cache is places[0].cache
        assert (place.length, place.end) == (0, 0)


def test_a_session_that_lives_on_keeps_its_place():
    caches = SharedCaches(*PLACE, reserved(1024, 1))
    old, new = Session(), Session()
    kept = caches.room(old, None, 10)
    noise = fill(kept, 5, 1)
    place = caches.room(new, None, 10)
    assert place.cache is not kept.cache
    fill(place, 9, 2)
    assert caches.room(old, kept, 10) == kept
    torch.testing.assert_close(kept.cache.data[:, :, 0, :, :5], noise)


def test_a_target_that_gives_no_features_is_an_error():
    with pytest.raises(InputError, match="an EAGLE-3 drafter needs the target's features"):
        WaitingFeatures("an EAGLE-3 drafter").add(None)
