"""Progress where nobody sits at a terminal."""

from profiler.report.console import STEPS, progress


def test_a_pipe_gets_a_line_for_each_tenth_and_every_message(capsys):
    with progress("decoding") as (say, update):
        say("a message")
        for done in range(1, 101):
            update(done / 100, f"{done} of 100")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "a message"
    assert lines[1:] == [f"decoding: {10 * tenth} of 100" for tenth in range(1, STEPS + 1)]
    # A share falls back where a calibration finds more points to measure.
    with progress("measuring") as (_, update):
        for share in (0.5, 0.4, 0.5, 0.6):
            update(share, f"{share:.0%}")
    assert capsys.readouterr().err.splitlines() == ["measuring: 50%", "measuring: 60%"]
