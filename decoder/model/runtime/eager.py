"""The eager runtime: forwards through the target's own modules, without padding or capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from costmodel.hf_config import positions_of, text_fields
from decoder.configs import base_of, text_of
from decoder.model.attention import (
    ATTENTION_NAME,
    ForwardAttention,
    RowBlock,
    SegmentAttention,
    attending,
    attention_of,
    joined,
    plan_segment,
)
from decoder.model.kv_cache import KVCache
from decoder.model.latents import LatentAttention, follow_latents
from decoder.model.mixers import RowStates, follow_states
from decoder.model.runtime.capture import Capture, ChosenTokens
from decoder.model.runtime.fused import TableAttention, kernels_usable
from decoder.model.runtime.rope import forwarding, rope_by_length
from decoder.model.runtime.tables import RowTables, needed_words
from decoder.model.structure import MaskFunction, Structure, device_of, mask_segment

RuntimeKind = Literal["eager", "packed", "graphs"]
RuntimeChoice = Literal["auto", "eager", "packed", "graphs"]
NO_TOKEN = -1  # in place of a token where the logits are not numbers (NaN, infinite)


@dataclass(frozen=True, slots=True)
class ForwardOutputs:
    """The outputs of a forward, with the rows of all blocks end to end.

    logits    [rows, vocab], or [1, vocab] where only the last row's were requested
    features  [rows, width], None where no layer is captured
    chosen    the rows' greedy tokens on their way to the host, where the forward chose them

    A graph runtime returns views of its static buffers, which the next forward overwrites.
    """

    logits: Tensor
    features: Tensor | None
    chosen: ChosenTokens | None = None


def greedy_tokens(logits: Tensor) -> Tensor:
    """The argmax of each row, int64 [...], of logits [..., vocab]; `NO_TOKEN` for no numbers.

    The largest value is NaN if any is, so it tells. No device is waited for.
    """
    if logits.is_cpu and logits.dtype == torch.float32:  # NumPy takes a tenth of torch's time
        tokens = torch.from_numpy(logits.numpy().argmax(-1, keepdims=True))
    else:
        tokens = logits.argmax(-1, keepdim=True)
    largest = logits.gather(-1, tokens)
    # NaN - NaN and inf - inf are not 0; the fewest launches that tell.
    return tokens.masked_fill_(largest - largest != 0, NO_TOKEN).squeeze(-1)


class ModelStep:
    """The forward of a causal LM, from token ids and positions to hidden states and logits.

    captured    indices into transformers' `hidden_states` that are returned as features
    owned       True sets our attention on the model for good; False only during each forward
    rope        rotary factors that depend on the length; None where they do not
    long        whether the texts at hand have the factors of long texts
    plain_head  whether logits are the LM head's output, without scales or caps
    masks       each layer's mask function, of a model with windows; empty for others
    positions   that the model knows, scaled ones included unless they change with the text
    """

    def __init__(self, model: Any, *, owned: bool) -> None:
        self.model, self.owned = model, owned
        self.device, self.dtype = device_of(model), model.dtype
        self.captured: tuple[int, ...] = ()
        self.rope = rope_by_length(text_of(model), model.config.get_text_config(decoder=True))
        self.long, self.plain_head = False, True
        known = positions_of(text_fields(model.config)) or 1 << 30
        self.positions = known if self.rope is None or self.rope.beyond else self.rope.switch
        self.masks: tuple[MaskFunction | None, ...] = ()
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self._base, self._text = base_of(model), text_of(model)
        follow_states(model)
        follow_latents(model)
        if owned:
            model.config._attn_implementation = ATTENTION_NAME

    @property
    def has_layers(self) -> bool:
        """Whether hidden states of single layers can be captured."""
        return isinstance(getattr(self._text, "layers", None), torch.nn.ModuleList)

    @property
    def vocab(self) -> int:
        """Columns of the logits, the vocabulary's padding included."""
        return int(self.head.out_features)

    def run(
        self, tokens: Tensor, positions: Tensor, attention: ForwardAttention
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [rows, hidden] after the final norm, and features [rows, width].

        tokens, positions  [rows]
        """
        rope = self.rope.of_long_texts() if self.rope and self.long else nullcontext()
        ours = nullcontext() if self.owned else attention_of(self.model, ATTENTION_NAME)
        with ours, attending(attention), rope, self._hooks() as states:
            where: Any = {"position_ids": positions[None], "use_cache": False}
            output = self._text(input_ids=tokens[None], **where, **attention.arguments)
        features = [states[layer][0] for layer in self.captured]
        return output.last_hidden_state[0], torch.cat(features, -1) if features else None

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's logits [..., vocab] of hidden states [..., hidden] after the final norm."""
        if self.plain_head:
            return self.head(hidden)
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        states = _HiddenStates(rows)
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=rows.device)
        with forwarding(self._base, lambda *_, **__: states):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits.view(*hidden.shape[:-1], -1)

    def logits_into(self, hidden: Tensor, out: Tensor) -> None:
        """Write the logits of hidden states [rows, hidden] to `out` [rows, vocab]."""
        plain = self.plain_head and type(self.head) is torch.nn.Linear
        if plain and self.head.bias is None:
            torch.mm(hidden, self.head.weight.t(), out=out)
        else:
            out.copy_(self.logits(hidden))

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Rows [tokens, hidden] of the LM head's weight, copied."""
        return self.head.weight.detach()[tokens]

    def head_weight(self) -> Tensor:
        """The LM head's weight [vocab, hidden]."""
        return self.head.weight.detach()

    @contextmanager
    def _hooks(self) -> Iterator[dict[int, Tensor]]:
        """The captured hidden states [1, rows, hidden] of one forward, by layer."""
        states: dict[int, Tensor] = {}

        def store(layer: int, module: Any, inputs: Any, output: Any) -> None:
            states[layer] = output[0] if isinstance(output, tuple) else output

        modules = {i: self._text.layers[i - 1] if i else self.embedding for i in self.captured}
        handles = [one.register_forward_hook(partial(store, i)) for i, one in modules.items()]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()


