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

HEAVY = ("torch", "transformers", "numpy", "scipy", "pydantic", "click", "numba", "costmodel")


@pytest.mark.parametrize("name", rooftree.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(rooftree, name) is not None
    assert name in dir(rooftree)


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


def test_importing_it_imports_nothing_heavy() -> None:
    code = f"import sys, rooftree; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'treedecoder'"):
        _ = rooftree.treedecoder


def test_version() -> None:
    assert rooftree.__version__ == version("rooftree")


def test_module_can_be_run() -> None:
    command = [sys.executable, "-m", "rooftree", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"rooftree {version('rooftree')}\n"


class TestFindProfile:
    def test_shipped(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
        profile = find_profile("h100-sxm", "qwen3-8b")
        assert profile.target.name == "Qwen/Qwen3-8B"
        assert profile.device.name == "NVIDIA H100 80GB HBM3"
        assert find_profile("NVIDIA H100 80GB HBM3", "Qwen/Qwen3-8B") == profile

    def test_users_profile_comes_first(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
        shipped = find_profile("h100-sxm", "qwen3-8b")
        fields = shipped.as_dict()
        fields["provenance"]["source"] = "mine"
        path = ProfileStore().save(type(shipped).model_validate(fields))
        assert path.is_relative_to(tmp_path)
        assert find_profile("h100-sxm", "qwen3-8b").provenance.source == "mine"
        assert load_profile(path) == find_profile("h100-sxm", "qwen3-8b")

    def test_nothing_fits(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
        with pytest.raises(rooftree.ProfileError, match=r"This device has .*qwen3-8b\.bfloat16"):
            find_profile("h100-sxm", "qwen3-8b", dtype="float32")
        with pytest.raises(rooftree.ProfileError, match="This device has no profile"):
            find_profile("mi300x", "qwen3-8b")
        with pytest.raises(rooftree.InputError, match="no known device is called 'Some CPU'"):
            find_profile("Some CPU", "qwen3-8b")
        with pytest.raises(rooftree.InputError, match="no known target"):
            find_profile("h100-sxm", "nonesuch")
