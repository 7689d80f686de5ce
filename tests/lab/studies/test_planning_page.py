"""docs/planning.md cannot rot: its output is that of its commands."""

import re

import pytest

from lab.studies.readme import PLAN, PLANNING, with_output


@pytest.mark.slow
def test_output_is_what_the_commands_print():
    text = PLANNING.read_text(encoding="utf-8")
    assert len(PLAN.findall(text)) >= 4
    assert with_output(text) == text


@pytest.mark.slow
def test_the_python_example_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    block = re.search(r"```python\n(.*?)```", PLANNING.read_text(encoding="utf-8"), re.DOTALL)[1]
    exec(compile(block, "planning.md", "exec"), {})
    gpu, count = capsys.readouterr().out.split()
    assert gpu in ("h100-sxm", "l40s") and int(count) >= 1
