"""The public face: its names, their types, and that it imports nothing before it must."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import rooftree
from costmodel.profile.store import ProfileStore
from rooftree import find_profile, load_profile
from tests.costmodel.conftest import altered

HEAVY = ("torch", "transformers", "numpy", "scipy", "pydantic", "click", "numba", "costmodel")


def test_type_checkers_see_what_is_imported() -> None:
    """The imports under TYPE_CHECKING name the same objects as the lazy ones."""
    tree = ast.parse(Path(rooftree.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: getattr(importlib.import_module(str(node.module)), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed.keys() | {"ShadowedPackageError", "__version__"} == set(rooftree.__all__)
    for name, value in typed.items():
        assert getattr(rooftree, name) is value
    assert set(rooftree.__all__) <= set(dir(rooftree))
    with pytest.raises(AttributeError, match="no attribute 'treedecoder'"):
        _ = rooftree.treedecoder


def test_importing_it_imports_nothing_heavy_and_the_module_has_its_version() -> None:
    code = (
        f"import sys, rooftree; print([name for name in {HEAVY} if name in sys.modules])\n"
        "import costmodel.profile.store, costmodel.online, costmodel.calibration.choices\n"
        "print({'scipy', 'torch', 'transformers', 'pynvml', 'numba'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nset()\n"
    assert rooftree.__version__ == version("rooftree")
    command = [sys.executable, "-m", "rooftree", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"rooftree {version('rooftree')}\n"


def test_a_profile_is_found_and_the_users_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    profile = find_profile("h100-sxm", "qwen3-8b")
    assert profile.target.name == "Qwen/Qwen3-8B"
    assert find_profile("NVIDIA H100 80GB HBM3", "Qwen/Qwen3-8B") == profile
    path = ProfileStore().save(altered(profile, provenance={"source": "mine"}))
    assert path.is_relative_to(tmp_path)
    assert find_profile("h100-sxm", "qwen3-8b").provenance.source == "mine"
    assert load_profile(path) == find_profile("h100-sxm", "qwen3-8b")


@pytest.mark.parametrize(("device", "target", "dtype", "message"), [
    ("h100-sxm", "qwen3-8b", "float32", r"This device has .*qwen3-8b\.bfloat16"),
    ("mi300x", "qwen3-8b", None, "This device has no profile"),
    ("Some CPU", "qwen3-8b", None, "no known device is called 'Some CPU'"),
    ("h100-sxm", "nonesuch", None, "no known target"),
])  # fmt: skip
def test_nothing_fits(device: str, target: str, dtype: str | None, message: str) -> None:
    with pytest.raises(rooftree.RooftreeError, match=message):
        find_profile(device, target, dtype=dtype)
