"""Reading and writing a drafter's checkpoint folder: config.json and its tensors.

Only safetensors are read, and pickled weights of formats that are published in no other form;
nothing that a file contains is executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save

from costmodel.errors import InputError, reason_of
from costmodel.io import folder_of, read_json, write_atomic
from decoder.drafters.blocks import ROPE_FIELDS, DraftShape
from decoder.model.loading import hub_copy
from decoder.model.target import Target
from decoder.names import is_path

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
TOKENS = "draft_tokens.json"  # of a reduced head (decoder/drafters/vocabulary.py)
FILES = (CONFIG, INDEX, TOKENS, "*.safetensors", PICKLED)
LARGEST = 1 << 22  # of a field: far larger vocabularies and layers are damage
MOST_PADDING = 1024  # rows that one of two models of a tokenizer may have more
MOST_LAYERS, MOST_BLOCK = 1000, 10_000
LISTED = 6  # names in an error before the rest are only counted
Shape = tuple[int, ...]
Model = TypeVar("Model")


def checkpoint_folder(name: str | Path) -> Path:
    """The folder of this name, or the local copy of this hub id, downloaded if needed."""

    def complete(copy: Path) -> bool:  # the config alone may have been fetched
        return any(copy.glob("*.safetensors")) or (copy / PICKLED).is_file()

    return _folder(name, FILES, complete)


def _folder(name: str | Path, files: Sequence[str], complete: Callable[[Path], bool]) -> Path:
    """The folder of this name, or a copy of these files of a hub id. Raises InputError."""
    folder = folder_of(name)
    if folder is None:
        if isinstance(name, Path) or is_path(name):
            raise InputError(f"there is no folder {name}", hint="Check the path of the drafter.")
        folder = hub_copy(name, files, complete)
        assert folder is not None  # it was downloaded
    return folder


def stored_model(
    source: str | Path | Model,
    target: Target,
    load: Callable[[Path, Mapping[str, Any], torch.Tensor], Model],
) -> Model:
    """The model of a folder or hub id, on the target's device and in its dtype, or the given one.

    load  reads it from the folder, its config.json and a tensor of that device and dtype
    """
    if not isinstance(source, (str, Path)):
        return source
    folder = checkpoint_folder(source)
    like = torch.empty(0, dtype=target.dtype, device=target.device)
    return load(folder, read_config(folder), like)


def find_config(name: str | Path) -> dict[str, Any]:
    """config.json in the folder of this name, or of this hub id, downloaded alone."""
    return read_config(_folder(name, (CONFIG,), lambda copy: (copy / CONFIG).is_file()))


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json. Raises InputError if it is missing or damaged."""
    path = folder / CONFIG
    if not path.exists():
        raise InputError(
            f"{folder} holds no {CONFIG}", hint="Give the folder of a drafter's checkpoint."
        )
    config = read_json(path, hint="Fetch or copy it again.")
    if not isinstance(config, dict):
        raise InputError(f"{path} does not hold a mapping of fields")
    return config


def architectures(published: Mapping[str, Any]) -> list[Any]:
    """The class names in a config.json; empty where it names none."""
    names = published.get("architectures")
    return names if isinstance(names, list) else []


