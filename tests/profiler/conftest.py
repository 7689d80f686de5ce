"""The command line, for the tests of commands."""

import pytest

from profiler import cli


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `rooftree ...` with an empty data directory: exit code, stdout and stderr."""
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))

    def call(*words: str) -> tuple[int, str, str]:
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
