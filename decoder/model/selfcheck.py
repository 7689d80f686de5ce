"""A check at load that a model verifies draft trees as transformers decodes.

A prompt, two trees of two branches and a step behind them run through the runtime and through
the model's own forward, and the logits must agree. Windows are made smaller for it, so that the
trees lie beyond them. What passes is kept in
`$ROOFTREE_HOME/structures` by a hash of config, classes and versions, and not tried again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from pydantic import TypeAdapter
from torch import Tensor

from costmodel.errors import InputError, RooftreeError, reason_of
from costmodel.io import read_json, tool_version, write_atomic
from costmodel.profile.store import user_directory
from costmodel.statistics import Bools, Ints
from decoder.configs import BROKEN_FILES
from decoder.model.attention import RowBlock, attention_of
from decoder.model.kv_cache import KVCache
from decoder.model.quantization import rounds_inputs
from decoder.model.runtime.eager import EagerRuntime, ModelStep
from decoder.model.runtime.fused import triton_version
from decoder.model.structure import (
    MaskFunction,
    Structure,
    UnsupportedModelError,
    read_masks,
    read_structure,
)
from decoder.nvml import DEVICE_ERRORS, failed_device
from decoder.tree.draft_tree import visibility

PROMPT_ROWS = 7
PARENTS = np.array([0, 0, 1, 2, 3, 4], dtype=np.int64)  # two branches of three nodes, interleaved
BRANCHES = ([0, 1, 3, 5], [0, 2, 4, 6])  # the rows of each, with the root
ROUNDS = 2
TOKENS = PROMPT_ROWS + ROUNDS * len(BRANCHES[0]) + 1  # the longest text of the check
WINDOW = 6  # of the check
WINDOWS = ("sliding_window", "attention_chunk_size")  # their names in configs
# Largest relative distance of the logits of one row; bfloat16 rounds each of many layers.
BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-3}
ROUNDED_BOUND = 0.2
LARGE_LOGIT = 300.0  # a cap or a scale shows there
NOTES = 3  # a number of what a structure says
IGNORED = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")

_one_at_a_time = Lock()  # a check makes the windows in a model's config smaller for its time
_checked: dict[str, Structure] = {}
_masks: WeakKeyDictionary[Any, tuple[MaskFunction | None, ...]] = WeakKeyDictionary()


def checked_structure(step: ModelStep, name: str) -> Structure:
    """The structure of the step's model, which is tried unless that was done before.

    Raises InputError with the reason where its draft trees are not exact.
    """
    with _one_at_a_time:
        key = _key(step)
        structure = _checked.get(key) or _read(key)
        exact = structure is not None
        if structure is None:
            try:
                structure, exact = _try(step)
            except DEVICE_ERRORS as error:
                raise failed_device(error, step.device) from error
            except UnsupportedModelError as error:
                raise _refused(name, step, error.problem) from error
            except BROKEN_FILES as error:
                reason = "its attention does not go through transformers' interface"
                if getattr(step.model, "_supports_attention_backend", True):
                    why = reason_of(error)
                    reason = f"its forward does not run with another attention function ({why})"
                raise _refused(name, step, reason) from error
            if exact:
                _keep(key, structure)
        if exact:
            _checked[key] = structure
        if structure.window is not None:
            if step.model not in _masks:
                _masks[step.model] = read_masks(step.model)
            step.masks = _masks[step.model]
    return structure


def _refused(name: str, step: ModelStep, reason: str) -> InputError:
    kind = getattr(step.model.config, "model_type", type(step.model).__name__)
    return InputError(
        f"{name} (of the kind '{kind}') cannot be decoded by trees: {reason}",
        hint="docs/families.md lists the kinds of models that can.",
    )


@torch.inference_mode()
def _try(step: ModelStep) -> tuple[Structure, bool]:
    """The structure, and whether its trees were found exact; NaN cannot be compared."""
    structure = read_structure(step.model)
    if step.positions < TOKENS:
        raise UnsupportedModelError(f"it sees {step.positions} tokens, too few to try it")
    # Windows that the check's text passes, and fewer keys for indexers to choose than it has.
    changes, model = [], step.model
    if structure.window is not None:
        configs = {id(c): c for c in (model.config, model.config.get_text_config())}
        changes = [
            (config, name, min(getattr(config, name), WINDOW))
            for config in configs.values()
            for name in WINDOWS
            if isinstance(getattr(config, name, None), int)
        ]
    changes += [(m, "index_topk", WINDOW) for m in model.modules() if hasattr(m, "index_topk")]
    before = [(one, name, getattr(one, name)) for one, name, _ in changes]
    try:
        for one, name, value in changes:
            setattr(one, name, value)
        smaller = structure
        if structure.window is not None:
            smaller = read_structure(model)
            if smaller.window is None or smaller.window > PROMPT_ROWS:
                raise UnsupportedModelError("its window cannot be made smaller to try it")
            step.masks = read_masks(model)
        return _compared(step, structure, smaller)
    finally:
        for one, name, value in before:
            setattr(one, name, value)


def _compared(step: ModelStep, structure: Structure, smaller: Structure) -> tuple[Structure, bool]:
    """See `_try`; the forwards have the windows of `smaller`."""
    runtime = EagerRuntime(step, smaller)
    where: Any = {"dtype": step.dtype, "device": step.device}
    cache = KVCache(smaller, capacity=2 * TOKENS, sequences=1, **where)
    hidden: list[Tensor] = []  # of the prompt's last row, the trees' branches, the last token
    theirs: list[Tensor] = []  # logits of the same rows

    def run(ids: Tensor, offsets: Ints, visible: Bools | None, rows: Any, kept: Any) -> None:
        states, _ = runtime.hidden(cache, [RowBlock(0, ids.numpy(), offsets, visible)])
        hidden.append(states[rows])
        cache.commit(kept)

    def run_theirs(ids: Tensor, rows: slice) -> None:
        """By transformers' own attention."""
        with attention_of(step.model, "eager"):
            output = step.model(input_ids=ids[None].to(step.device), use_cache=False)
        theirs.append(output.logits[0, rows])

    generator = torch.Generator().manual_seed(0)
    rows = len(PARENTS) + 1
    tokens = torch.randint(0, step.vocab, (PROMPT_ROWS + ROUNDS * rows + 1,), generator=generator)
    text, *trees, last = tokens.split((PROMPT_ROWS, *[rows] * ROUNDS, 1))
    run_theirs(text, slice(-1, None))
    run(text, np.arange(PROMPT_ROWS), None, [-1], range(PROMPT_ROWS))
    depths, visible = np.array([0, 1, 1, 2, 2, 3, 3]), visibility(PARENTS)
    for tree in trees:
        for branch in BRANCHES:
            run_theirs(torch.cat((text, tree[branch])), slice(len(text), None))
        run(tree, depths, visible, [*BRANCHES[0], *BRANCHES[1]], BRANCHES[1])
        text = torch.cat((text, tree[BRANCHES[1]]))
    run_theirs(torch.cat((text, last)), slice(-1, None))
    run(last, np.zeros(1, dtype=np.int64), None, [0], range(1))
    states, wanted = torch.cat(hidden), torch.cat(theirs)
    if not bool(wanted.isfinite().all()):
        return replace(structure, plain_head=False), False  # decoding names the position
    # Whether logits are the head's output bit by bit, also where they are large. A width that is
    # not the head's is that of a layer before it.
    step.plain_head = False
    large = states * (LARGE_LOGIT / step.logits(states).abs().max().clamp_min(1e-6))
    if states.shape[-1] == getattr(step.head, "in_features", states.shape[-1]):
        step.plain_head = torch.equal(step.logits(large), step.head(large))
    # The relative distance of the worst row, or with roundings the median: a router that sees
    # rounded numbers may choose another expert for a row.
    rounded = step.dtype not in BOUNDS or rounds_inputs(step.model.config)
    accurate = torch.promote_types(wanted.dtype, torch.float32)
    ours, wanted = step.logits(states).to(accurate), wanted.to(accurate)
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-12)
    distances = ((ours - wanted).norm(dim=-1) / spread).nan_to_num(torch.inf)
    distance = float(distances.median() if rounded else distances.max())
    dtype = torch.float32 if structure.states else step.dtype  # states are in float32 always
    if not distance <= (ROUNDED_BOUND if rounded else BOUNDS[dtype]):
        raise UnsupportedModelError(
            f"the logits of a tree differ from transformers' own by {min(distance, 9.99):.1%}"
        )
    return replace(structure, plain_head=step.plain_head), True


