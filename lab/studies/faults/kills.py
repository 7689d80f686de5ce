"""Long commands, killed at random moments: nothing is lost or broken, and the next run goes on."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from costmodel.errors import RooftreeError
from costmodel.profile.profile import Profile
from lab.bench.store import read_result
from lab.papers.blockpilot.sweeps import read_sweeps
from lab.studies.faults.commands import Ended, Place
from lab.studies.faults.judge import Wrong
from lab.training.corpus import read_corpus

COMMANDS = ("calibrate", "bench", "train-drafter", "train-blockpilot", "fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a killed command had stored: whole lines and files that later runs must keep.

    files  collected texts and sweeps
    """

    journal: bytes
    files: dict[str, bytes]
    step: int


def run_kills(
    command: str, kills: int, seed: int, target: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Kill a command so many times, going on in the same place until it ends; then begin anew."""
    random = Random(f"{seed}/{command}")
    counts: dict[str, Any] = {"kills": 0, "ended": 0, "resumed": 0, "failures": []}
    whole_cpu_s = 0.0
    while counts["kills"] < kills:
        with tempfile.TemporaryDirectory(prefix="faults-kills-") as folder:
            place = Place(folder=Path(folder), target=target).make()
            if not whole_cpu_s:
                ended = place.run(command)
                if ended.exit_code != 0:
                    raise RuntimeError(f"{command} alone: {ended.exit_code}, {ended.last_line}")
                _note(counts, _broken(command, place, None))
                whole_cpu_s = ended.cpu_s
                say(f"{command}: {whole_cpu_s:.1f} s of computing undisturbed")
                continue
            _kill_until_done(command, place, random, (kills, whole_cpu_s), counts)
            say(f"{command}: {counts}")
    return counts


def _kill_until_done(
    command: str, place: Place, random: Random, wanted: tuple[int, float], counts: dict[str, Any]
) -> None:
    """Kill and run again in one place, up to four times, then let it end.

    A run that ends before its kill is the end: one more would begin anew and replace its samples.
    """
    kept: Kept | None = None
    ended: Ended | None = None
    kills, whole_cpu_s = wanted
    for _ in range(4):
        if counts["kills"] >= kills:
            break
        ended = place.run(command, kill_after_cpu_s=random.uniform(0.0, whole_cpu_s))
        if ended.exit_code != -9:
            break
        counts["kills"] += 1
        _note(counts, _broken(command, place, kept))
        kept = _kept(place)
    if ended is None or ended.exit_code == -9:
        ended = place.run(command)
    counts["ended"] += 1
    counts["resumed"] += any(word in ended.stderr for word in ("went on", "going on"))
    _note(counts, ended.fault or ("" if ended.exit_code == 0 else ended.last_line))
    _note(counts, _broken(command, place, kept))
    left = [str(path.name) for path in place.folder.rglob("*.tmp")]
    _note(counts, f"left {left[0]}" if left else "")


def _note(counts: dict[str, Any], failure: str) -> None:
    if failure:
        counts["failures"].append(failure[:300])


def _broken(command: str, place: Place, kept: Kept | None) -> str:
    """What is broken or lost among the files of a command; empty if all is well."""
    try:
        for path in place.home.rglob("*.yaml"):
            Profile.from_yaml(path).verify_calibration()
        if (place.folder / "result.json").exists():
            read_result(place.folder / "result.json")
        trained = place.folder / "trained"
        if any((trained / "texts").glob("texts-*.jsonl")):
            read_corpus(trained / "texts", 260)
        if any((trained / "sweeps").glob("*.safetensors")):
            read_sweeps(trained / "sweeps")
        for path in (*trained.glob("drafter/*.json"), *trained.glob("pilot/*.json")):
            json.loads(path.read_text())
        if kept is not None:
            _check_kept(command, place, kept)
    except (RooftreeError, Wrong, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _journals(place: Place) -> list[Path]:
    """Journals of runs that have not ended."""
    found = [*place.home.glob("journals/*.jsonl"), *place.folder.glob("*.jsonl*")]
    return [path for path in found if path.name != "prompts.jsonl"]


def _kept(place: Place) -> Kept:
    raw = b"".join(path.read_bytes() for path in _journals(place)[:1])
    texts = place.folder.glob("trained/texts/texts-*.jsonl")
    sweeps = place.folder.glob("trained/sweeps/*.safetensors")
    return Kept(
        journal=raw[: raw.rfind(b"\n") + 1],
        files={path.name: path.read_bytes() for path in (*texts, *sweeps)},
        step=_step(place),
    )


def _step(place: Place) -> int:
    """The last step of the training's checkpoint; 0 without one."""
    path = place.folder / "trained" / "checkpoint.pt"
    if not path.exists():
        return 0
    return int(torch.load(path, weights_only=True)["history"][-1]["step"])


def _check_kept(command: str, place: Place, kept: Kept) -> None:
    """Raise Wrong for a sample, a text or a step that was there before and is not now."""
    now = _kept(place)
    for name, content in kept.files.items():
        if now.files.get(name) != content:
            raise Wrong(f"{name} changed")
    if now.step < kept.step:
        raise Wrong(f"from step {kept.step} back to {now.step}")
    samples = kept.journal.count(b"\n") - 1
    if command == "calibrate" and samples > 0:
        places = [*_journals(place), *place.home.rglob("*.samples.jsonl")]
        if not any(path.read_bytes().startswith(kept.journal) for path in places):
            raise Wrong(f"{samples} samples of before the kill are nowhere")
    if command == "bench" and (place.folder / "result.json").exists():
        stored = (place.folder / "result.json").read_text()
        for line in kept.journal.splitlines()[1:]:
            response = json.loads(line).get("response")
            if response and f'"total_s":{json.dumps(response["total_s"])}' not in stored:
                raise Wrong("a response of before the kill is not in the result")
