"""Training examples: the target's features of collected texts, and its frozen LM head."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.nn import functional

from costmodel.errors import InputError
from costmodel.io import read_bytes, write_atomic
from decoder.model.loading import LoadedModel
from lab.training.corpus import TrainingText

MOST_BYTES = 4_000_000_000  # of one text's features


@dataclass(frozen=True, slots=True)
class Example:
    """A text with the target's hidden states.

    tokens         int64 [tokens]
    prompt_tokens  length of the prompt, the first of these tokens
    features       [tokens, layers * hidden], as a drafter reads them
    final          [tokens, hidden] after the target's last norm; row i gives the logits of
                   token i + 1
    """

    tokens: torch.Tensor
    prompt_tokens: int
    features: torch.Tensor
    final: torch.Tensor


class Examples(Sequence[Example]):
    """The examples of some texts, computed once and cached in `folder`."""

    def __init__(
        self,
        loaded: LoadedModel,
        texts: Sequence[TrainingText],
        layers: Sequence[int],
        folder: Path,
    ) -> None:
        """layers  indices into transformers' `hidden_states`: 0 is the embedding"""
        self._loaded, self._texts, self._layers = loaded, texts, tuple(layers)
        names = "-".join(map(str, layers))
        self._folder = folder / f"features-{names}-{loaded.architecture.hash}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Example:
        text = self._texts[index]
        digest = hashlib.sha256(repr(text.tokens).encode()).hexdigest()[:16]
        place = self._folder / f"{digest}.safetensors"
        try:
            tensors = load(read_bytes(place, InputError, most_bytes=MOST_BYTES))
        except (InputError, SafetensorError):  # missing or damaged
            tensors = self._compute(text)
            write_atomic(place, save(tensors), InputError)
        device = self._loaded.model.device
        tokens = torch.tensor(text.tokens, device=device)
        features, final = tensors["features"].to(device), tensors["final"].to(device)
        return Example(tokens, text.prompt_tokens, features, final)

    @torch.no_grad()
    def _compute(self, text: TrainingText) -> dict[str, torch.Tensor]:
        model = self._loaded.model
        ids = torch.tensor([text.tokens], device=model.device)
        done = model.model(ids, output_hidden_states=True, use_cache=False)
        features = torch.cat([done.hidden_states[i][0] for i in self._layers], dim=-1)
        return {"features": features.cpu(), "final": done.last_hidden_state[0].cpu()}


class FrozenHead:
    """Logits of hidden states by some rows of the target's LM head, which are not trained.

    The rows are cast once for each dtype: autocast would cast them at every product, since it
    caches only weights with gradients. On a CPU that took a tenth to a third of a step.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows.detach()
        self._narrow = {self._rows.dtype: self._rows}

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., tokens] of states [..., hidden], in autocast's dtype or in the states'."""
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        if dtype not in self._narrow:
            self._narrow[dtype] = self._rows.to(dtype)
        return functional.linear(states.to(dtype), self._narrow[dtype])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows before any cast."""
        return self._rows.dtype