class Fields(dict[str, Any]):
    """The fields of a config, checked as they are read; `where` names the file in errors."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values)
        self.where = where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; the default where it is missing or None."""
        self._read.add(name)
        value = super().get(name)
        return default if value is None else value

    def whole(
        self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST
    ) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            above = "" if most == LARGEST else f" and at most {most}"
            raise self.wrong(name, f"a whole number of at least {least}{above}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def one_flag(self, names: Sequence[str], default: Any) -> Any:
        """The value of several names for one flag. Raises InputError where they differ."""
        given = {name: self.flag(name, False) for name in names if self.get(name) is not None}
        if len(set(given.values())) > 1:
            both = " and ".join(f"{name} = {value}" for name, value in given.items())
            raise InputError(f"{self.where} has {both}", hint="They are names of one property.")
        return next(iter(given.values()), default)

    def refuse_unread(self, harmless: Set[str], neutral: Mapping[str, Any]) -> None:
        """Raise InputError for an unread field that may change a result; neutral values do not."""
        for name, value in self.items():
            read = name in self._read or name in harmless or value is None
            if not read and not (name in neutral and neutral[name] == value):
                raise InputError(
                    f"{self.where} has {name} = {value!r}, which is not supported",
                    hint="It may be of a variant that computes something else; if it is not, "
                    "remove this field.",
                )

    def require(self, expected: Mapping[str, Any]) -> None:
        for name, supported in expected.items():
            value = self.get(name)
            if value is not None and value != supported:
                raise InputError(
                    f"{self.where} has {name} = {value!r}, which is not supported",
                    hint="This variant of the drafter computes something else.",
                )

    def wrong(self, name: str, wanted: str) -> InputError:
        """The error of a field that is missing or not what is wanted."""
        value = self.get(name)
        actual = "is missing" if value is None else f"is {value!r}"
        return InputError(f"{self.where}: '{name}' must be {wanted} and {actual}")


def read_shape(fields: Fields, *, head_dim: int | None, bias: bool) -> DraftShape:
    """The layer sizes in a config; `head_dim` is its default (None: hidden / heads)."""
    fields.require({"hidden_act": "silu"})
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = fields.whole("head_dim", head_dim or max(hidden // heads, 1))
    if heads * head_dim > LARGEST:
        raise fields.wrong("head_dim", f"at most {LARGEST // heads} with {heads} heads")
    rope = {name: fields[name] for name in ROPE_FIELDS if fields.get(name)}
    return DraftShape(
        hidden=hidden,
        ffn=fields.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        bias=bias,
        rope=rope,
    )


def is_padded(drafted: int | None, actual: int) -> bool:
    """Whether a target's vocabulary is a drafter's with more rows of padding."""
    return drafted is not None and 0 <= actual - drafted <= MOST_PADDING


def refuse_misfit(
    target: Target, fields: Mapping[str, tuple[int | None, int]], problems: Sequence[str]
) -> None:
    """Raise InputError for problems, and where a drafter's field (None: any) differs."""
    problems = [
        f"its {name} is {drafted}, the target's is {actual}"
        for name, (drafted, actual) in fields.items()
        if drafted is not None and drafted != actual
    ] + list(problems)
    if problems:
        raise InputError(
            f"the drafter does not fit {target.loaded.name}: {'; '.join(problems)}",
            hint="Use the drafter that was trained for this target.",
        )


class Weights:
    """The tensors of a checkpoint: their shapes first, their values when `read` asks."""

    def __init__(self, folder: Path, *, pickled: bool = False) -> None:
        """pickled: whether pytorch_model.bin may take the place of safetensors"""
        self.folder = folder
        self._files: dict[str, tuple[Path, Any]] = {}  # the file of each tensor, and it opened
        self._loaded: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, Shape] = {}
        for path in _weight_files(folder, pickled):
            with _reading(path):
                if path.name == PICKLED:
                    self._loaded = torch.load(path, map_location="cpu", weights_only=True)
                    continue
                stored = safe_open(path, framework="pt")
                for name in stored.keys():  # noqa: SIM118 - not a mapping
                    self._files[name] = path, stored
                    self.shapes[name] = tuple(stored.get_slice(name).get_shape())
        loaded = self._loaded.values() if isinstance(self._loaded, dict) else [None]
        if not all(isinstance(tensor, torch.Tensor) for tensor in loaded):
            raise InputError(f"{folder / PICKLED} does not hold tensors by name")
        self.shapes |= {name: tuple(tensor.shape) for name, tensor in self._loaded.items()}

    def check(self, expected: Mapping[str, Shape], optional: frozenset[str] = frozenset()) -> None:
        """Raise one InputError that lists every missing, unknown or wrongly shaped tensor."""
        stored = {
            name: shape
            for name, shape in self.shapes.items()
            if not name.endswith("rotary_emb.inv_freq")  # of old checkpoints: follows from config
        }
        missing = [name for name in expected if name not in stored and name not in optional]
        unknown = [name for name in stored if name not in expected]
        wrong = [
            f"{name} {list(stored[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in stored and stored[name] != shape
        ]
        found = {"missing": missing, "not known": unknown, "of a wrong shape": wrong}
        parts = [f"{len(some)} {what} ({_some(some)})" for what, some in found.items() if some]
        if parts:
            raise InputError(
                f"the tensors in {self.folder} are not those of its {CONFIG}: {'; '.join(parts)}",
                hint="The checkpoint is incomplete, or of another kind of drafter.",
            )

    def read(self, names: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of these names, as far as they are stored, on the device."""
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            if name in self._loaded:
                tensors[name] = self._loaded[name].to(device)
            elif name in self._files:
                path, stored = self._files[name]
                with _reading(path):
                    tensors[name] = stored.get_tensor(name).to(device)
        return tensors

    def rows(self, name: str, rows: Iterable[int]) -> torch.Tensor:
        """Some rows of a stored tensor [..., width]."""
        path, stored = self._files[name]
        with _reading(path):
            part = stored.get_slice(name)
            return torch.cat([part[int(row) : int(row) + 1] for row in rows])


def token_ids(offsets: torch.Tensor) -> torch.Tensor:
    """The token of each draft id, int64 [draft_vocab], from the offsets that are stored as d2t."""
    return offsets + torch.arange(len(offsets), device=offsets.device)


def checked_ids(offsets: torch.Tensor, vocab: int, where: str) -> torch.Tensor:
    """`token_ids`. Raises InputError for tokens outside the vocabulary of the config `where`."""
    if offsets.is_floating_point():
        raise InputError(f"d2t beside {where} must hold whole numbers and is {offsets.dtype}")
    ids = token_ids(offsets)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise InputError(
            f"d2t beside {where} maps draft ids to tokens outside the vocabulary of {vocab}",
            hint="The checkpoint is damaged, or its vocab_size is wrong.",
        )
    return ids


def load_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Fill a model without storage (device `meta`); floating tensors are cast to `dtype`."""
    cast = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    model.load_state_dict(cast, assign=True)
    model.eval().requires_grad_(False)


def save_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write config.json and model.safetensors, and the folder if needed. Raises InputError."""
    write_atomic(folder / CONFIG, json.dumps(dict(config), indent=2) + "\n", InputError)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # The errors of `save_file` do not tell a full disk from another fault.
    write_atomic(folder / WEIGHTS, save(stored, metadata={"format": "pt"}), InputError)


def _weight_files(folder: Path, pickled: bool) -> list[Path]:
    """The files that the index names, model.safetensors, or the pickled file. Raises InputError."""
    bare = folder / PICKLED
    if not (folder / INDEX).is_file():
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        if not bare.is_file():
            raise InputError(f"{folder} holds no {WEIGHTS}", hint="Copy the whole checkpoint.")
        if not pickled:
            raise InputError(
                f"{folder} holds its weights as {PICKLED}, and only safetensors are read",
                hint="Convert it to model.safetensors first.",
            )
        return [bare]
    index = read_json(folder / INDEX, hint="Copy it again.")
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise InputError(f"{folder / INDEX} does not name the files", hint="Copy it again.")
    paths = [folder / name for name in sorted(set(files.values()))]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise InputError(
            f"{folder} lacks {_some(absent)}, which its index names",
            hint="Copy the whole checkpoint.",
        )
    return paths


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch's reader fails in many ways
        raise InputError(
            f"cannot read the weights in {path}: {reason_of(error)}",
            hint="The file is damaged or was copied in part; fetch it again.",
        ) from error


def _some(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
