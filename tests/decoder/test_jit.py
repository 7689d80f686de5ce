"""Messages about compiling."""

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