class EagerRuntime:
    """Runs any model on any device.

    Attention uses row tables and Triton kernels on CUDA, as in graphs. Elsewhere PyTorch
    operations attend one sequence after another.

    capture   the recorder of device work, shared with drafters; None without one
    buckets   row counts that forwards are padded to; empty without padding
    warnings  messages about forwards that did not run as configured
    """

    kind: RuntimeKind = "eager"
    capture: Capture | None = None
    buckets: tuple[int, ...] = ()

    def __init__(
        self, step: ModelStep, structure: Structure, warnings: tuple[str, ...] = ()
    ) -> None:
        self.warnings, self._step = warnings, step
        self._group, self._window = structure.group, structure.window
        self._plain = not structure.uneven
        self._latent_layers = structure.layers if structure.latent else None

    @property
    def eager(self) -> EagerRuntime:
        """The runtime of prefills."""
        return self

    def hides(self, cache: KVCache, blocks: Sequence[RowBlock]) -> bool:
        """Whether some layer's window hides tokens from some rows."""
        window = self._window
        return window is not None and any(
            cache.lengths[block.sequence] + int(block.offsets.max()) >= window for block in blocks
        )

    def forward(
        self, cache: KVCache, blocks: Sequence[RowBlock], *, last_only: bool = False
    ) -> ForwardOutputs:
        """One forward over the blocks, each behind its sequence's committed and pending rows.

        The target then counts their rows as pending. `last_only`: logits of the last row alone.
        """
        hidden, features = self.hidden(cache, blocks)
        return ForwardOutputs(self._step.logits(hidden[-1:] if last_only else hidden), features)

    def hidden(self, cache: KVCache, blocks: Sequence[RowBlock]) -> tuple[Tensor, Tensor | None]:
        """Hidden states [rows, hidden] after the final norm, and features, of all blocks."""
        device, first = self._step.device, 0
        if self._plain and kernels_usable(device) and not self.hides(cache, blocks):
            count, words = sum(block.rows for block in blocks), needed_words(cache, blocks)
            tables = RowTables(count, cache.sequences, words, device)
            tables.fill(cache, blocks)
            text, one = None, blocks[0]  # a piece of text, neither a tree nor several sequences
            causal = one.rows > 1 and one.visible is None and not cache.pending[one.sequence]
            if len(blocks) == 1 and causal:
                text = one.sequence, cache.end(one.sequence) + one.rows
            of_tables = TableAttention(cache.data, tables, text)
            return self._step.run(tables.tokens, tables.positions, of_tables)
        segments, tokens, positions = [], [], []
        for block in blocks:
            mask = block.mask()
            visible = None if mask is None else torch.from_numpy(mask).to(device)
            rows = slice(first, first + block.rows)
            segment = plan_segment(cache, block.sequence, rows, visible, self._group)
            tokens.append(torch.from_numpy(block.tokens).to(device))
            offsets = torch.from_numpy(block.offsets).to(device)
            positions.append(offsets + cache.lengths[block.sequence])
            if self.hides(cache, [block]):
                masks = self._step.masks
                segment = mask_segment(segment, masks, positions[-1], visible, self._group)
            segments.append(segment)
            first = rows.stop
        states = RowStates(cache, blocks) if cache.states.shapes else None
        attention = SegmentAttention(tuple(segments), states)
        if self._latent_layers is not None:
            attention = LatentAttention(tuple(segments), states, layers=self._latent_layers)
        return self._step.run(joined(tokens), joined(positions), attention)

    # Nothing is captured, so that nothing is refused, prepared or forgotten.
    def refusal(self, cache: KVCache, rows: int) -> str:
        return ""

    def prepare(self, cache: KVCache, rows: int, sequences: int = 1) -> None: ...

    def forget(self) -> None: ...


class _HiddenStates:
    """An output of a base model that has hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]
