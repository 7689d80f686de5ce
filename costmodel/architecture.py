"""The sizes of a target model that determine the cost of a forward."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from costmodel.errors import InputError, shown
from costmodel.fields import MOST, is_whole
from costmodel.hf_kinds import architecture_fields

# Beyond every model; times of larger ones would leave the range of a float.
_MOST_PARAMETERS = 10**15
_COUNTS = ("experts", "active_experts", "expert_ffn")
_LATENT = ("latent_rank", "rope_dim", "value_dim")
_RECURRENT = ("", "gated_delta", "kimi_delta", "mamba2", "short_conv")
_INDEXER = ("index_heads", "index_dim", "index_topk", "index_layers")
_STATE = ("state_heads", "state_groups", "state_key_dim", "state_value_dim", "conv_width")
# Products and sums of one row with each entry of a state: decay, update and output, and what the
# delta rule reads before it writes.
_STATE_FLOPS = {"gated_delta": 8, "kimi_delta": 8, "mamba2": 6}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """Sizes of a decoder-only transformer.

    `name` is a label outside the hash: a fine-tune or a local folder has the hash of its base.
    Weights, tokenizer, rope parameters and norm epsilons do not change the cost and are left out.
    Attention reads the last `sliding_window` tokens (None: all), except in `full_layers` layers;
    `sinks`: each head has one more logit. `layer_norms` counts norms over the hidden width. In a
    mixture of experts all layers but the first `dense_layers` are sparse, and each token also
    passes an FFN of width `shared_ffn`. With latent attention (DeepSeek-V2, arXiv 2405.04434) a
    token's cache is one vector of `latent_rank` + `rope_dim` values a layer, `value_dim` is the
    width of a head's value, `head_dim` that of its query, and queries are made from `query_rank`
    values (0: from the hidden state). In `index_layers` layers an indexer of `index_heads`
    (DeepSeek-V3.2) keeps a key of `index_dim` values, by which each row chooses the `index_topk`
    tokens that it attends to.

    Hybrids: `recurrent_layers` layers keep a state instead of keys, or beside them. Of the
    layers, `keyless_layers` have no attention and `ffnless_layers` no FFN. A state is `state_heads`
    matrices of `state_key_dim` x `state_value_dim` in float32; keys (mamba2: B and C) are shared
    in `state_groups`. A causal convolution over `conv_width` rows comes first.

    Attention of more than one shape: layers that read the whole context have `full_head_dim` and
    `full_kv_heads` (0: as the others) and with `full_key_is_value` one projection for both. The
    last `shared_kv_layers` read the keys of an earlier layer; `shared_full_layers` of them the
    whole context. `chunked`: the window does not slide, it starts at each multiple of itself.
    `gated_attention`: queries are projected with a gate of their width. `other_weights` counts
    further matrices that every token passes, `lookup_weights` tables of which it gathers a row.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    gated_ffn: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    norm_bias: bool = False
    parallel_residual: bool = False
    sliding_window: int | None = None
    experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0
    layer_norms: int = 2
    full_layers: int = 0
    sinks: bool = False
    dense_layers: int = 0
    shared_ffn: int = 0
    router_bias: bool = False
    query_rank: int = 0
    latent_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    index_layers: int = 0
    recurrent: str = ""
    recurrent_layers: int = 0
    keyless_layers: int = 0
    ffnless_layers: int = 0
    state_heads: int = 0
    state_groups: int = 0
    state_key_dim: int = 0
    state_value_dim: int = 0
    state_norm: bool = False
    conv_width: int = 0
    conv_bias: bool = False
    gated_attention: bool = False
    shared_gate: bool = False
    full_head_dim: int = 0
    full_kv_heads: int = 0
    full_key_is_value: bool = False
    shared_kv_layers: int = 0
    shared_full_layers: int = 0
    chunked: bool = False
    other_weights: int = 0
    lookup_weights: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError("name must be a non-empty text")
        for field in dataclasses.fields(self):  # whose types are texts, as all annotations here
            value, needed = getattr(self, field.name), field.default is dataclasses.MISSING
            if field.type == "bool" and not isinstance(value, bool):
                raise InputError(f"{field.name} must be true or false")
            if field.type == "int" or (field.name == "sliding_window" and value is not None):
                least = 1 if needed or field.default is None else 0
                counts = field.name not in ("other_weights", "lookup_weights")
                if not is_whole(value, least, most := MOST if counts else _MOST_PARAMETERS):
                    raise InputError(
                        f"{field.name} must be a whole number from {least} to {most}"
                        f" (is {shown(value)})"
                    )
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        for names in (_COUNTS, _LATENT, _INDEXER):
            present = [name for name in names if getattr(self, name)]
            if present and len(present) < len(names):
                raise InputError(f"{', '.join(names[:-1])} and {names[-1]} must be given together")
        if self.active_experts > self.experts:
            raise InputError(
                f"active_experts ({self.active_experts}) must not exceed experts ({self.experts})"
            )
        full = self.full_layers or self.full_head_dim or self.full_kv_heads or self.chunked
        if full and (self.sliding_window is None or self.full_layers >= self.layers):
            raise InputError("full_layers must be fewer than the layers, beside a sliding_window")
        if (self.dense_layers or self.shared_ffn) and not self.experts:
            raise InputError("dense_layers and shared_ffn belong to a mixture of experts")
        if self.recurrent not in _RECURRENT or bool(self.recurrent) != bool(self.recurrent_layers):
            kinds = ", ".join(_RECURRENT[1:])
            raise InputError(f"recurrent_layers need recurrent to be one of: {kinds}")
        sizes = [name for name in _STATE if not getattr(self, name)]
        if sizes and self.recurrent not in ("", "short_conv"):
            raise InputError(f"a recurrent layer needs {sizes[0]} above 0")
        if max(self.recurrent_layers, self.ffnless_layers) > self.layers:
            raise InputError("recurrent_layers and ffnless_layers must not exceed the layers")
        if self.keyless_layers >= self.layers or self.shared_kv_layers >= self.attention_layers:
            raise InputError("at least one layer must have keys of its own")
        if self.dense_layers >= self.layers:
            raise InputError(f"dense_layers ({self.dense_layers}) must be fewer than the layers")
        if self.latent_rank and self.rope_dim >= self.head_dim:
            raise InputError(f"rope_dim ({self.rope_dim}) must be below head_dim")
        if self.parameters > _MOST_PARAMETERS:
            raise InputError(f"the sizes give more than {_MOST_PARAMETERS:.0e} parameters")

    @property
    def query_width(self) -> int:
        """h_q = heads x head_dim (paper, table 2)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """h_kv = kv_heads x head_dim (paper, table 2)."""
        return self.kv_heads * self.head_dim

    @property
    def cached_width(self) -> int:
        """Values of one token in a layer's cache: keys and values, or the latent vector."""
        return self.latent_rank + self.rope_dim if self.latent_rank else 2 * self.kv_width

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Multiplications of one row with one key: (for its score, for its value), all heads.

        Latent attention multiplies with the cached vector itself.
        """
        if self.latent_rank:
            return self.heads * (self.latent_rank + self.rope_dim), self.heads * self.latent_rank
        return self.query_width, self.query_width

    @property
    def attention_layers(self) -> int:
        return self.layers - self.keyless_layers

    @property
    def full_score_ratio(self) -> float:
        """Score width of a layer that reads the whole context, over that of the others."""
        return self._full_head_dim / self.head_dim

    @property
    def full_cached_width(self) -> int:
        if not (self.full_head_dim or self.full_kv_heads):
            return self.cached_width
        return 2 * (self.full_kv_heads or self.kv_heads) * self._full_head_dim

    @property
    def kept_layers(self) -> tuple[int, int]:
        """Layers that keep keys of their own: (whole context, window)."""
        kept = self.attention_layers - self.shared_kv_layers
        if self.sliding_window is None:
            return kept, 0
        full = self.full_layers - self.shared_full_layers
        return full, kept - full

    @property
    def token_values(self) -> int:
        """Values of one token in the caches of all layers, those with a window included."""
        full, windowed = self.kept_layers
        whole = full * self.full_cached_width + self.index_values
        return whole + windowed * self.cached_width

    @property
    def index_values(self) -> int:
        return self.index_layers * self.index_dim

    @property
    def state_inner(self) -> int:
        short = self.recurrent == "short_conv"
        return self.hidden if short else self.state_heads * self.state_value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.state_groups * self.state_key_dim + self.state_inner

    @property
    def state_values(self) -> int:
        return self.state_inner * self.state_key_dim

    def state_bytes(self, element_bytes: float = 2) -> float:
        """Bytes of one sequence's states (float32) and convolution windows, all layers."""
        window = max(self.conv_width - 1, 0) * self.conv_channels * element_bytes
        return self.recurrent_layers * (4 * self.state_values + window)

    def stash_bytes(self, element_bytes: float = 2) -> float:
        """Bytes that one row leaves for the commit: key and update (float32), convolution input."""
        updates = self.state_groups * self.state_key_dim + self.state_inner
        updates = updates if self.state_values else 0
        return self.recurrent_layers * (4 * updates + self.conv_channels * element_bytes)

    @property
    def recurrent_matrices(self) -> int:
        made = {
            "gated_delta": self.conv_channels + self.state_inner + 2 * self.state_heads,
            "mamba2": self.conv_channels + self.state_inner + self.state_heads,
            "short_conv": 3 * self.hidden,
            "kimi_delta": self.conv_channels + 2 * self.state_value_dim + self.state_heads,
        }
        gates = 2 * self.state_value_dim * self.state_inner if self.recurrent == "kimi_delta" else 0
        return self.hidden * (made.get(self.recurrent, 0) + self.state_inner) + gates

    @property
    def recurrent_small(self) -> int:
        """Weights of one recurrent layer's convolution, decays and norm."""
        count = self.conv_channels * (self.conv_width + self.conv_bias)
        if self.recurrent == "short_conv":
            return count + (self.conv_bias and 4 * self.hidden)
        heads = self.state_heads  # a decay of each, or of each channel
        decays = {"gated_delta": 2 * heads, "kimi_delta": heads + self.state_inner}
        count += decays.get(self.recurrent, 3 * heads)
        norm = self.state_inner if self.recurrent == "mamba2" else self.state_value_dim
        return count + (norm if self.state_norm else 0)

    @property
    def recurrent_row_flops(self) -> int:
        """FLOPs of one row in all recurrent layers: projections, convolution, state."""
        state = _STATE_FLOPS.get(self.recurrent, 0) * self.state_values
        convolution = 2 * self.conv_width * self.conv_channels
        return self.recurrent_layers * (2 * self.recurrent_matrices + convolution + state)

    @property
    def ffn_matrices(self) -> int:
        """Of one FFN: gate, up and down, or up and down."""
        return 3 if self.gated_ffn else 2

    @property
    def sparse_layers(self) -> int:
        return self.ffn_layers - self.dense_layers if self.experts else 0

    @property
    def ffn_layers(self) -> int:
        return self.layers - self.ffnless_layers

    @property
    def common_ffn(self) -> int:
        """Width of the FFNs that every token passes, all layers together."""
        dense = self.ffn_layers - self.sparse_layers
        return dense * self.ffn + self.sparse_layers * self.shared_ffn

    @property
    def active_ffn(self) -> int:
        """Width of the FFNs that one token passes, all layers together."""
        return self.common_ffn + self.sparse_layers * self.active_experts * self.expert_ffn

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but those of the other experts."""
        idle = self.sparse_layers * (self.experts - self.active_experts)
        return self.parameters - idle * self.expert_parameters

    @property
    def hash(self) -> str:
        """12 hex digits over the fields that change the cost.

        Those at their default are left out, so that a new field leaves existing hashes as they are.
        """
        fields = self.to_dict()
        del fields["name"]
        if self.experts and not self.dense_layers:
            del fields["ffn"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def projections(self) -> tuple[int, int, int]:
        """Weights of one usual layer's query, key and value, and output; without biases, norms."""
        query = self.hidden * self.query_width * (2 if self.gated_attention else 1)
        if self.query_rank:
            query = self.query_rank * (self.hidden + self.query_width)
        key_value = self.hidden * self.cached_width
        if self.latent_rank:
            made = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
            key_value += self.latent_rank * made
        return query, key_value, self.hidden * self.heads * (self.value_dim or self.head_dim)

    @property
    def attention_parameters(self) -> int:
        return sum(self.projections)

    @property
    def reshaped(self) -> tuple[int, int, int]:
        """By how many weights the `projections` of all layers exceed those of usual ones."""
        wider = self.full_layers * self.heads * self.hidden * (self._full_head_dim - self.head_dim)
        usual = self.projections[1]
        fewer = -self.shared_kv_layers * usual
        if self.full_cached_width != self.cached_width or self.full_key_is_value:
            made = self.hidden * self.full_cached_width // (2 if self.full_key_is_value else 1)
            fewer += self.kept_layers[0] * (made - usual)
        return wider, fewer, wider

    @property
    def _full_head_dim(self) -> int:
        return self.full_head_dim or self.head_dim

    @property
    def mixer_parameters(self) -> int:
        """Matrices beside `attention_layers` equal attentions, FFNs and embeddings."""
        recurrent = self.recurrent_layers * self.recurrent_matrices
        return sum(self.reshaped) + recurrent + self.other_weights + self.index_parameters

    @property
    def index_parameters(self) -> int:
        """Matrices of all indexers: of queries, of keys, and of the heads' weights."""
        made = self.query_rank * self.index_heads * self.index_dim
        return self.index_layers * (made + self.hidden * (self.index_dim + self.index_heads))

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert, or of the FFN where there are no experts; without biases."""
        width = self.expert_ffn if self.experts else self.ffn
        return self.ffn_matrices * self.hidden * width

    @property
    def small_parameters(self) -> int:
        """Norms (the last one's too), biases, routers, and what is small in recurrent layers."""
        norm = self.hidden * (2 if self.norm_bias else 1)
        attention = 2 * self.head_dim if self.qk_norm else 0
        queries = self.query_width * (2 if self.gated_attention else 1)
        attention += queries + 2 * self.kv_width if self.qkv_bias else 0
        attention += self.hidden if self.output_bias else 0
        attention += self.heads if self.sinks else 0
        attention += self.query_rank + self.latent_rank
        # Norms of layers with another head dimension, and of keys that are another layer's.
        norms = (self.full_layers + self.kept_layers[0]) * (self._full_head_dim - self.head_dim)
        norms -= self.shared_kv_layers * self.head_dim
        router = self.experts * (self.hidden + self.router_bias) + self.shared_gate * self.hidden
        inner, sparse = self.ffn_matrices - 1, self.sparse_layers
        biases = (self.ffn_layers - sparse) * (inner * self.ffn + self.hidden)
        biases += sparse * self.experts * (inner * self.expert_ffn + self.hidden)
        return (
            (self.layers * self.layer_norms + 1) * norm
            + self.attention_layers * attention
            + (norms if self.qk_norm else 0)
            + self.recurrent_layers * self.recurrent_small
            + sparse * router
            + 2 * self.index_values
            + (biases if self.ffn_bias else 0)
        )

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        experts = self.sparse_layers * self.experts * self.expert_parameters
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = self.attention_layers * self.attention_parameters + self.small_parameters
        common_ffn = self.ffn_matrices * self.hidden * self.common_ffn
        return (
            layers + self.mixer_parameters + self.lookup_weights + common_ffn + experts + embeddings
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; optional ones only where they differ from the default."""
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        # A needed field's default is dataclasses.MISSING, which equals no value.
        return {field.name: value for field, value in values if value != field.default}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelArchitecture:
        """The inverse of `to_dict`. Raises InputError naming a missing or unknown field."""
        if not isinstance(fields, Mapping):
            raise InputError("an architecture must be a mapping of field names to values")
        allowed = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(str(key) for key in fields if key not in allowed)
        if unknown:
            raise InputError(f"unknown architecture field '{unknown[0]}'")
        for name, field in allowed.items():
            if field.default is dataclasses.MISSING and name not in fields:
                raise InputError(f"the architecture field '{name}' is missing")
        return cls(**{str(key): value for key, value in fields.items()})

    @classmethod
    def from_hf_config(
        cls, config: Any, name: str | None = None, *, approximate: bool = False
    ) -> ModelArchitecture:
        """Read a Hugging Face config that says every field: of transformers, or a mapping.

        approximate  read a kind whose cost is not known by the usual names of its sizes
        """
        return cls(**architecture_fields(config, name, approximate=approximate))
