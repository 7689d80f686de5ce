"""Reading and writing a drafter's checkpoint folder: config.json and its tensors.

Weights are data: only safetensors are read, and pickled weights where a format is
published in no other form, without running anything that they contain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from costmodel.errors import InputError
from decoder.drafters.blocks import ROPE_FIELDS, DraftShape

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
TOKENS = "draft_tokens.json"  # those that a reduced head drafts (decoder/drafters/draft_head.py)
FILES = (CONFIG, INDEX, TOKENS, "*.safetensors", PICKLED)
LISTED = 6  # names in an error before the rest are only counted
Shape = tuple[int, ...]


def checkpoint_folder(name: str | Path) -> Path:
    """The folder of that name, or the local copy of that hub id, fetched where needed."""
    folder = _local(name)
    if folder is not None:
        return folder
    with _asking_the_hub(name):
        try:
            here = Path(snapshot_download(str(name), allow_patterns=FILES, local_files_only=True))
            # A config alone may have been fetched, to see what kind of drafter it is.
            if any(here.glob("*.safetensors")) or (here / PICKLED).is_file():
                return here
        except LocalEntryNotFoundError:
            pass
        return Path(snapshot_download(str(name), allow_patterns=FILES))


def find_config(name: str | Path) -> dict[str, Any]:
    """config.json in the folder of that name, or of that hub id, fetched alone."""
    folder = _local(name)
    if folder is None:
        with _asking_the_hub(name):
            folder = Path(hf_hub_download(str(name), CONFIG)).parent
    return read_config(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json holds. Raises InputError where there is none or it is damaged."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} holds no {CONFIG}", hint="Give the folder of a drafter's checkpoint."
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}", hint="Fetch or copy it again.") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} does not hold a mapping of fields")
    return config


@dataclass(frozen=True, slots=True)
class Fields:
    """Checked reading of a config's fields; `where` names the file in errors."""

    values: Mapping[str, Any]
    where: str

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, f"a whole number of at least {least}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._value(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def require(self, expected: Mapping[str, Any]) -> None:
        """Raise InputError where a field is there and asks for something else."""
        for name, value in expected.items():
            found = self.values.get(name)
            if found is not None and found != value:
                raise InputError(
                    f"{self.where} has {name} = {found!r}, which is not supported",
                    hint="This variant of the drafter computes something else.",
                )

    def wrong(self, name: str, wanted: str) -> InputError:
        value = self.values.get(name)
        found = "is missing" if value is None else f"is {value!r}"
        return InputError(f"{self.where}: '{name}' must be {wanted} and {found}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def read_shape(fields: Fields, *, head_dim: int | None, bias: bool) -> DraftShape:
    """The layer sizes in a config; `head_dim` where it names none (None: hidden / heads)."""
    fields.require({"hidden_act": "silu"})
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    rope = {name: fields.values[name] for name in ROPE_FIELDS if fields.values.get(name)}
    return DraftShape(
        hidden=hidden,
        ffn=fields.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.whole("head_dim", head_dim or hidden // heads),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        bias=bias,
        rope=rope,
    )


class Weights:
    """The tensors of a checkpoint, looked at before any is read."""

    def __init__(self, folder: Path, *, pickled: bool = False) -> None:
        """pickled: whether pytorch_model.bin will do where there are no safetensors."""
        self.folder = folder
        self._files: dict[str, Path] = {}  # file of each tensor
        self._loaded: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, Shape] = {}
        paths = _weight_files(folder)
        if paths:
            for path in paths:
                with _reading(path), safe_open(path, framework="pt") as stored:
                    for name in stored.keys():  # noqa: SIM118 - not a mapping
                        self._files[name] = path
                        self.shapes[name] = tuple(stored.get_slice(name).get_shape())
            return
        bare = folder / PICKLED
        if not bare.is_file():
            raise InputError(f"{folder} holds no {WEIGHTS}", hint="Copy the whole checkpoint.")
        if not pickled:
            raise InputError(
                f"{folder} holds its weights as {PICKLED}, and only safetensors are read",
                hint="Convert it to model.safetensors first.",
            )
        self._loaded = _unpickled(bare)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._loaded.items()}

    def check(self, expected: Mapping[str, Shape], optional: frozenset[str] = frozenset()) -> None:
        """Raise one InputError that lists all that is missing, too much or of a wrong shape."""
        found = {name: shape for name, shape in self.shapes.items() if not _derived(name)}
        missing = [name for name in expected if name not in found and name not in optional]
        unknown = [name for name in found if name not in expected]
        wrong = [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ]
        parts = [
            f"{len(names)} {what} ({_some(names)})"
            for what, names in (
                ("missing", missing),
                ("not known", unknown),
                ("of a wrong shape", wrong),
            )
            if names
        ]
        if parts:
            raise InputError(
                f"the tensors in {self.folder} are not those of its {CONFIG}: {'; '.join(parts)}",
                hint="The checkpoint is incomplete, or of another kind of drafter.",
            )

    def read(self, names: Mapping[str, Shape], device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of these names that there are, on the device."""
        wanted = [name for name in names if name in self.shapes]
        tensors = {name: self._loaded[name].to(device) for name in wanted if name in self._loaded}
        for path in sorted({self._files[name] for name in wanted if name in self._files}):
            with _reading(path), safe_open(path, framework="pt") as stored:
                for name in wanted:
                    if self._files[name] == path:
                        tensors[name] = stored.get_tensor(name).to(device)
        return tensors


def load_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Give a model that was built without storage these tensors, floating ones as `dtype`."""
    cast = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    model.load_state_dict(cast, assign=True)
    model.eval().requires_grad_(False)


def save_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write config.json and model.safetensors; the folder is made where there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dict(config), indent=2) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    except OSError as error:
        raise InputError(
            f"cannot write the drafter to {folder}: {error.strerror or error}"
        ) from error


def _local(name: str | Path) -> Path | None:
    """The folder of that name, None for a hub id; InputError for a path without a folder."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    label = str(name)
    if isinstance(name, Path) or label.startswith((".", "/", "~")) or label.count("/") > 1:
        raise InputError(f"there is no folder {name}", hint="Check the path of the drafter.")
    return None


@contextmanager
def _asking_the_hub(name: str | Path) -> Iterator[None]:
    try:
        yield
    except HFValidationError as error:
        raise InputError(
            f"'{name}' is neither a folder nor a hub id", hint="Check the name of the drafter."
        ) from error
    except (HfHubHTTPError, OSError) as error:  # LocalEntryNotFoundError is an OSError
        raise InputError(
            f"the drafter '{name}' is no folder here, and the hub does not give it",
            hint="Check the name and the network, or give a checkpoint folder.",
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files that the index names; empty where there is neither."""
    if not (folder / INDEX).is_file():
        return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
        paths = [folder / name for name in names]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read {folder / INDEX}", hint="Copy it again.") from error
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise InputError(
            f"{folder} lacks {_some(absent)}, which its index names",
            hint="Copy the whole checkpoint.",
        )
    return paths


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    with _reading(path):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict) or not all(
        isinstance(t, torch.Tensor) for t in loaded.values()
    ):
        raise InputError(f"{path} does not hold tensors by name")
    return loaded


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, UnpicklingError, OSError, RuntimeError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"cannot read the weights in {path}: {reason}",
            hint="The file is damaged or was copied in part; fetch it again.",
        ) from error


def _derived(name: str) -> bool:
    """Buffers that old checkpoints carry and that follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


def _some(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
