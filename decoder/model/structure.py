"""A model's structure, as one of its forwards shows it: layers, heads, masks, attention options.

Families are many and their names say little. What decides whether a draft tree can be verified
by a model is what its attention asks for, so a short forward is run with an attention function
that notes every call, and a mask function that notes every mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AttentionInterface, AttentionMaskInterface

from costmodel.errors import InputError
from costmodel.hf_config import positions_of, text_fields
from decoder.configs import base_of, text_of
from decoder.model.attention import Segment, attention_of, tail_mask
from decoder.model.kv_cache import CacheShape
from decoder.model.latents import TRACE_NAME, has_indexer, keeps_latents
from decoder.model.mixers import noting_states
from decoder.model.recurrence import StateShape

MaskFunction = Callable[..., Tensor]  # of transformers: (batch, head, rows, keys) to booleans
ROWS = 3
LONG_ROWS = 256  # that show whether blocks of tokens have keys of their own
FAR = 1 << 20  # positions up to which masks are looked at
# Arguments of attention functions that change nothing for rows behind a cache, or that we follow.
FOLLOWED = {
    "cache_position", "deterministic", "dropout", "indices", "is_causal", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings",
    "position_ids", "return_dict", "s_aux", "scaling", "sliding_window", "softcap", "use_cache",
}  # fmt: skip
NAMES = {"attention_mask": "a mask of its own", "position_bias": "a bias by position on its scores"}


class UnsupportedModelError(InputError):
    """A model whose draft trees cannot be verified exactly; the problem says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure(CacheShape):
    """What a forward needs to know of a model.

    window      tokens of the longest text in which every layer sees everything; None: any text
    extras      whether attention has sinks or soft caps on its scores
    layers      that keep keys
    stores      as in `CacheShape`, then those of indexers; `heads` is then the first layer's
    plain_head  whether logits are the output of the LM head, without scales or caps
    """

    heads: int
    window: int | None = None
    extras: bool = False
    plain_head: bool = True

    @property
    def latent(self) -> bool:
        """Whether layers keep latents, see `decoder.model.latents`."""
        return any(value_width == 0 for _, _, value_width, _ in self.stores)

    @property
    def group(self) -> int:
        """Query heads of one KV head; 1 where layers differ, whose masks are repeated by each."""
        return 1 if self.stores else self.heads // self.kv_heads

    @property
    def token_values(self) -> int:
        """Values of one token in the caches of all layers."""
        return sum(
            heads * (key + value)
            for number, (heads, key, value, source) in enumerate(self.layer_stores)
            if source == number
        )

    @property
    def uneven(self) -> str:
        """What kernels for plain layers cannot do in it; empty where they can."""
        if self.states:
            return "some of its layers have a recurrent state"
        if self.extras:
            return "its attention has sinks or soft caps"
        if self.latent:
            return "its layers store latents"
        return "its layers store keys and values of different sizes" if self.stores else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention function; shapes are [batch, heads, rows, width].

    mask  the number of its mask, where masks are marked
    """

    layer: int | None
    query: tuple[int, ...]
    key: Tensor
    value: tuple[int, ...]
    options: frozenset[str]
    window: int | None
    mask: int | None


@dataclass(slots=True)
class _Notes:
    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[MaskFunction] = field(default_factory=list)
    index_widths: list[int] = field(default_factory=list)
    states: list[StateShape] = field(default_factory=list)
    marked: bool = False

    def update(self, key: Any, value: Any, *_: object, **__: object) -> tuple[Any, Any]:
        """As of a cache of an empty text; so is the next."""
        return key, value

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.index_widths.append(keys.shape[2])
        return keys


_notes = _Notes()
_one_at_a_time = Lock()  # the notes of a forward are common to a process


def _note_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *_: object,
    **options: Any,
) -> tuple[Tensor, None]:
    """Notes the call; every row attends to itself alone."""
    mark = None
    if attention_mask is not None:
        if _notes.marked:
            mark = int(attention_mask.flatten()[0])
        if attention_mask.dtype != torch.bool:  # an indexer's is ours
            options["attention_mask"] = attention_mask
    latent = hasattr(module, "expand_kv") and keeps_latents(module)
    window = options.get("sliding_window")
    call = AttentionCall(
        layer=getattr(module, "layer_idx", None),
        query=(*query.shape[:3], key.shape[3]) if latent else tuple(query.shape),
        key=key,
        value=(*key.shape[:3], 0) if latent else tuple(value.shape),
        options=frozenset(name for name, option in options.items() if option is not None),
        window=window if isinstance(window, int) else None,
        mask=mark,
    )
    _notes.calls.append(call)
    if latent:
        width: Any = module.v_head_dim
        return query.new_zeros(*query.shape[:3], width).transpose(1, 2), None
    group = query.shape[1] // value.shape[1]
    mixed = value[:, :, : query.shape[2]].repeat_interleave(group, dim=1)
    return mixed.transpose(1, 2).contiguous(), None


def _note_mask(
    *_: object, mask_function: MaskFunction, device: Any = None, **__: object
) -> Tensor | None:
    """Notes the mask; where masks are marked, the layers get its number as their mask."""
    _notes.masks.append(mask_function)
    if not _notes.marked:
        return None
    return torch.full((1, 1, ROWS, ROWS), float(len(_notes.masks) - 1), device=device)


AttentionInterface.register(TRACE_NAME, _note_attention)
AttentionMaskInterface.register(TRACE_NAME, _note_mask)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters; those with packed weights have no numbers of theirs."""
    return next(part.device for part in model.parameters() if not part.is_meta)


