"""Rotary factors that depend on a text's length: which texts a target decodes exactly with them.

transformers chooses the factors anew in every forward, by its largest position: `longrope` has a
second set beyond `original_max_position_embeddings`, and `dynamic` scales beyond
`max_position_embeddings`. A draft tree's deepest row, or a chunk of a long prompt, would so
choose for all rows. Here a text has one set from its first token to its last, that of its
prompt, and a text that would change it on the way is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from costmodel.errors import InputError

BY_LENGTH = ("dynamic", "longrope")
FIXED = ("default", *(name for name in ROPE_INIT_FUNCTIONS if name not in BY_LENGTH))


@dataclass(frozen=True, slots=True)
class RopeByLength:
    """The rotary modules of a model whose factors depend on the length of a text.

    switch  tokens of the longest text with the first factors
    beyond  whether longer texts have other factors that do not change again (`longrope`)
    """

    modules: tuple[nn.Module, ...]
    switch: int
    beyond: bool

    def is_long(self, prompt_tokens: int) -> bool:
        """Whether a text with such a prompt has the factors of long texts."""
        return self.beyond and prompt_tokens > self.switch

    def check(self, prompt_tokens: int, new_tokens: int, name: str) -> None:
        """Raise InputError for a text whose factors would change on the way."""
        if self.beyond and prompt_tokens <= self.switch < prompt_tokens + new_tokens:
            raise InputError(
                f"the rotary factors of {name} change behind {self.switch} tokens (longrope), and "
                f"a text of {prompt_tokens} tokens and {new_tokens} new ones would cross that",
                hint=f"Ask for at most {self.switch - prompt_tokens} new tokens, or give a prompt "
                f"of more than {self.switch} tokens.",
            )

    @contextmanager
    def of_long_texts(self) -> Iterator[None]:
        """Forwards inside use the factors of long texts, whatever their positions."""
        with ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(forwarding(module, partial(self._long, module.forward)))
            yield

    def _long(self, forward: Any, x: Any, position_ids: Any, *more: Any, **named: Any) -> Any:
        """Cosines and sines that a rotary module gives beside one more position."""
        last = torch.full_like(position_ids[..., :1], self.switch)
        factors = forward(x, torch.cat((position_ids, last), dim=-1), *more, **named)
        return tuple(part[..., :-1, :] for part in factors)


@contextmanager
def forwarding(module: nn.Module, forward: Any) -> Iterator[None]:
    """Calls of the module are calls of this function."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def rope_by_length(model: nn.Module, config: Any) -> RopeByLength | None:
    """The rotary modules whose factors depend on the length; None where none does.

    Raises InputError for a kind of rotary factors that is not known.
    """
    modules_of: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # one, or one for each type of layer
        for kind in sorted(set(kinds.values())) if isinstance(kinds, Mapping) else (kinds,):
            if isinstance(kind, str):
                modules_of.setdefault(kind, []).append(module)
    unknown = sorted(kind for kind in modules_of if kind not in (*FIXED, *BY_LENGTH))
    by_length = [kind for kind in modules_of if kind in BY_LENGTH]
    mixed = any(  # of this kind for some types of layers only
        isinstance(module.rope_type, Mapping) for kind in by_length for module in modules_of[kind]
    )
    if unknown or len(by_length) > 1 or mixed:
        raise InputError(
            f"rotary factors of the kind '{', '.join(unknown or modules_of)}' are not supported",
            hint=f"Supported in `rope_scaling`: {', '.join((*FIXED, *BY_LENGTH))}, one for all "
            "layers where it depends on the length.",
        )
    if not by_length:
        return None
    kind, modules = by_length[0], tuple(modules_of[by_length[0]])
    if kind == "dynamic":
        return RopeByLength(modules, int(config.max_position_embeddings), beyond=False)
    switch = config.rope_parameters["original_max_position_embeddings"]
    return RopeByLength(modules, int(switch), beyond=True)
