"""Mutated inputs of one format after another, in processes of their own, counted by outcome."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from lab.studies.faults.formats import FORMATS, Format
from lab.studies.faults.judge import Verdict, judge, limit_memory
from lab.studies.faults.mutations import mutated

# Inputs of a process, without a model and with one: a crash ends it, and leaks cannot grow.
CHUNK, MODEL_CHUNK = 5000, 250
NUMBER = "number"  # the file that says which input is in use, for crashes
# In memory where the system has such a folder: syncing to a disk would take most of the time.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
MOST_LISTED = 5  # inputs listed for one reason, as seed/number


def all_formats() -> dict[str, Format]:
    """Every format by name; those with a model are imported here, since torch takes seconds."""
    from lab.studies.faults.model_formats import MODEL_FORMATS
    from lab.studies.faults.profiles import PROFILE

    return {form.name: form for form in (*FORMATS, PROFILE, *MODEL_FORMATS)}


def format_named(name: str) -> Format:
    plain = {form.name: form for form in FORMATS}
    return plain[name] if name in plain else all_formats()[name]


def run_inputs(form: Format, seed: int, numbers: Iterable[int], work: Path) -> dict[str, Any]:
    """Use these inputs of a format in this process; returns the counts of outcomes."""
    sound, place = work / "sound", work / "mutated"
    _make(form, sound)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(sound, place)
    form.use(place)  # or all refusals below might have another reason
    counts: dict[str, Any] = {"inputs": 0, "accepted": 0, "refused": 0, "failed": 0}
    failures: dict[str, list[str]] = {}
    started_s = process_time()
    for number in numbers:
        (work / NUMBER).write_text(str(number))
        verdict = run_input(form, seed, number, sound, place)
        counts["inputs"] += 1
        counts[verdict.outcome] += 1
        if verdict.outcome == "failed":
            failures.setdefault(verdict.reason, []).append(f"{seed}/{number}")
    return counts | {"failures": failures, "cpu_s": process_time() - started_s}


def run_input(form: Format, seed: int, number: int, sound: Path, place: Path) -> Verdict:
    """The verdict on one input."""
    write_input(form, seed, number, sound, place)
    return judge(partial(form.use, place))


def write_input(form: Format, seed: int, number: int, sound: Path, place: Path) -> None:
    """One input: a copy of the sound folder with one file mutated."""
    random = Random(f"{seed}/{form.name}/{number}")
    files = [
        (path, kind)
        for pattern, kind in form.kinds.items()
        for path in sorted(sound.glob(pattern))
        if path.is_file()
    ]
    path, kind = random.choice(files)
    data = mutated(path.read_bytes(), kind, random)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(sound, place)
    (place / path.relative_to(sound)).write_bytes(data)


def use_again(form: Format, name: str, work: Path) -> None:
    """Use the input that a failure lists as seed/number; raises what it raises."""
    seed, _, number = name.partition("/")
    _make(form, work / "sound")
    write_input(form, int(seed), int(number), work / "sound", work / "mutated")
    form.use(work / "mutated")


def _make(form: Format, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    form.make(folder)


def run_all(
    counts: dict[str, int],
    seed: int,
    workers: int,
    say: Callable[[str], None],
    totals: dict[str, Any],
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Inputs of each format up to these counts, in `workers` processes at a time.

    totals  outcomes by format, which are added to: inputs of this seed that are counted there
            are not used again
    keep    called after every process, to store the totals
    """
    plain = {form.name for form in FORMATS}
    sizes = {name: CHUNK if name in plain else MODEL_CHUNK for name in counts}
    for name in counts:
        totals.setdefault(name, _nothing())
    chunks = [
        (name, range(first, min(first + sizes[name], count)))
        for name, count in counts.items()
        for first in range(totals[name]["seeds"].get(str(seed), 0), count, sizes[name])
    ]
    with ThreadPoolExecutor(workers) as pool:
        for (name, numbers), found in zip(
            chunks, pool.map(lambda chunk: run_chunk(*chunk, seed), chunks), strict=True
        ):
            _add(totals[name], found)
            totals[name]["seeds"][str(seed)] = numbers.stop
            keep()
            if numbers.stop == counts[name]:
                say(f"{name}: {_line(totals[name])}")


def run_chunk(name: str, numbers: range, seed: int) -> dict[str, Any]:
    """The outcomes of inputs in processes of their own; a crash counts as a failure of one."""
    total = _nothing()
    while numbers:
        with tempfile.TemporaryDirectory(prefix="faults-", dir=MEMORY) as work:
            command = [sys.executable, "-m", "lab.studies.faults.inputs", name, str(seed)]
            command += [str(numbers.start), str(numbers.stop), work]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                _add(total, json.loads(done.stdout.splitlines()[-1]))
                return total
            at = numbers.start
            with suppress(OSError, ValueError):
                at = int((Path(work) / NUMBER).read_text())
        reason = f"the process ended with {done.returncode}: {done.stderr.strip()[-200:]}"
        failures = {reason: [f"{seed}/{at}"]}
        _add(total, {"inputs": at - numbers.start + 1, "failed": 1, "failures": failures})
        numbers = range(at + 1, numbers.stop)
    return total


def _nothing() -> dict[str, Any]:
    """No outcomes; `seeds` says up to which number the inputs of each seed were used."""
    counts = {"inputs": 0, "accepted": 0, "refused": 0, "failed": 0, "cpu_s": 0.0}
    return counts | {"failures": {}, "seeds": {}}


def _add(total: dict[str, Any], found: dict[str, Any]) -> None:
    for key in ("inputs", "accepted", "refused", "failed", "cpu_s"):
        total[key] += found.get(key, 0)
    for reason, names in found["failures"].items():
        listed = total["failures"].setdefault(reason, [])
        listed += names[: max(0, MOST_LISTED - len(listed))]


def _line(total: dict[str, Any]) -> str:
    shown = {key: total[key] for key in ("inputs", "accepted", "refused", "failed")}
    return ", ".join(f"{value} {key}" for key, value in shown.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """One chunk; prints its outcomes as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("format", "seed", "first", "stop", "work"):
        parser.add_argument(name)
    given = parser.parse_args(arguments)
    limit_memory()
    warnings.simplefilter("ignore")  # of numpy about odd numbers; what comes of them is judged
    logging.disable()
    os.environ["HF_HUB_OFFLINE"] = "1"  # a mutated name is no reason to ask the network
    form = format_named(given.format)
    numbers = range(int(given.first), int(given.stop))
    print(json.dumps(run_inputs(form, int(given.seed), numbers, Path(given.work))))


if __name__ == "__main__":
    main()
