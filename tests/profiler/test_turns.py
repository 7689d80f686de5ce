"""Iterators in turn."""

from __future__ import annotations

from profiler.turns import in_turn


def test_every_item_comes_once_under_its_key_and_in_its_order() -> None:
    given = {"a": "123", "b": "", "c": "45678"}
    found = list(in_turn({key: iter(items) for key, items in given.items()}))
    for key, items in given.items():
        assert "".join(item for own, item in found if own == key) == items


def test_a_step_of_each_at_a_time_and_the_first_one_changes() -> None:
    keys = [key for key, _ in in_turn({key: iter(range(3)) for key in "abc"})]
    assert "".join(keys) == "bca" + "cab" + "abc"


def test_the_rest_goes_on_where_some_have_ended() -> None:
    keys = [key for key, _ in in_turn({"short": iter(range(1)), "long": iter(range(4))})]
    assert sorted(keys[:2]) == ["long", "short"]
    assert keys[2:] == ["long"] * 3


def test_nothing_is_asked_for_before_its_turn() -> None:
    asked: list[str] = []

    def steps(name: str):
        for number in range(2):
            asked.append(f"{name}{number}")
            yield

    turns = in_turn({"a": steps("a"), "b": steps("b")})
    assert asked == []
    next(turns)
    assert asked == ["b0"]
