"""BlockPilot: a DFlash drafter whose block size is chosen for each text from its prompt.

Zhang et al., "BlockPilot", 2.4: once the target has read the prompt, a predictor chooses the
block size from the logits of its last token, and it stays for the whole text. Neither the
target, nor the drafter, nor the verification change.
"""

from __future__ import annotations

from pathlib import Path

import torch

from costmodel.errors import InputError
from decoder.drafters.base import Draws
from decoder.drafters.blockpilot_model import BlockPredictor, load_predictor
from decoder.drafters.checkpoint import checkpoint_folder, find_config, read_config
from decoder.drafters.dflash import DFlashDrafter, DFlashSession
from decoder.drafters.dflash_config import is_dflash
from decoder.target import Target


class BlockPilotDrafter:
    """Drafts as its DFlash drafter does, with the block size that the predictor chooses.

    `max_depth` is that of the largest candidate. What a draft costs is taken to be what it
    costs at the trained block size, in the middle of the candidates, so that the hash is
    that of the DFlash drafter. A session that is started without logits, as where a draft
    is timed, keeps the trained block size.
    Raises InputError where predictor and drafter do not belong together.
    """

    name = "blockpilot"
    draws: Draws = "whole"

    def __init__(self, dflash: DFlashDrafter, predictor: BlockPredictor) -> None:
        check_fit(predictor, dflash)
        self.dflash = dflash
        self.predictor = predictor
        self.max_depth = predictor.config.candidates[-1] - 1
        self.feature_layers = dflash.feature_layers
        self.architecture_hash = dflash.architecture_hash

    @classmethod
    def from_pretrained(cls, name: str, target: Target) -> BlockPilotDrafter:
        """The predictor in a folder or of a hub id, with the DFlash drafter that it names."""
        folder = checkpoint_folder(name)
        like = torch.empty(0, dtype=target.dtype, device=target.device)
        predictor = load_predictor(folder, read_config(folder), like)
        named = predictor.config.drafter
        beside = folder / Path(named).expanduser()
        source = str(beside) if beside.is_dir() else named
        if not is_dflash(find_config(source)):
            raise InputError(
                f"{folder} chooses block sizes for {named}, which is no DFlash drafter",
                hint="Correct 'drafter' in its config.json.",
            )
        return cls(DFlashDrafter(target, source), predictor)

    def session(self) -> BlockPilotSession:
        return BlockPilotSession(self)


class BlockPilotSession(DFlashSession):
    """One text: a DFlash session whose block size is settled by the first logits it reads."""

    def __init__(self, drafter: BlockPilotDrafter) -> None:
        super().__init__(drafter.dflash)
        self._predictor = drafter.predictor
        self.block_size: int | None = None  # what was chosen

    def read_logits(self, logits: torch.Tensor) -> None:
        """Choose the block size from the logits [vocab] of the prompt's last token."""
        if self.block_size is None:
            self.block_size = self._predictor.block_size(logits)
            self.set_block_size(self.block_size)


def check_fit(predictor: BlockPredictor, dflash: DFlashDrafter) -> None:
    """Raise InputError unless the predictor was trained for such a drafter."""
    config, own = predictor.config, dflash.model.config
    vocab = dflash.target.architecture.vocab
    found = {
        "block size": (config.block_size, own.block_size),
        "hash": (config.drafter_hash, own.hash(vocab)),
        "vocabulary": (config.vocab, vocab),
    }
    problems = [
        f"its {what} is {said} and the drafter's {real}"
        for what, (said, real) in found.items()
        if said != real
    ]
    if problems:
        raise InputError(
            f"the BlockPilot predictor was not trained for this drafter: {'; '.join(problems)}",
            hint="Train a predictor for this drafter, or name the one it was trained for.",
        )
