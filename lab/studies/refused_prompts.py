"""Write the hashes of evaluation prompts that the training data must not hold.

python -m lab.studies.refused_prompts PROMPTS.jsonl [...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lab.training.prompts import REFUSED, sketch

LONGEST = 250  # words of a prompt that are hashed; some prompts hold a book


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="+", type=Path)
    files: list[Path] = parser.parse_args().prompts
    digests: set[str] = set()
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            beginning = json.loads(line)["prompt"].split()[:LONGEST]
            digests.update(sketch(" ".join(beginning)))
    head = [
        "# Hashes of evaluation prompts (lab/training/prompts.py), of these sets:",
        *(f"# {file.stem}" for file in sorted(files)),
    ]
    REFUSED.write_text("\n".join([*head, *sorted(digests)]) + "\n", encoding="utf-8")
    print(f"{len(digests)} hashes of {len(files)} sets")


if __name__ == "__main__":
    main()
