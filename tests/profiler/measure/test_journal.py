"""The journal: what survives a kill, a torn line, a full disk and another run's file."""

import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from costmodel.errors import MeasurementError
from profiler.measure.journal import Journal

HEADER = {"device": "cpu", "rows": [1, 2, 4], "threads": 2}


def write(path: Path, *records: dict[str, object]) -> bytes:
    with Journal(path, HEADER) as journal:
        for record in records:
            journal.append(record)
    return path.read_bytes()


def points(path: Path, *more: int) -> list[object]:
    """The points of a journal, to which more are then added."""
    with Journal(path, HEADER) as journal:
        for point in more:
            journal.append({"point": point})
        return [record["point"] for record in journal.records]


def test_every_way_of_tearing_the_last_line(tmp_path):
    whole = write(tmp_path / "made" / "whole.jsonl", {"point": 1}, {"point": 2})
    assert points(tmp_path / "made" / "whole.jsonl") == [1, 2]
    first_end = whole.index(b"\n") + 1
    second_end = whole.index(b"\n", first_end) + 1
    for size in range(len(whole)):
        path = tmp_path / f"torn{size}.jsonl"
        path.write_bytes(whole[:size])
        expected = [] if size < second_end else [1]
        assert points(path, 9) == expected, size
        assert points(path) == [*expected, 9], size


DAMAGED = [b'{"point": ', b"", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b'{"a": Infinity}']


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_costs_no_other_line(tmp_path, line):
    path = tmp_path / "run.jsonl"
    lines = write(path, {"point": 1}, {"point": 2}, {"point": 3}).splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + line + b"\n" + lines[3])
    with Journal(path, HEADER) as journal:
        assert journal.damaged == 1
    assert points(path, 4) == [1, 3]
    assert points(path) == [1, 3, 4]


def test_a_damaged_header_and_another_runs_are_dropped_and_said_so(tmp_path):
    path = tmp_path / "run.jsonl"
    for changed, told in (({"threads": 4}, "threads was 2, is 4"),
                          ({"dtype": "float32"}, "dtype was None, is 'float32'")):  # fmt: skip
        lines = write(path, {"point": 1}).splitlines(keepends=True)
        with Journal(path, HEADER | changed) as journal:
            assert journal.records == []
            assert told in journal.dropped
        path.unlink()
    path.write_bytes(b'{"journal": \n' + lines[1])
    with Journal(path, HEADER) as journal:
        assert journal.records == []
        assert journal.dropped == f"{path} is not a journal of this version"
    with Journal(path, HEADER) as journal:
        assert journal.dropped == ""


def test_a_write_cut_short_by_a_full_disk_leaves_nothing_half_written(tmp_path):
    path = tmp_path / "run.jsonl"
    before = write(path, {"point": 1})
    journal = Journal(path, HEADER)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # The kernel then writes five bytes and no more, as where a disk fills up.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
        with pytest.raises(MeasurementError, match="cannot write the journal"):
            journal.append({"point": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    journal.append({"point": 3})
    journal.close()
    assert points(path) == [1, 3]


def test_kill_9_loses_no_appended_record(tmp_path):
    path = tmp_path / "run.jsonl"
    program = textwrap.dedent(f"""
        from pathlib import Path
        from profiler.measure.journal import Journal
        journal = Journal(Path({str(path)!r}), {HEADER!r})
        for point in range(1000000):
            journal.append({{"point": point}})
            print(point, flush=True)
    """)
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        seen = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        seen += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    found = points(path)
    assert found[: len(seen)] == seen
    assert found == list(range(len(found)))
