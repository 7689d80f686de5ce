"""Tables of a profile's file: any points come back, and a table says what is wrong with it."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from costmodel.profile.text import dump_yaml, packed, unpacked

AXES, VALUES = ("batch", "context", "rows"), ("median_s", "mad_s", "n")
PLACES = st.lists(st.sampled_from((1, 2, 4, 16)), min_size=1, max_size=3, unique=True)
TABLE = {
    "batch": 1, "context": [64, 128], "rows": [1, 2, 4], "n": 5,
    "median_s": [[0.1, 0.2, 0.4], [0.5, 0.6, None]],
}  # fmt: skip


@given(st.data())
def test_any_points_come_back(data):
    places = [data.draw(PLACES) for _ in AXES]
    grid = [(a, b, c) for a in places[0] for b in places[1] for c in places[2]]
    points = data.draw(st.lists(st.sampled_from(grid), min_size=1, unique=True))
    if data.draw(st.booleans()):
        points.sort()
    section = dict(zip(AXES, zip(*points, strict=True), strict=True))
    some = {"median_s": (0.25, 0.5), "mad_s": (None, 0.125), "n": (3, 5)}
    for name, cells in some.items():
        section[name] = tuple(data.draw(st.sampled_from(cells)) for _ in points)
    text = dump_yaml(packed(section, AXES, VALUES))
    again = unpacked(yaml.safe_load(text), AXES, VALUES)
    assert {name: tuple(column) for name, column in again.items()} == section


@pytest.mark.parametrize(("name", "value"), [
    ("median_s", [[0.1, 0.2, 0.4]]), ("median_s", [[0.1, 0.2, 0.4], [0.5, 0.6]]),
    ("median_s", [[0.1, 0.2, 0.4], 0.5]), ("n", [[5, 5, 5]]), ("context", list(range(10_000))),
])  # fmt: skip
def test_a_table_that_lacks_lines(name, value):
    with pytest.raises(
        ValueError, match=r"must have \d+ lines, one for each context, of 3 numbers"
    ):
        unpacked(TABLE | {name: value}, AXES, VALUES)
