"""The reading lists of docs/architecture.md against the imports, and against a traced round."""

import re
import sys
from functools import cache
from pathlib import Path
from types import FrameType

import pytest

from decoder.engine import TreeDecoder
from tests.fake_timing import even_clock
from tests.source_files import ROOT, imports, sources
from tests.tiny_folder import write_weights

PAGE = ROOT / "docs" / "architecture.md"
ENGINE = Path("decoder/engine.py")
CORE = ("costmodel", "decoder", "profiler", "rooftree")

# The heading of each list, and the most files that it may have.
LISTS = {"A calibration": 8, "A round": 15, "A plan": 11, "From YAML to a tree size": 7}
MOST_LINES_OF_A_ROUND = 4470  # before the core was parted from the lab


@cache
def reading_list(heading: str) -> tuple[Path, ...]:
    """The files of the list below a heading of the page, in reading order."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    paths = re.findall(r"^(?:-|\d+\.) `([\w/]+\.py)`", section.partition("\n## ")[0], re.MULTILINE)
    return tuple(map(Path, paths))


@cache
def reached_from(path: Path) -> frozenset[Path]:
    """All files of this repository that a file imports, directly or through others."""
    reached, waiting = {path}, [path]
    while waiting:
        for module, name in imports(waiting.pop()):
            for dotted in (module, f"{module}.{name}"):
                place = Path(*dotted.split(".")).with_suffix(".py")
                if place in sources() and place not in reached:
                    reached.add(place)
                    waiting.append(place)
    return frozenset(reached)


@pytest.mark.parametrize("heading", LISTS)
def test_a_story_is_short_and_its_first_file_leads_to_all_others(heading):
    """In the stories of the decoder its public class does."""
    files = reading_list(heading)
    assert 3 <= len(files) <= LISTS[heading]
    assert len(set(files)) == len(files)
    first = ENGINE if files[0].is_relative_to("decoder") else files[0]
    assert set(files) <= reached_from(first), set(files) - reached_from(first)


class CalledFiles:
    """The files of the core whose functions one call of `run_round` runs."""

    def __init__(self) -> None:
        self._folders = tuple(f"{ROOT / package}/" for package in CORE)
        self._round: FrameType | None = None
        self.rounds: list[set[Path]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame is self._round:
            self._round = None
        if event != "call" or not frame.f_code.co_filename.startswith(self._folders):
            return
        if frame.f_code.co_name == "run_round":
            self._round = frame
            self.rounds.append(set())
        if self._round is not None:
            self.rounds[-1].add(Path(frame.f_code.co_filename).relative_to(ROOT))


def test_a_round_runs_the_files_of_its_list(tmp_path, monkeypatch):
    """The median of the drafted rounds of a warm text runs no file that the list lacks (eager)."""
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))
    even_clock(monkeypatch)  # or a busy machine brings warnings, which other files write
    decoder = TreeDecoder.from_pretrained(
        write_weights(tmp_path / "target"), policy="bastion", drafter="ngram", device="cpu",
        runtime="eager",
    )  # fmt: skip
    prompt = [5, 17, 3, 88, 5, 17, 3, 41] * 8
    for _ in range(2):
        decoder.generate(prompt, max_new_tokens=120)
    called = CalledFiles()
    sys.setprofile(called)
    try:
        nodes = decoder.generate(prompt, max_new_tokens=120).stats.tree_nodes
    finally:
        sys.setprofile(None)
    assert len(called.rounds) == len(nodes)
    drafted = [files for files, count in zip(called.rounds, nodes, strict=True) if count]
    files = sorted(drafted, key=len)[len(drafted) // 2]
    assert files <= set(reading_list("A round")), files - set(reading_list("A round"))
    lines = sum(len(sources()[path].splitlines()) for path in files)
    assert lines < MOST_LINES_OF_A_ROUND
