"""Fixtures for all tests, and where their data lies."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"  # its SOURCES.md says what each file is a slice of
WHOLE = Path(__file__).parents[2] / "shared"  # the whole data sets, beside a few checkouts
MEASURED = [pytest.param(DATA / "measured", id="slice")]
if WHOLE.is_dir():
    MEASURED.append(pytest.param(WHOLE / "data", id="whole", marks=pytest.mark.slow))

# Exit codes of a calibration where a test judges no times: a busy machine may call it useless.
CALIBRATED = (0, 5)


def reference(name: str) -> Any:
    """Reference answers, worked out by brute force independently of this project."""
    return json.loads((DATA / "oracles" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(params=MEASURED)
def measured(request) -> Path:
    """The folder of published measurements: a slice, and the whole where it is at hand."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def home_of_the_session(tmp_path_factory):
    """A data directory of the tests' own: nothing is written into the user's, or read from there.

    The demo model is reached by a link, since it is fetched and converted once a machine.
    """
    from costmodel.profile.store import user_directory

    models = user_directory() / "models"
    with contextlib.suppress(OSError):
        models.mkdir(parents=True, exist_ok=True)
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(models.absolute())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROOFTREE_HOME", str(home))
        patch.setattr("profiler.measure.machine.disturbances", lambda: [])  # other tests' workers
        yield home


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    """The folder of a whole tiny target, which all tests share."""
    from tests.tiny_folder import write_all

    return write_all(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `rooftree ...` with an empty data directory: exit code, stdout and stderr."""
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))

    def call(*words: str) -> tuple[int, str, str]:
        from profiler import cli

        exit_code = cli.run(words)
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return call


@pytest.fixture
def refused(run):
    """Runs what must fail in one line and print nothing else; that line."""

    def call(*words: str, exit_code: int = 2) -> str:
        found, out, err = run(*words)
        assert (found, out, err.count("\n")) == (exit_code, "", 1), err
        assert err.startswith("rooftree: ")
        return err

    return call