@torch.inference_mode()
def read_structure(model: Any) -> Structure:
    """The structure of a causal LM, from a forward of a few rows.

    Raises UnsupportedModelError with the reason where draft trees cannot be verified by it. That it
    raises nothing does not yet say that they can: see `decoder.model.selfcheck`.
    """
    base = base_of(model)
    if base is model or model.get_output_embeddings() is None:
        raise UnsupportedModelError("it has no separate decoder and LM head")
    notes = _noted(model)
    config = model.config.get_text_config(decoder=True)
    structure = _sizes(notes, int(getattr(config, "num_hidden_layers", 0) or 0))
    if notes.index_widths:
        if not structure.latent:
            raise UnsupportedModelError("its indexer chooses keys of quantised weights")
        keys = ((1, width, 0, structure.layers + i) for i, width in enumerate(notes.index_widths))
        structure = replace(structure, stores=(*structure.stores, *keys))
    options = frozenset().union(*(call.options for call in notes.calls))
    if others := sorted(options - FOLLOWED):
        raise UnsupportedModelError(
            "its attention has " + " and ".join(NAMES.get(name, f"'{name}'") for name in others)
        )
    positions = _positions(config)
    windows = [call.window for call in notes.calls if call.window is not None]
    seen = (_seen(mask, positions) for mask in notes.masks)
    least = min((*seen, *windows), default=positions)
    window, extras = least if least < positions else None, bool(options & {"s_aux", "softcap"})
    structure = replace(structure, window=window, extras=extras)
    if structure.uneven or structure.window is not None:
        count = min(LONG_ROWS, positions)
        if any(call.key.shape[2] != count for call in _noted(model, count=count).calls):
            raise UnsupportedModelError("its attention does not read one key a token")
    return structure


@torch.inference_mode()
def read_masks(model: Any) -> tuple[MaskFunction | None, ...]:
    """The mask function of each layer; None where a row sees all tokens before it."""
    notes = _noted(model, marked=True)
    positions = _positions(model.config.get_text_config(decoder=True))
    hiding = [mask if _seen(mask, positions) < positions else None for mask in notes.masks]
    of_layers = sorted({call.layer: call.mask for call in notes.calls}.items())
    return tuple(None if number is None else hiding[number] for _, number in of_layers)


def bypassed_linears(model: Any) -> set[int]:
    """The `id` of each linear layer whose parent runs and does not call it, but may read it."""
    called: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, _: called.append(module))
    try:
        with torch.inference_mode():
            _noted(model)
    finally:
        handle.remove()
    inner = {id(part): part for module in called for part in module.children()}
    ran = {id(module) for module in called}
    return {key for key, part in inner.items() if isinstance(part, nn.Linear)} - ran


