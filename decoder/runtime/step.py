"""One pass through the target's own modules, with our attention and chosen hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from decoder.attention import ATTENTION_NAME, AttentionPlan


class ModelStep:
    """The forward of a causal LM, from token ids and positions to hidden states and logits.

    captured  indices into transformers' `hidden_states` whose values are kept as features
    owned     whether the model keeps our attention; a borrowed one gets it for each
              forward only
    """

    def __init__(self, model: Any, *, owned: bool) -> None:
        self.model = model
        self.owned = owned
        self.captured: tuple[int, ...] = ()
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings()
        self._base = model.base_model
        if owned:
            model.config._attn_implementation = ATTENTION_NAME

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def vocab(self) -> int:
        """Columns of the logits, padding of the vocabulary included."""
        return int(self.head.out_features)

    @property
    def feature_width(self) -> int:
        return len(self.captured) * int(self.embedding.weight.shape[1])

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [rows, hidden] behind the final norm, and features [rows, width].

        tokens, positions  [rows]
        """
        with self._split_attention(), self._hooks() as states:
            output = self._base(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, plan=plan
            )
        features = None
        if self.captured:
            features = torch.cat([states[layer][0] for layer in self.captured], dim=-1)
        return output.last_hidden_state[0], features

    def logits_into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Write the logits of hidden states [rows, hidden] to `out` [rows, vocab]."""
        if type(self.head) is torch.nn.Linear and self.head.bias is None:
            torch.mm(hidden, self.head.weight.t(), out=out)
        else:
            out.copy_(self.head(hidden))

    @contextmanager
    def _hooks(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collects the captured hidden states [1, rows, hidden] of one forward, by layer."""
        states: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                states[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        modules = {i: self._base.layers[i - 1] if i else self.embedding for i in self.captured}
        handles = [module.register_forward_hook(keep(i)) for i, module in modules.items()]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _split_attention(self) -> Iterator[None]:
        """Our attention on a borrowed model, taken off again whatever happens."""
        if self.owned:
            yield
            return
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = ATTENTION_NAME
        try:
            yield
        finally:
            self.model.config._attn_implementation = before
