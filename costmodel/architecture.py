"""The target model as the numbers that decide what a forward costs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from costmodel.errors import InputError

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
_COUNTS = ("experts", "active_experts", "expert_ffn")
_FLAGS = (
    "tied",
    "gated_ffn",
    "qk_norm",
    "qkv_bias",
    "output_bias",
    "ffn_bias",
    "norm_bias",
    "parallel_residual",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """Sizes of a decoder-only transformer.

    `name` is a label and not part of the hash: a fine-tune or a local folder has the same
    hash as its base. Weights, tokenizer, rope parameters and norm epsilons cost nothing and
    are left out. `ffn` of a mixture of experts is unused (every layer is sparse) and also
    not hashed. `sliding_window` is None where attention sees the whole context.
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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError("name must be a non-empty text")
        for field in _SIZES:
            _check_int(field, getattr(self, field), 1)
        for field in _COUNTS:
            _check_int(field, getattr(self, field), 0)
        for field in _FLAGS:
            if not isinstance(getattr(self, field), bool):
                raise InputError(f"{field} must be true or false")
        if self.sliding_window is not None:
            _check_int("sliding_window", self.sliding_window, 1)
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        self._check_experts()

    def _check_experts(self) -> None:
        given = [field for field in _COUNTS if getattr(self, field)]
        if given and len(given) < len(_COUNTS):
            raise InputError("experts, active_experts and expert_ffn must be given together")
        if self.active_experts > self.experts:
            raise InputError(
                f"active_experts ({self.active_experts}) must not exceed experts ({self.experts})"
            )

    @property
    def query_width(self) -> int:
        """h_q = heads x head_dim (paper, table 2)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """h_kv = kv_heads x head_dim (paper, table 2)."""
        return self.kv_heads * self.head_dim

    @property
    def ffn_matrices(self) -> int:
        """Weight matrices of one FFN: gate, up and down, or up and down."""
        return 3 if self.gated_ffn else 2

    @property
    def hash(self) -> str:
        """12 hex digits over the fields that cost something.

        Optional fields at their default are left out, so that a later version can add one
        without changing the hash of every profile that exists.
        """
        fields = self.to_dict()
        del fields["name"]
        if self.experts:
            del fields["ffn"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's four projections, without biases and norms."""
        return 2 * self.hidden * (self.query_width + self.kv_width)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert, or of the FFN where there are no experts; without biases."""
        width = self.expert_ffn if self.experts else self.ffn
        return self.ffn_matrices * self.hidden * width

    @property
    def small_parameters(self) -> int:
        """Biases, norms and router of one layer."""
        count = 2 * self.hidden * (2 if self.norm_bias else 1)
        count += 2 * self.head_dim if self.qk_norm else 0
        count += self.query_width + 2 * self.kv_width if self.qkv_bias else 0
        count += self.hidden if self.output_bias else 0
        count += self.experts * self.hidden
        if self.ffn_bias:
            count += (self.ffn_matrices - 1) * self.ffn + self.hidden
        return count

    @property
    def final_norm_parameters(self) -> int:
        """Weights (and biases) of the norm before the LM head."""
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        layer = self.attention_parameters + self.small_parameters
        layer += self.expert_parameters * max(self.experts, 1)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.final_norm_parameters

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
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(str(key) for key in fields if key not in known)
        if unknown:
            raise InputError(f"unknown architecture field '{unknown[0]}'")
        for name, field in known.items():
            if field.default is dataclasses.MISSING and name not in fields:
                raise InputError(f"the architecture field '{name}' is missing")
        return cls(**{str(key): value for key, value in fields.items()})

    @classmethod
    def from_hf_config(cls, config: Any, name: str | None = None) -> ModelArchitecture:
        """Read a Hugging Face config: an object with `to_dict`, or the mapping in config.json.

        Raises InputError naming the field that is missing or the kind that is not supported.
        """
        from costmodel.hf_config import architecture_fields

        return cls(**architecture_fields(config, name))


def _check_int(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{field} must be a whole number of at least {least} (is {value!r})")