def _noted(model: Any, *, marked: bool = False, count: int = ROWS) -> _Notes:
    """What a forward of a few rows does."""
    global _notes
    rows = torch.arange(count, device=device_of(model))[None]
    with _one_at_a_time, attention_of(model, TRACE_NAME):
        _notes = notes = _Notes(marked=marked)
        more: dict[str, Any] = {}
        if has_indexer(model):
            seen = torch.ones((1, 1, count, count), dtype=torch.bool, device=rows.device)
            more = {"past_key_values": notes, "attention_mask": seen.tril()}
        with noting_states() as notes.states:
            text_of(model)(input_ids=rows % ROWS, position_ids=rows, use_cache=False, **more)
    if notes.states:  # several attentions may be of one layer, and some layers have none
        notes.calls = [replace(call, layer=i) for i, call in enumerate(notes.calls)]
    return notes


def _positions(config: Any) -> int:
    return min(positions_of(text_fields(config)) or FAR, FAR)


def _sizes(notes: _Notes, layers: int) -> Structure:
    calls, states = notes.calls, tuple(notes.states)
    if states and ("other",) not in states:
        layers = len(calls)
    if not calls and (layers or not states):
        raise UnsupportedModelError("its attention does not go through transformers' interface")
    if not calls:
        return Structure(layers=0, heads=1, kv_heads=1, head_dim=1, states=states)
    numbers = [call.layer for call in calls]
    if sorted(set(numbers), key=str) != sorted(range(layers), key=str):
        raise UnsupportedModelError(
            f"{len(set(numbers))} of its {layers} layers attend over the text: others keep a state"
        )
    if len(numbers) != layers:
        raise UnsupportedModelError("its layers attend more than once in a forward")
    for call in calls:
        (_, heads, *query), (_, kv_heads, *key) = call.query, call.key.shape
        even = heads % kv_heads == 0 and call.value[1:3] == (kv_heads, ROWS)
        if query != key or key[0] != ROWS or not even:
            raise UnsupportedModelError("its attention does not read one key a token")
    sources: dict[int, int] = {}  # the first layer of each tensor of keys
    for call in calls:
        sources.setdefault(id(call.key), call.layer or 0)
    calls = sorted(calls, key=lambda call: call.layer or 0)
    first = calls[0]
    (_, heads, _, width), kv_heads = first.query, first.key.shape[1]
    stores = tuple((*call.key.shape[1::2], call.value[3], sources[id(call.key)]) for call in calls)
    plain = tuple((kv_heads, width, width, layer) for layer in range(layers))
    if stores == plain and all(call.query == first.query for call in calls):
        stores = ()
    return Structure(
        layers=layers, heads=heads, kv_heads=kv_heads, head_dim=width, stores=stores, states=states
    )


def _seen(mask: MaskFunction, positions: int) -> int:
    """Tokens of the longest text in which the mask lets every row see all before it."""
    rows = torch.arange(positions)
    first = torch.zeros_like(rows)
    if bool(torch.as_tensor(mask(0, 0, first[:1], first[:1] + 1)).any()):
        raise UnsupportedModelError("its rows see later tokens")
    visible = torch.as_tensor(mask(0, 0, rows, first)).expand(positions)
    return positions if bool(visible.all()) else int((~visible).int().argmax())


def mask_segment(
    segment: Segment,
    masks: Sequence[MaskFunction | None],
    positions: Tensor,
    visible: Tensor | None,
    group: int,
) -> Segment:
    """The segment with masks by position, for a text that is longer than a window.

    masks      each layer's own mask function; None where it sees everything
    positions  int64 [rows]
    visible    see `plan_segment`; a row sees all its ancestors, in the order of their positions
    """
    if visible is None:
        visible = torch.ones((1, 1), dtype=torch.bool, device=positions.device)
    cache, prefix = segment.cache, segment.cache.lengths[segment.sequence]
    rows = positions[:, None]
    behind = prefix + visible.cumsum(1) - 1  # the positions of the pending and new rows
    before = torch.arange(prefix, device=positions.device)[None]
    spans: dict[MaskFunction | None, tuple[int, Tensor] | None] = {None: None}
    for mask in dict.fromkeys(masks):
        if mask is not None:
            seen = mask(0, 0, rows, before).expand(len(rows), prefix)
            first = int((~seen.any(0)).cumprod(0).sum())
            seen = torch.cat((seen[:, first:], mask(0, 0, rows, behind) & visible), 1)
            spans[mask] = first, tail_mask(seen, group, seen.shape[1], cache.dtype)
    return replace(segment, spans=[spans[mask] for mask in masks])
