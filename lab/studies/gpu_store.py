"""Store what a run of the GPU suite brought back.

    python -m lab.studies.gpu_store ARCHIVE

Puts each measured profile into calibrations/<device>/, and the results of all parts, with the
reasons of those that failed, into lab/studies/results/gpu_<device>.json. A run on a CPU (`--tiny`)
is refused.
"""

from __future__ import annotations

import argparse
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from costmodel.io import now_utc, shipped_directory
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore
from lab.studies.common import store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path)
    options = parser.parse_args()
    for path in store_archive(options.archive, shipped_directory()):
        print(path)


def store_archive(archive: Path, calibrations: Path) -> list[Path]:
    """Store an archive's profiles and results; returns the files written.

    Raises InputError for an archive without a result, and for one that was made on a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        work = Path(folder)
        results = read_results(work)
        failures = read_parts(work, "failed.json")
        written = []
        for path in sorted(work.glob("calibrate.*/profile.yaml")):
            written.append(ProfileStore([calibrations]).save(Profile.from_yaml(path)))
    device = next(iter(results.values()))["environment"]["device"]
    slug = "_".join(str(device).lower().replace("-", " ").split())
    record = {"stored_utc": now_utc(), "parts": results, "failed": failures}
    written.append(store(f"gpu_{slug}", record))
    return written


def read_results(work: Path) -> dict[str, Any]:
    """The result of each part that has one, by name."""
    results = read_parts(work, "result.json")
    if not results:
        raise InputError("the archive holds no result", hint="Run the suite again with --resume.")
    on_cpu = [name for name, result in results.items() if result["scale"]["device"] != "cuda"]
    if on_cpu:
        raise InputError(
            f"{on_cpu[0]} ran on a CPU: its numbers mean nothing",
            hint="Store the archive of a run without --tiny.",
        )
    return results


def read_parts(work: Path, name: str) -> dict[str, Any]:
    """The file of this name of each part that has one, by the part's name."""
    return {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(work.glob(f"*/{name}"))
    }


if __name__ == "__main__":
    main()
