"""Which timed drafter of a profile a name means."""

from __future__ import annotations

import pytest

from costmodel.errors import InputError
from costmodel.planning.drafting import find_drafter, lookup_drafter
from costmodel.planning.forwards import TargetForward
from costmodel.profile.schema import DrafterSection
from tests.profiler.made_profile import make_profile


def forward(**names: str) -> TargetForward:
    """A profile that has timed drafters of these names, by hash."""
    sections = {
        key: DrafterSection(name=name, context=[256], median_s=[1e-3], mad_s=[1e-5], n=[5])
        for key, name in names.items()
    }
    return TargetForward(make_profile().model_copy(update={"drafters": sections}))


def test_a_kind_is_not_the_drafter_that_joins_it_with_another() -> None:
    steps = forward(abc="ngram+dflash")
    assert find_drafter(steps, "ngram") == lookup_drafter()
    joined = find_drafter(steps, "ngram+dflash")
    assert joined.timed is not None
    assert joined.name == "ngram+dflash"


def test_a_hash_or_part_of_a_name_will_do() -> None:
    steps = forward(abc="ngram+dflash", fed="dflash@block=4")
    for name, found in (
        ("abc", "ngram+dflash"),
        ("fed", "dflash@block=4"),
        ("dflash", "dflash@block=4"),
    ):
        drafter = find_drafter(steps, name)
        assert drafter.timed is not None
        assert drafter.name == found


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(InputError) as raised:
        find_drafter(forward(abc="eagle3"), "medusa")
    assert "eagle3" in str(raised.value)
