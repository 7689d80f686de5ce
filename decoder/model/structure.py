"""A model's structure, as one of its forwards shows it: layers, heads, masks, attention options.

Families are many and their names say little. What decides whether a draft tree can be verified
by a model is what its attention asks for, so a short forward is run with an attention function
that notes every call, and a mask function that notes every mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from costmodel.errors import InputError
from decoder.model.attention import attention_of

TRACE_NAME = "rooftree_trace"
ROWS = 3
FAR = 1 << 20  # positions up to which masks are looked at
# Arguments of attention functions that change nothing for rows behind a cache.
HARMLESS = frozenset(
    (
        "cache_position",
        "deterministic",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "scaling",
        "sliding_window",
        "use_cache",
    )
)
NAMES = {
    "attention_mask": "a mask of its own",
    "softcap": "soft caps on its scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias by position on its scores",
}


class UnsupportedModelError(InputError):
    """A model whose draft trees cannot be verified exactly; the problem says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What a forward needs to know of a model.

    window      tokens of the longest text in which every layer sees everything; None: any text
    plain_head  whether logits are the output of the LM head, without scales or caps
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    plain_head: bool = True

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention function; shapes are [batch, heads, rows, width]."""

    layer: int | None
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    options: frozenset[str]
    window: int | None


@dataclass(slots=True)
class _Notes:
    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[Callable[..., Any]] = field(default_factory=list)


_notes = _Notes()


def _note_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *_: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Notes the call; every row attends to itself alone."""
    options["attention_mask"] = attention_mask
    window = options.get("sliding_window")
    call = AttentionCall(
        layer=getattr(module, "layer_idx", None),
        query=tuple(query.shape),
        key=tuple(key.shape),
        value=tuple(value.shape),
        options=frozenset(name for name, option in options.items() if option is not None),
        window=window if isinstance(window, int) else None,
    )
    _notes.calls.append(call)
    group = query.shape[1] // value.shape[1]
    return value.repeat_interleave(group, dim=1).transpose(1, 2).contiguous(), None


def _note_mask(*_: object, mask_function: Callable[..., Any], **__: object) -> None:
    _notes.masks.append(mask_function)


AttentionInterface.register(TRACE_NAME, _note_attention)
AttentionMaskInterface.register(TRACE_NAME, _note_mask)


def base_of(model: Any) -> Any:
    """The decoder of a causal LM, which gives hidden states; the model itself where it has none."""
    base = model.base_model
    return getattr(model, "model", model) if base is model else base


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of a model's parameters; those with packed weights have no numbers of theirs."""
    return next(part.device for part in model.parameters() if not part.is_meta)


@torch.inference_mode()
def read_structure(model: Any) -> Structure:
    """The structure of a causal LM, from a forward of a few rows.

    Raises UnsupportedModelError with the reason where draft trees cannot be verified by it. That it
    raises nothing does not yet say that they can: see `decoder.model.selfcheck`.
    """
    global _notes
    base = base_of(model)
    if base is model or model.get_output_embeddings() is None:
        raise UnsupportedModelError("it has no separate decoder and LM head")
    _notes = notes = _Notes()
    device = device_of(model)
    rows = torch.arange(ROWS, device=device)[None]
    with attention_of(model, TRACE_NAME):
        base(input_ids=rows, position_ids=rows, use_cache=False)
    config = model.config.get_text_config(decoder=True)
    structure = _one_shape(notes.calls, _layers(config))
    _check_options(notes.calls)
    return _with_window(structure, notes, config)


def _layers(config: Any) -> int:
    return int(getattr(config, "num_hidden_layers", 0) or 0)


def _one_shape(calls: Sequence[AttentionCall], layers: int) -> Structure:
    if not calls:
        raise UnsupportedModelError("its attention does not go through transformers' interface")
    attending = [call.layer for call in calls]
    if sorted(set(attending), key=str) != sorted(range(layers), key=str):
        raise UnsupportedModelError(
            f"{len(set(attending))} of its {layers} layers attend over the text: others keep a "
            "state or share keys"
        )
    if len(attending) != layers:
        raise UnsupportedModelError("its layers attend more than once in a forward")
    first = calls[0]
    if any((c.query, c.key, c.value) != (first.query, first.key, first.value) for c in calls):
        raise UnsupportedModelError("its layers have attention of different shapes")
    if first.key != first.value or first.query[-1] != first.key[-1]:
        raise UnsupportedModelError("its keys and values have different widths (latent attention)")
    (_, heads, rows, width), kv_heads = first.query, first.key[1]
    if rows != ROWS or first.key[2] != ROWS or heads % kv_heads:
        raise UnsupportedModelError("its attention does not read one key a token")
    return Structure(layers=layers, heads=heads, kv_heads=kv_heads, head_dim=width)


def _check_options(calls: Sequence[AttentionCall]) -> None:
    others = sorted(frozenset().union(*(call.options for call in calls)) - HARMLESS)
    if others:
        raise UnsupportedModelError(
            "its attention has " + " and ".join(NAMES.get(name, f"'{name}'") for name in others)
        )


def _with_window(structure: Structure, notes: _Notes, config: Any) -> Structure:
    positions = int(getattr(config, "max_position_embeddings", 0) or FAR)
    seen = [_seen(mask, min(positions, FAR)) for mask in notes.masks]
    windows = [call.window for call in notes.calls if call.window is not None]
    least = min((*seen, *windows), default=positions)
    return Structure(
        layers=structure.layers,
        heads=structure.heads,
        kv_heads=structure.kv_heads,
        head_dim=structure.head_dim,
        window=least if least < min(positions, FAR) else None,
    )


def _seen(mask: Callable[..., Any], positions: int) -> int:
    """Tokens of the longest text in which the mask lets every row see all before it."""
    rows = torch.arange(positions)
    first = torch.zeros_like(rows)
    if bool(torch.as_tensor(mask(0, 0, first[:1], first[:1] + 1)).any()):
        raise UnsupportedModelError("its rows see later tokens")
    visible = torch.as_tensor(mask(0, 0, rows, first)).expand(positions)
    return positions if bool(visible.all()) else int((~visible).int().argmax())
