"""What each of two processes does with targets that they share; run by test_parallel.

`python -m tests.decoder.rank_program FOLDER` writes what it found to FOLDER/rank<r>.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from costmodel.errors import InputError
from costmodel.profile.store import ProfileStore
from decoder.engine import TreeDecoder
from decoder.model.loading import load_model
from decoder.model.ranks import Ranks
from decoder.model.target import Step, Target
from decoder.profiling.measured_profile import profile_key
from decoder.tree.draft_tree import DraftTree
from profiler.calibrate.ranks import together
from tests.decoder.models import LatticeDrafter

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
NEW_TOKENS = 24
POLICIES = ("plain", "fixed:12", "bastion")
DEPTH = 4


def shared_target(folder: Path, ranks: Ranks, **options: Any) -> Target:
    loaded = load_model(str(folder), dtype=torch.float64, device=torch.device("cpu"), ranks=ranks)
    return Target(loaded, **options)


def verified(target: Target, tree: DraftTree) -> list[torch.Tensor]:
    """Logits of a prompt's last token, of a tree behind it, and of one behind its first rows."""
    target.reserve(64)
    prompted = target.prefill(torch.tensor(PROMPT))
    first = target.verify([Step(7, tree)])[0].clone()
    target.commit([0, 1])
    return [prompted, first, target.verify([Step(8, tree)])[0]]


def tree_of(seed: int, vocab: int) -> DraftTree:
    """A tree of twelve nodes, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(0, node + 1, (), generator=generator)) for node in range(12)]
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == 0 else depths[parent - 1] + 1)
    tokens = torch.randint(0, vocab, (12,), generator=generator)
    return DraftTree(
        tokens.numpy(), torch.tensor(parents).numpy(), torch.tensor(depths).numpy(),
        torch.full((12,), 0.1, dtype=torch.float64).numpy(),
    )  # fmt: skip


def decoded(target: Target, policy: str) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """The text after the prompt, and the trees that were verified for it."""
    trees = []
    verify = target.verify

    def watched(steps: list[Step]) -> list[torch.Tensor]:
        trees.append((steps[0].tree.tokens.tolist(), steps[0].tree.parents.tolist()))
        return verify(steps)

    drafter = LatticeDrafter(target.architecture.vocab, DEPTH)
    decoder = TreeDecoder(target, policy=policy, drafter=drafter, max_nodes=16)
    target.verify = watched  # type: ignore[method-assign]
    try:
        found = decoder.generate(PROMPT, max_new_tokens=NEW_TOKENS).token_ids
    finally:
        del target.verify
    return found, trees


def refused(folder: Path, ranks: Ranks) -> str:
    try:
        shared_target(folder, ranks)
    except InputError as error:
        return str(error)
    return ""


def findings(folder: Path, ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {"size": ranks.size, "rank": ranks.rank}
    for family in sorted(path for path in folder.iterdir() if path.name.startswith("fits-")):
        for fused in (False, True):
            target = shared_target(family, ranks, fused=fused)
            tree = tree_of(0, target.architecture.vocab)
            found[f"{family.name} {fused}"] = verified(target, tree)
        found[f"{family.name} sizes"] = [
            target.reserve(8).data.shape[3],
            sum(parameter.numel() for parameter in target.model.parameters()),
        ]
    target = shared_target(folder / "fits-llama-gqa", ranks)
    for policy in POLICIES:
        found[policy] = decoded(target, policy)
    found["probed"] = str(ProfileStore().find(profile_key(target)).path)
    found["refused"] = [refused(path, ranks) for path in sorted(folder.glob("refused-*"))]
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    with together() as ranks:
        torch.save(findings(folder, ranks), folder / f"rank{ranks.rank}.pt")


if __name__ == "__main__":
    main()
