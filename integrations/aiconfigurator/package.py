"""The package aiconfigurator-core: its devices, and the places and columns of its tables."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.catalog import DeviceSpec
from costmodel.compose.transfer import transfer_errors
from costmodel.errors import DeviceError, InputError

PACKAGES = ("aiconfigurator_core", "pyarrow")
ENGINES = ("vllm", "sglang", "trtllm")
SYSTEMS = {
    "a100-sxm-80gb": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx-pro-6000-server": "rtx_pro_6000_server",
}
Columns = dict[str, NDArray[Any]]
# Tables with outliers of up to 2.7 times the true time; later versions are sound.
UNSOUND = {("rtx_pro_6000_server", "vllm", "0.19.0"), ("rtx_pro_6000_server", "sglang", "0.5.10")}


def is_installed() -> bool:
    """Whether the extra `operators` is installed."""
    return all(map(importlib.util.find_spec, PACKAGES))


def data_folder() -> Path:
    """The folder of the package's tables. Raises InputError where the extra is missing."""
    package = importlib.util.find_spec("aiconfigurator_core")
    missing = [p.replace("_", "-") for p in PACKAGES if importlib.util.find_spec(p) is None]
    if missing or package is None or package.origin is None:
        raise InputError(
            f"composing needs the operator tables, and {' and '.join(missing)} is not installed",
            hint="Install them with `pip install 'rooftree[operators]'`, or give --operators DIR",
        )
    return Path(package.origin).parent / "systems" / "data"


def package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:
        return "of unknown version"


def newest_version(data: Path, system: str, engine: str) -> str:
    """The newest sound version with both products and attention. Raises DeviceError."""
    folders = [
        {path.name for path in (data / operator / engine).glob("*") if path.is_dir()}
        for operator in ("gemm", "attention")
    ]
    versions = [v for v in folders[0] & folders[1] if (system, engine, v) not in UNSOUND]
    if not versions:
        raise DeviceError(
            f"there are no sound {engine} tables of {system}", hint="Try another --engine"
        )
    return max(versions, key=version_key)


def version_key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def read_table(path: Path, columns: tuple[str, ...]) -> Columns:
    """Columns of a parquet file as arrays; absent columns are left out. Raises InputError."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        present = [name for name in columns if name in parquet.read_schema(path).names]
        # Texts, of which there are few, are read as numbers of a dictionary.
        table = parquet.read_table(path, columns=present, read_dictionary=present)
    except (OSError, ValueError) as failure:
        raise InputError(f"{path.name} cannot be read ({failure})") from None
    read = {name: table.column(name).to_numpy() for name in present}
    for name, values in read.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise InputError(f"{path.name} has a {name} that is no finite number")
    return read


def find_system(device: DeviceSpec, engine: str) -> str:
    """The package's name of a device. Raises InputError or DeviceError where it has no tables."""
    if engine not in ENGINES:
        raise InputError(
            f"no engine is called '{engine}'", hint=f"Use one of: {', '.join(ENGINES)}"
        )
    if device.slug not in SYSTEMS:
        errors = {slug: transfer_errors().expected(slug, device.slug)[0] for slug in SYSTEMS}
        best = min(errors, key=errors.__getitem__)
        raise DeviceError(
            f"there are no published operator tables of {device.name}",
            hint=f"There are for: {', '.join(SYSTEMS)}; `rooftree transfer` scales a profile, from"
            f" {best} with the smallest error of the scaling, {errors[best]:.1%}",
        )
    return SYSTEMS[device.slug]


def engines_from(engine: str) -> list[str]:
    """All engines, this one first."""
    return sorted(ENGINES, key=lambda name: name != engine)


def without_outliers(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds by ascending size without upward outliers: none exceeds that of more work."""
    return np.minimum.accumulate(seconds[::-1])[::-1]