def _key(step: ModelStep) -> str:
    """A hash of everything that the result may depend on, but not of names and weights."""
    config = {k: v for k, v in step.model.config.to_dict().items() if k not in IGNORED}
    classes = Counter(f"{type(m).__module__}.{type(m).__qualname__}" for m in step.model.modules())
    versions = (tool_version(), torch.__version__, transformers.__version__)
    whole = [NOTES, ROUNDS, config, classes, versions, step.device.type, str(step.dtype)]
    if step.device.type == "cuda":  # other kernels run there
        whole += [torch.cuda.get_device_capability(step.device), triton_version()]
    text = json.dumps(whole, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _path(key: str) -> Path:
    return user_directory() / "structures" / f"{key}.json"


def _read(key: str) -> Structure | None:
    """The kept structure; None where there is none, or not as it was written."""
    with suppress(RooftreeError, TypeError, ValueError, LookupError):
        stored = read_json(_path(key))
        if stored["checksum"] == _checksum(key, stored["structure"]):
            return TypeAdapter(Structure).validate_python(stored["structure"])
    return None


def _keep(key: str, structure: Structure) -> None:
    """Keep what passed, for the next start; without a writable home it is tried again."""
    fields = asdict(structure)
    note = {"structure": fields, "checksum": _checksum(key, fields)}
    with suppress(OSError, RooftreeError):
        write_atomic(_path(key), json.dumps(note) + "\n")


def _checksum(key: str, fields: dict[str, Any]) -> str:
    """A damaged note would change texts: a cap or a window that is not seen any more."""
    return hashlib.sha256(f"{key} {json.dumps(fields, sort_keys=True)}".encode()).hexdigest()
