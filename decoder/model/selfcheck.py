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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers

from costmodel.errors import InputError, RooftreeError, reason_of
from costmodel.io import read_json, tool_version, write_atomic
from costmodel.profile.store import user_directory
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
    with _changed(changes):
        smaller = structure
        if structure.window is not None:
            smaller = read_structure(model)
            if smaller.window is None or smaller.window > PROMPT_ROWS:
                raise UnsupportedModelError("its window cannot be made smaller to try it")
            step.masks = read_masks(model)
        return _compared(step, structure, smaller)


@contextmanager
def _changed(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of objects have these values inside."""
    before = [(one, name, getattr(one, name)) for one, name, _ in changes]
    try:
        for one, name, value in changes:
            setattr(one, name, value)
        yield
    finally:
        for one, name, value in before:
            setattr(one, name, value)


def _compared(step: ModelStep, structure: Structure, smaller: Structure) -> tuple[Structure, bool]:
    """See `_try`; the forwards have the windows of `smaller`."""
    generator = torch.Generator().manual_seed(0)
    rows = len(PARENTS) + 1
    tokens = torch.randint(0, step.vocab, (PROMPT_ROWS + ROUNDS * rows + 1,), generator=generator)
    prompt, *trees, last = tokens.split((PROMPT_ROWS, *[rows] * ROUNDS, 1))
    text, wanted = prompt, [_own_logits(step, prompt)[-1:]]
    for tree in trees:
        paths = [_own_logits(step, torch.cat((text, tree[branch]))) for branch in BRANCHES]
        wanted += [path[len(text) :] for path in paths]
        text = torch.cat((text, tree[BRANCHES[1]]))
    wanted.append(_own_logits(step, torch.cat((text, last)))[-1:])
    theirs = torch.cat(wanted)
    if not bool(theirs.isfinite().all()):
        return replace(structure, plain_head=False), False  # decoding names the position
    hidden = _tree_hidden(step, smaller, (prompt, *trees, last))
    # Whether logits are the head's output bit by bit, also where they are large. A width that is
    # not the head's is that of a layer before it.
    step.plain_head = False
    large = hidden * (LARGE_LOGIT / step.logits(hidden).abs().max().clamp_min(1e-6))
    if hidden.shape[-1] == getattr(step.head, "in_features", hidden.shape[-1]):
        step.plain_head = torch.equal(step.logits(large), step.head(large))
    rounded = step.dtype not in BOUNDS or rounds_inputs(step.model.config)
    distance = _distance(step.logits(hidden), theirs, rounded)
    dtype = torch.float32 if structure.states else step.dtype  # states are in float32 always
    if not distance <= (ROUNDED_BOUND if rounded else BOUNDS[dtype]):
        raise UnsupportedModelError(
            f"the logits of a tree differ from transformers' own by {min(distance, 9.99):.1%}"
        )
    return replace(structure, plain_head=step.plain_head), True


def _own_logits(step: ModelStep, ids: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocab] by transformers' own attention."""
    with attention_of(step.model, "eager"):
        output = step.model(input_ids=ids[None].to(step.device), use_cache=False)
    return output.logits[0]


def _tree_hidden(
    step: ModelStep, structure: Structure, texts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Hidden states of the prompt's last row, the rows of the trees' branches, the last token."""
    prompt, *trees, last = texts
    runtime = EagerRuntime(step, structure)
    cache = KVCache(
        structure, capacity=2 * TOKENS, sequences=1, dtype=step.dtype, device=step.device
    )
    depths, visible = np.array([0, 1, 1, 2, 2, 3, 3]), visibility(PARENTS)
    branches = [*BRANCHES[0], *BRANCHES[1]]
    parts = []
    for ids, offsets, seen, rows, wanted in (
        (prompt, np.arange(PROMPT_ROWS), None, range(PROMPT_ROWS), [-1]),
        *((tree, depths, visible, BRANCHES[1], branches) for tree in trees),
        (last, np.zeros(1, dtype=np.int64), None, range(1), [0]),
    ):
        hidden, _ = runtime.hidden(cache, [RowBlock(0, ids.numpy(), offsets, seen)])
        parts.append(hidden[wanted])
        cache.commit(rows)
    return torch.cat(parts)


def _distance(ours: torch.Tensor, theirs: torch.Tensor, rounded: bool) -> float:
    """The relative distance of logits [rows, vocab]: the worst row's, or with roundings the median.

    A router that sees rounded numbers may choose another expert for a row.
    """
    accurate = torch.promote_types(theirs.dtype, torch.float32)
    ours, theirs = ours.to(accurate), theirs.to(accurate)
    spread = (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-12)
    distances = ((ours - theirs).norm(dim=-1) / spread).nan_to_num(torch.inf)
    return float(distances.median() if rounded else distances.max())


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
    try:
        stored = read_json(_path(key))
        fields = dict(stored["structure"])
        if stored["checksum"] != _checksum(key, fields):
            return None
        for name in ("stores", "states"):
            fields[name] = tuple(tuple(entry) for entry in fields[name])
        return Structure(**fields)
    except (RooftreeError, TypeError, ValueError, LookupError):
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
