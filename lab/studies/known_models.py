"""Every causal LM of the installed transformers: planned with the sizes of its model, or refused.

    python -m lab.studies.known_models [--only llama gemma2]

Of each kind's default config the parameters that a plan reads are held to the model that
transformers builds (text part and LM head). A tiny model of the kind (see `families`) is traced:
the values in its caches and its shortest window are held to those read. Then each key of the tiny
config is left out in turn, as published configs do: what is still read is held to the model of the
class's default.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from decoder.configs import config_of, first_reason, read_model, text_of
from decoder.model.latents import follow_latents
from decoder.model.structure import read_structure
from lab.studies.common import environment, store
from lab.studies.families import SIZES, kinds, tiny_model

MOST_OFF = 1e-3  # of the parameters
# Buffers that a router adds to its scores, which checkpoints store: counted as parameters.
ROUTERS = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a kind is read: `accepted`, `refused`, `wrong` or `not made`.

    parameters  of the default config's model; `off`: the largest error of any reading, over them
    traced      whether caches and windows could be compared
    left_out    keys that were left out in turn; `refused_keys`: of them those refused by name
    """

    kind: str
    result: str
    reason: str = ""
    parameters: int = 0
    off: float = 0.0
    traced: bool = False
    left_out: int = 0
    refused_keys: tuple[str, ...] = ()


def built_parameters(config: Any) -> int:
    """Parameters of the text part and LM head of the model that transformers builds."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    parts = [text_of(model), model.get_output_embeddings()]
    own = {id(p): p.numel() for part in parts if part is not None for p in part.parameters()}
    return sum(own.values()) + sum(
        bias.numel() for name, bias in parts[0].named_buffers() if name.endswith(ROUTERS)
    )


def read_kind(kind: str) -> Reading:
    """How one kind is read; never raises for what its model does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(kind)
        except Exception as error:
            return Reading(kind=kind, result="not made", reason=first_reason(error)[:200])
        fields, of = model.config.to_dict(), {"model_type": kind}
        try:
            built_parameters(config_of(of))
        except Exception:  # transformers cannot build what its own defaults say
            of = fields
        try:
            built, sizes = built_parameters(config_of(of)), read_model(of, kind)[1]
        except InputError as error:
            return Reading(kind=kind, result="refused", reason=error.problem)
        except Exception as error:
            return Reading(kind=kind, result="not made", reason=first_reason(error)[:200])
        errors = {"nothing": abs(sizes.parameters - built) / built}
        wrong, traced = _untraced(model, read_model(fields, kind, approximate=True)[1])
        keys, refused = [key for key in SIZES if key in fields], []
        for key in keys:
            try:
                rest = {name: fields[name] for name in fields if name != key}
                errors[key] = _off(rest)
            except InputError:
                refused.append(key)
        worst = max(errors, key=lambda key: errors[key])
        if errors[worst] > MOST_OFF and not wrong:
            wrong = f"the parameters are {errors[worst]:.2%} off, without {worst}"
    return Reading(
        kind=kind,
        result="wrong" if wrong else "accepted",
        reason=wrong,
        parameters=built,
        off=errors[worst],
        traced=traced,
        left_out=len(keys),
        refused_keys=tuple(refused),
    )


def _off(fields: Mapping[str, Any]) -> float:
    """The error of the parameters read, over those built; 0 where transformers builds nothing."""
    sizes = read_model(fields, "model")[1]
    try:
        built = built_parameters(config_of(fields))
    except Exception:
        return 0.0
    return abs(sizes.parameters - built) / built


def _untraced(model: Any, sizes: ModelArchitecture) -> tuple[str, bool]:
    """Where the trace of a model differs from its sizes, and whether there is one."""
    try:
        follow_latents(model)
        traced = read_structure(model)
    except Exception:
        return "", False
    if traced.latent == bool(sizes.latent_rank) and traced.token_values != sizes.token_values:
        return f"{sizes.token_values} values of a token, traced {traced.token_values}", True
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["sliding"]
    # Of a model without windows transformers may make a mask that no layer takes.
    if not sizes.chunked and traced.window is not None and "sliding" in str(types):
        # Some masks let a row see itself and `window` tokens before it.
        least = sizes.sliding_window or 0
        if traced.window not in (least, least + 1, least - 1):
            return f"a window of {sizes.sliding_window}, traced {traced.window}", True
    if traced.window is None and sizes.sliding_window:
        return f"a window of {sizes.sliding_window}, traced none", True
    return "", True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="kinds; the result is then not stored")
    only = parser.parse_args().only
    transformers.logging.set_verbosity_error()
    readings = []
    for kind in only or kinds():
        one = read_kind(kind)
        readings.append(one)
        print(f"{kind:28} {one.result:9} {one.off:.4%} {one.reason}", flush=True)
    counts = dict(Counter(one.result for one in readings))
    print(counts)
    if not only:
        result = {"environment": environment(), "counts": counts}
        store("known_models", result | {"kinds": [asdict(one) for one in readings]})


if __name__ == "__main__":
    main()
