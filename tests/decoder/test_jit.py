"""Messages about compiling."""

import os
import runpy

import numba
from numba.core import event

from decoder.jit import FirstCompile, jit


def test_compiling_is_said_once_and_of_our_functions_alone(caplog, monkeypatch):
    ours, more = (jit(eval(f"lambda x: x + {n}")) for n in (1, 2))  # without a file: not cached
    monkeypatch.setattr(FirstCompile, "said", True)  # of the listener of this process
    listener = FirstCompile()
    listener.said = False
    with event.install_listener("numba:compile", listener):
        assert numba.njit(eval("lambda x: x + 3"))(1) == 4
        assert not caplog.records
        assert (ours(1), more(1)) == (2, 3)
    (record,) = caplog.records
    assert "compiling the decoder's inner loops" in record.message


def test_compiled_code_is_not_that_of_another_files_older_state(tmp_path, monkeypatch):
    """Inner functions lie in files that numba does not look at."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    source, other = tmp_path / "whole.py", tmp_path / "inner.py"
    for file in (source, other):
        file.write_text("def one(x):\n    return x\n")
    function = runpy.run_path(str(source))["one"]
    stamps = []
    for changed_s in (1.0, 1e10):
        os.utime(other, (changed_s, changed_s))
        stamps.append(jit(function)._cache._cache_file._source_stamp)
    assert stamps[0] != stamps[1]
