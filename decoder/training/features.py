"""The target's features of collected texts, kept in files so that each text is read once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from costmodel.errors import InputError
from costmodel.files import replacing
from decoder.loading import LoadedModel
from decoder.training.corpus import Text


@dataclass(frozen=True, slots=True)
class Example:
    """A text with what the target made of it.

    tokens         int64 [tokens]
    prompt_tokens  of them are the prompt
    features       [tokens, layers * hidden], as a drafter reads them
    final          [tokens, hidden] behind the target's last norm; its head makes of row i the
                   logits of token i + 1
    """

    tokens: torch.Tensor
    prompt_tokens: int
    features: torch.Tensor
    final: torch.Tensor

    def __post_init__(self) -> None:
        rows = len(self.tokens)
        if len(self.features) != rows or len(self.final) != rows:
            raise InputError(
                f"an example of {rows} tokens has features of {len(self.features)} "
                f"and final states of {len(self.final)}"
            )


class Examples(Sequence[Example]):
    """The examples of some texts; what is not in `folder` yet is computed and kept there.

    layers  indices into transformers' `hidden_states`: 0 is the embedding
    """

    def __init__(
        self, loaded: LoadedModel, texts: Sequence[Text], layers: Sequence[int], folder: Path
    ) -> None:
        self._loaded, self._texts, self._layers = loaded, texts, tuple(layers)
        names = "-".join(map(str, layers))
        self._folder = folder / f"features-{names}-{loaded.architecture.hash}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        text = self._texts[index]
        place = self._folder / f"{_digest(text)}.safetensors"
        kept = _kept(place)
        if kept is None:
            kept = self._compute(text)
            with replacing(place) as part:
                save_file(kept, part)
        tokens = torch.tensor(text.tokens, device=self._loaded.model.device)
        like = self._loaded.model.device
        features, final = kept["features"].to(like), kept["final"].to(like)
        return Example(tokens, text.prompt_tokens, features, final)

    @torch.no_grad()
    def _compute(self, text: Text) -> dict[str, torch.Tensor]:
        model = self._loaded.model
        ids = torch.tensor([text.tokens], device=model.device)
        done = model.model(ids, output_hidden_states=True, use_cache=False)
        features = torch.cat([done.hidden_states[i][0] for i in self._layers], dim=-1)
        return {"features": features.cpu(), "final": done.last_hidden_state[0].cpu()}


def _digest(text: Text) -> str:
    return hashlib.sha256(repr(text.tokens).encode()).hexdigest()[:16]


def _kept(place: Path) -> dict[str, torch.Tensor] | None:
    """None where the file is not there, or damaged, so that it is made again."""
    try:
        return load_file(place)
    except (OSError, SafetensorError):
        return None
