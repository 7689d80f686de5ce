"""A model's config by transformers' own class, with every default filled in, and its sizes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError, shown
from costmodel.hf_config import SAME

# Errors of transformers for a folder with damaged, missing or contradictory files.
BROKEN_FILES = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)


def read_model(
    fields: Mapping[str, Any], name: str, *, approximate: bool = False
) -> tuple[PreTrainedConfig, ModelArchitecture]:
    """The config of a config.json's fields, and the sizes of its text part.

    approximate  read a kind whose parts are not all counted by the usual names of its sizes
    Raises InputError.
    """
    config = config_of(fields)
    return config, ModelArchitecture.from_hf_config(config, name, approximate=approximate)


def config_of(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The config that transformers makes of a config.json's fields.

    Raises InputError for a kind that it does not know, and for fields that it refuses.
    """
    if not isinstance(fields, Mapping):
        raise InputError("a model's config must be a mapping of field names to values")
    kind = fields.get("model_type")
    if kind is None:
        raise InputError(
            "the target's config has no field 'model_type'",
            hint="Check that the folder's config.json is a Hugging Face model config",
        )
    known = SAME.get(kind, kind) if isinstance(kind, str) and kind not in CONFIG_MAPPING else kind
    if known == "mistral" and "layer_types" in fields:
        known = "ministral"  # as AutoConfig takes it
    if not isinstance(known, str) or known not in CONFIG_MAPPING:
        raise InputError(
            f"the model kind {shown(kind)} is not known to transformers {transformers.__version__}",
            hint="Name a kind that transformers has, or install a newer transformers",
        )
    try:
        with quiet():
            own = copy.deepcopy({**fields, "model_type": known})
            config: PreTrainedConfig = CONFIG_MAPPING[known].from_dict(own)
            return config
    except BROKEN_FILES as error:
        raise InputError(
            f"transformers cannot read the config of this {known}: {first_reason(error)}",
            hint="Correct its config.json; a field has a wrong type or contradicts another.",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars, notices and warnings of transformers."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def first_reason(error: BaseException) -> str:
    """An error's first line, or its first two where the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
