"""Every causal LM of the installed transformers: exact under draft trees, or refused with a reason.

    python -m lab.studies.families [--sizes] [--only llama gemma2]

A tiny random model of each kind writes a text by transformers' own greedy decoding, and by this
decoder plainly and with trees, with a model of its own and with a borrowed one. The drafter knows
the text and hides it behind a wrong first candidate, so that every tree has accepted branches.
Each text is a chat of two turns, and trees come from the prompt as well. The model runs in
float64, and in float32 with its weights packed, as the decoder runs a CPU's.

`--sizes` reads the sizes of each kind instead. The parameters that a plan reads of the default
config are held to the model that transformers builds (text part and LM head). A tiny model is
traced: the values in its caches and its shortest window are held to those read. Then each key of
the tiny config is left out in turn, as published configs do: what is still read is held to the
model of the class's default.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from decoder.configs import config_of, first_reason, read_model, text_of
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.engine import TreeDecoder
from decoder.model.latents import follow_latents
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.model.structure import read_structure
from decoder.tree.draft_tree import Lattice
from lab.studies.common import environment, greedy, store
from lab.tiny_models import SIZES, VOCAB, tiny_model

PROMPT_TOKENS, NEW_TOKENS = 38, 26  # the prompt is longer than the windows of tiny models
# Whether the decoder may change the model (fused layers, or weights packed), and the policy.
WAYS = {
    torch.float64: ((False, "plain"), (False, "fixed:12"), (True, "plain"), (True, "beam:3x4")),
    torch.float32: ((True, "plain"), (True, "beam:3x4")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one kind of model.

    result  `exact`, `refused`, `wrong`, `raw` (an error that is none of rooftree's) or `not made`
    reason  of a refusal or an error
    """

    kind: str
    model: str
    result: str
    reason: str = ""


class HidingDrafter(Drafter, DraftSession):
    """Knows the text, and puts a wrong token before each right one."""

    name = "hiding"
    architecture_hash = "hiding"
    max_depth = 4

    def __init__(self, text: Sequence[int]) -> None:
        self._text = list(text)

    def start(self, *_: object) -> DraftSession:
        return self

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> Lattice:
        depth = min(request.depth, self.max_depth)
        rows = []
        for place in range(len(context), len(context) + depth):
            right = self._text[place] if place < len(self._text) else 0
            rows.append([(right + 1) % VOCAB, right, (right + 2) % VOCAB])
        return Lattice(np.array(rows, dtype=np.int64), np.tile([0.4, 0.35, 0.2], (depth, 1)))


def kinds() -> list[str]:
    """The kinds of config that have a causal LM."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def try_kind(kind: str) -> Outcome:
    """What becomes of one kind; never raises for what its model does."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(kind)
            prompt = np.random.default_rng(0).integers(1, VOCAB, PROMPT_TOKENS).tolist()
            greedy(model, prompt, NEW_TOKENS, pad_token_id=0)
        except Exception as error:
            return Outcome(kind=kind, model=name, result="not made", reason=_line(error))
        try:
            result, reason = _compare(model, prompt)
        except Exception as error:
            result, reason = "raw", _line(error)
    return Outcome(kind=kind, model=name, result=result, reason=reason)


def _compare(model: Any, prompt: list[int]) -> tuple[str, str]:
    try:
        wrong = _differing(model, prompt, NEW_TOKENS)
    except InputError as error:
        reason = error.problem.partition("cannot be decoded by trees: ")[2]
        return "refused", reason or error.problem
    return ("wrong", wrong) if wrong else ("exact", "")


def _differing(model: Any, prompt: list[int], count: int) -> str:
    """The first way of decoding whose text is not the greedy one; empty if there is none."""
    double = model.dtype == torch.float64
    by_dtype = WAYS if double else {torch.float32: WAYS[torch.float64]}
    for dtype, ways in by_dtype.items():
        typed = copy.deepcopy(model).to(dtype)
        truth = greedy(typed, prompt, count, pad_token_id=0)
        turns, second = [(prompt, truth)], [*prompt, *truth, *prompt[:3]]
        for owned, policy in ways:
            own = copy.deepcopy(typed) if owned else typed
            target = make_target(borrow_model(own), owned=owned)
            if len(turns) == 1:  # a model that is not refused
                turns.append((second, greedy(typed, second, count // 3, pad_token_id=0)))
            hiding = HidingDrafter([*second, *turns[1][1]])
            for drafter in (hiding,) if policy == "plain" else (hiding, "ngram"):
                decoder = TreeDecoder(target, drafter=drafter, policy=policy)
                for turn, (start, wanted) in enumerate(turns, 1):
                    text = decoder.generate(start, max_new_tokens=len(wanted)).token_ids
                    if text != wanted:
                        owner = f"{'own' if owned else 'borrowed'} model"
                        return f"{policy}, {owner}, {target.runtime.kind} runtime, turn {turn}"
    return ""


def _line(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text}"[:200]


def document_table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table of kinds by result and reason."""
    order = ("exact", "refused", "not made", "wrong", "raw")
    groups: dict[tuple[int, str], list[str]] = {}
    for one in outcomes:
        reason = re.sub(r"[0-9.]+%", "a share", one.reason)
        reason = re.sub(r"^\d+ of its \d+ layers", "only some of its layers", reason)
        label = f"refused: {reason}" if one.result == "refused" else one.result
        groups.setdefault((order.index(one.result), label), []).append(one.kind)
    lines = ["| result | kinds | number |", "|---|---|---|"]
    for (_, label), names in sorted(groups.items()):
        text = label.replace("|", "/").replace("<", "&lt;")
        lines.append(f"| {text} | {', '.join(names)} | {len(names)} |")
    return "\n".join(lines)


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
        kind=kind, result="wrong" if wrong else "accepted", reason=wrong, parameters=built,
        off=errors[worst], traced=traced, left_out=len(keys), refused_keys=tuple(refused),
    )  # fmt: skip


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
    parser.add_argument("--sizes", action="store_true", help="that plans read, in place of texts")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows: list[Outcome | Reading] = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["ROOFTREE_HOME"] = home  # nothing is known from before
        for kind in options.only or kinds():
            one = read_kind(kind) if options.sizes else try_kind(kind)
            rows.append(one)
            off = f" {one.off:.4%}" if isinstance(one, Reading) else ""
            print(f"{kind:28} {one.result:9}{off} {one.reason}", flush=True)
    counts = dict(Counter(one.result for one in rows))
    print(counts)
    if not options.only:
        name, key = ("known_models", "kinds") if options.sizes else ("families", "families")
        result = {"environment": environment(), "counts": counts}
        store(name, result | {key: [asdict(one) for one in rows]})


if __name__ == "__main__":
    main()
