"""The sizes of a target model that determine the cost of a forward."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from costmodel.errors import InputError, shown
from costmodel.hf_config import MOST, architecture_fields, is_known_kind, usual_fields

# Beyond every model; times of larger ones would leave the range of a float.
_MOST_PARAMETERS = 10**15
_COUNTS = ("experts", "active_experts", "expert_ffn")
_LATENT = ("latent_rank", "rope_dim", "value_dim")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """Sizes of a decoder-only transformer.

    `name` is a label outside the hash: a fine-tune or a local folder has the hash of its base.
    Weights, tokenizer, rope parameters and norm epsilons do not change the cost and are left
    out. Attention reads the last `sliding_window` tokens (None: all), except in `full_layers`
    layers; `sinks`: each head has one more logit. `layer_norms` counts norms over the hidden
    width. In a mixture of experts all layers but the first `dense_layers` are sparse, and each
    token also passes an FFN of width `shared_ffn`; without dense layers `ffn` is unused and not
    hashed. With latent attention (DeepSeek-V2, arXiv 2405.04434) a token's cache is one vector
    of `latent_rank` + `rope_dim` values a layer, `value_dim` is the width of a head's value,
    `head_dim` that of its query, and queries are made from `query_rank` values (0: from the
    hidden state).
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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError("name must be a non-empty text")
        for field in dataclasses.fields(self):  # whose types are texts, as all annotations here
            value, needed = getattr(self, field.name), field.default is dataclasses.MISSING
            if field.type == "bool" and not isinstance(value, bool):
                raise InputError(f"{field.name} must be true or false")
            if field.type == "int" or (field.name == "sliding_window" and value is not None):
                _check_int(field.name, value, 1 if needed or field.default is None else 0)
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        self._check_parts()
        if self.parameters > _MOST_PARAMETERS:
            raise InputError(f"the sizes give more than {_MOST_PARAMETERS:.0e} parameters")

    def _check_parts(self) -> None:
        for names in (_COUNTS, _LATENT):
            present = [name for name in names if getattr(self, name)]
            if present and len(present) < len(names):
                raise InputError(f"{', '.join(names[:2])} and {names[2]} must be given together")
        if self.active_experts > self.experts:
            raise InputError(
                f"active_experts ({self.active_experts}) must not exceed experts ({self.experts})"
            )
        if self.full_layers and (self.sliding_window is None or self.full_layers >= self.layers):
            raise InputError("full_layers must be fewer than the layers, beside a sliding_window")
        if (self.dense_layers or self.shared_ffn) and not self.experts:
            raise InputError("dense_layers and shared_ffn belong to a mixture of experts")
        if self.dense_layers >= self.layers:
            raise InputError(f"dense_layers ({self.dense_layers}) must be fewer than the layers")
        if self.latent_rank and self.rope_dim >= self.head_dim:
            raise InputError(f"rope_dim ({self.rope_dim}) must be below head_dim")

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
    def ffn_matrices(self) -> int:
        """Weight matrices of one FFN: gate, up and down, or up and down."""
        return 3 if self.gated_ffn else 2

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def common_ffn(self) -> int:
        """Width of the FFNs that every token passes, all layers together."""
        return (self.layers - self.sparse_layers) * self.ffn + self.sparse_layers * self.shared_ffn

    @property
    def active_ffn(self) -> int:
        """Width of the FFNs that one token passes, all layers together."""
        return self.common_ffn + self.sparse_layers * self.active_experts * self.expert_ffn

    @property
    def expert_shape(self) -> tuple[int, int, int, int]:
        """Hidden size, width, experts of a token and experts: the key of an operator table."""
        return self.hidden, self.expert_ffn, self.active_experts, self.experts

    @property
    def beyond_tables(self) -> str:
        """The reason why no profile is composed of operator tables; empty where one is."""
        return "latent attention, whose operator tables are not read" if self.latent_rank else ""

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but those of the other experts."""
        idle = self.sparse_layers * (self.experts - self.active_experts)
        return self.parameters - idle * self.expert_parameters

    @property
    def hash(self) -> str:
        """12 hex digits over the fields that change the cost.

        Optional fields at their default are left out, so that a new field does not change the
        hash of existing profiles.
        """
        fields = self.to_dict()
        del fields["name"]
        if self.experts and not self.dense_layers:
            del fields["ffn"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def query_parameters(self) -> int:
        """Weights of one layer's query projection."""
        if self.query_rank:
            return self.query_rank * (self.hidden + self.query_width)
        return self.hidden * self.query_width

    @property
    def key_value_parameters(self) -> int:
        """Weights of one layer's key and value projections."""
        if self.latent_rank:
            made = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
            return self.hidden * self.cached_width + self.latent_rank * made
        return 2 * self.hidden * self.kv_width

    @property
    def output_parameters(self) -> int:
        """Weights of one layer's output projection."""
        return self.hidden * self.heads * (self.value_dim or self.head_dim)

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's four projections, without biases and norms."""
        return self.query_parameters + self.key_value_parameters + self.output_parameters

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert, or of the FFN where there are no experts; without biases."""
        width = self.expert_ffn if self.experts else self.ffn
        return self.ffn_matrices * self.hidden * width

    @property
    def common_ffn_parameters(self) -> int:
        """Weights of the FFNs that every token passes, all layers; without biases."""
        return self.ffn_matrices * self.hidden * self.common_ffn

    @property
    def small_parameters(self) -> int:
        """Biases, norms, sinks and routers of all layers."""
        count = self.layer_norms * self.hidden * (2 if self.norm_bias else 1)
        count += 2 * self.head_dim if self.qk_norm else 0
        count += self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        count += self.hidden if self.output_bias else 0
        count += self.heads if self.sinks else 0
        count += self.query_rank + self.latent_rank
        router = self.experts * (self.hidden + self.router_bias)
        return self.layers * count + self.sparse_layers * router + self._ffn_biases

    @property
    def _ffn_biases(self) -> int:
        if not self.ffn_bias:
            return 0
        inner = self.ffn_matrices - 1
        dense = (self.layers - self.sparse_layers) * (inner * self.ffn + self.hidden)
        return dense + self.sparse_layers * self.experts * (inner * self.expert_ffn + self.hidden)

    @property
    def final_norm_parameters(self) -> int:
        """Weights (and biases) of the norm before the LM head."""
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        experts = self.sparse_layers * self.experts * self.expert_parameters
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = self.layers * self.attention_parameters + self.small_parameters
        return (
            layers + experts + self.common_ffn_parameters + embeddings + self.final_norm_parameters
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; optional ones only where they differ from the default."""
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                fields[field.name] = value
        return fields

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
        """Read a Hugging Face config: an object with `to_dict`, or the mapping in config.json.

        approximate  read a kind whose cost is not known by the usual names of its sizes
        Raises InputError naming the field that is missing or the kind that is not supported.
        """
        if approximate and not is_known_kind(config):
            return cls(**usual_fields(config, name))
        return cls(**architecture_fields(config, name))


def _check_int(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise InputError(
            f"{field} must be a whole number from {least} to {MOST} (is {shown(value)})"
        )
