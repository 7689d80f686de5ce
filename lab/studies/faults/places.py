"""Odd places: full disks, homes that are none, planted links, closed streams, two at once."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from costmodel.errors import RooftreeError
from costmodel.profile.profile import Profile
from lab.studies.faults.commands import Ended, Place
from lab.studies.faults.judge import Wrong

Try = Callable[[Place], None]

HOMES = (
    "", " ", "~nosuchuser/x", "x" * 300, "/dev/null", "/dev/full", "/proc/self/nothing",
    "relative/home", "with space and\nline", "\u00e9\u4e2d", "a\udcffb", "$HOME/x",
)  # fmt: skip


def expect(ended: Ended, *codes: int) -> Ended:
    """Raise Wrong for a fault, or for another exit code than these (any error without them)."""
    if ended.fault:
        raise Wrong(ended.fault)
    if codes and ended.exit_code not in codes:
        raise Wrong(f"exit {ended.exit_code}: {ended.last_line[:200]}")
    return ended


@contextmanager
def small_disk(kilobytes: int) -> Iterator[Path]:
    """A file system in memory of this size. Raises OSError where mounting is not allowed."""
    with tempfile.TemporaryDirectory(prefix="faults-disk-") as folder:
        size = f"size={kilobytes}k"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, check=False
        )
        if done.returncode:
            raise OSError("mounting is not allowed")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=False)


def enlarge(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)


def full_disk(command: str, kilobytes: int, place: Place) -> None:
    """The command says that the disk is full, and goes on once there is room."""
    with small_disk(kilobytes) as disk:
        there = Place(folder=disk, target=place.target)
        for name in ("home", "tmp"):
            (disk / name).mkdir()
        (disk / "prompts.jsonl").write_text('{"prompt": "count"}\n')
        more = ("--trace", str(disk / "trace.jsonl")) if command == "generate" else ()
        ended = expect(there.run(command, *more))
        if ended.exit_code and not any(w in ended.last_line for w in ("is full", "No space")):
            raise Wrong(f"no word of the disk: {ended.last_line[:200]}")
        enlarge(disk)
        expect(there.run(command, *more), 0)
        for path in disk.rglob("*.yaml"):
            Profile.from_yaml(path)


def full_stdout(command: str, place: Place) -> None:
    """A full disk behind stdout is said in one line."""

    def fill() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    ended = expect(place.run(command, prepare=fill))
    if "full" not in ended.stderr:
        raise Wrong(f"no word of the disk: {ended.last_line[:200]}")


def closed_stdout(command: str, place: Place) -> None:
    """Nobody reads: the command stops without a word, or does its work."""

    def close() -> None:
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)

    expect(place.run(command, prepare=close), 0, 141)


def odd_home(home: str, place: Place) -> None:
    """Decoding needs no home; one that cannot be is said in one line."""
    ended = expect(place.run("generate", ROOFTREE_HOME=home))
    if ended.exit_code == 0 and not ended.stdout:
        raise Wrong("no text")


def planted_links(place: Place) -> None:
    """Links where the tool writes: the file they point to stays as it is."""
    expect(place.run("calibrate"), 0)
    names = [path.relative_to(place.folder) for path in place.folder.rglob("*") if path.is_file()]
    names += [Path("home/.rooftree-writable"), Path("home/journals/x"), Path("result.json")]
    victim = place.folder / "victim"
    for name in names:
        victim.write_text("precious")
        link = place.folder / name
        if name == Path("prompts.jsonl"):
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        for command in ("calibrate", "generate"):
            expect(place.run(command))
            if victim.read_text() != "precious":
                raise Wrong(f"{command} wrote through {name}")
        link.unlink(missing_ok=True)


def two_at_once(place: Place) -> None:
    """One calibration measures, the other waits or is told; the profile is whole."""
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda _: place.run("calibrate"), range(2)))
    for one in ended:
        expect(one)
    if all(one.exit_code for one in ended):
        raise Wrong("neither succeeded")
    for path in place.home.rglob("*.yaml"):
        Profile.from_yaml(path).verify_calibration()


def all_tries() -> dict[str, Try]:
    tries: dict[str, Try] = {"planted links": planted_links, "two calibrations": two_at_once}
    for command, sizes in (
        ("calibrate", (0, 8, 16, 60)),
        ("bench", (8, 16)),
        ("train-drafter", (20, 100, 400, 900)),
        ("generate", (8, 12)),
    ):
        for size in sizes:
            name = f"full disk of {size} kB: {command}"
            tries[name] = partial(full_disk, command, max(size, 4))
    for command in ("generate", "calibrate"):
        tries[f"full stdout: {command}"] = partial(full_stdout, command)
        tries[f"closed stdout: {command}"] = partial(closed_stdout, command)
    for home in HOMES:
        tries[f"home {home[:20]!a}"] = partial(odd_home, home)
    return tries


def run_places(target: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Every try in a place of its own; a failure's reason by the try's name."""
    failures, left_out = {}, []
    tries = all_tries()
    for name, attempt in tries.items():
        with tempfile.TemporaryDirectory(prefix="faults-place-") as folder:
            place = Place(folder=Path(folder), target=target).make()
            before = os.getcwd()
            os.chdir(folder)
            try:
                attempt(place)
            except (Wrong, RooftreeError) as error:
                failures[name] = str(error)
            except OSError as error:
                left_out.append(f"{name} ({error})")
            finally:
                os.chdir(before)
        say(f"{name}: {failures.get(name, 'well')}")
    return {"tries": len(tries), "failures": failures, "left_out": left_out}
