"""Bad input and odd surroundings through the real command line: one line that says what to do."""

import errno
import io
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from costmodel.errors import InputError
from decoder.drafters.checkpoint import Weights
from decoder.model.loading import load_model
from decoder.statistics import RoundTrace
from decoder.text import end_tokens
from decoder.tree.draft_tree import EMPTY
from profiler import cli
from profiler.commands.generate import utf8_text
from profiler.report.console import printable
from tests.decoder.models import random_model, round_of
from tests.tiny_folder import POSITIONS, fake_clock, isolate, listing, write_config

CPU = torch.device("cpu")
OPTIONS = {
    "calibrate": {
        "--device": "cpu", "--dtype": "float32", "--contexts": "32,128", "--max-nodes": "15",
    },
    "generate": {
        "--device": "cpu", "--dtype": "float32", "--prompt": "hello", "--max-new-tokens": "4",
    },
}  # fmt: skip


class Place:
    """A whole tiny target and a machine to itself; runs commands and sees what they leave."""

    def __init__(self, folder: Path, home: Path, target: Path, run) -> None:
        self.folder, self._run = folder, run
        self.target = str(shutil.copytree(target, folder / "tiny"))
        home.mkdir()

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        exit_code, _, err = self._run(*arguments)
        return exit_code, err.splitlines()

    def files(self) -> dict[str, bytes]:
        return {name: text for name, text in listing(self.folder).items() if "locks/" not in name}

    def refused(self, *arguments: str, notes: int = 0) -> tuple[int, str]:
        """Run what must fail in one line after at most `notes` others, and leave nothing new."""
        before = self.files()
        exit_code, lines = self.run(*arguments)
        assert exit_code not in (0, 1, 70), lines
        assert 1 <= len(lines) <= 1 + notes, lines
        assert lines[-1].startswith("rooftree: ") and len(lines[-1]) < 720
        assert not any("Traceback" in line for line in lines)
        assert self.files() == before
        return exit_code, lines[-1]

    def arguments(self, command: str, **changed: str) -> tuple[str, ...]:
        """A command's words that work, with options changed (`max_nodes` for `--max-nodes`)."""
        options = {"--target": self.target} | OPTIONS[command]
        options |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
        return (command, *(word for pair in options.items() for word in pair))


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_target, run):
    def no_hub(name, **options):
        huggingface_hub.utils.validate_repo_id(name)
        raise LocalEntryNotFoundError("the hub cannot be reached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    fake_clock(monkeypatch)
    return Place(tmp_path, isolate(monkeypatch, tmp_path), tiny_target, run)


BOTH, DRAFTS, PLAIN = ("calibrate", "generate"), ("generate",), {"policy": "plain"}
# Commands, options that are changed, exit code, what the line says, and lines before it at most.
REFUSALS: list[tuple[tuple[str, ...], dict[str, str], int, str, int]] = [
    (BOTH, {"target": "not a name"}, 2, "no known target is called 'not a name'", 0),
    (BOTH, {"target": ""}, 2, r"the target's name is empty\. Give a folder, a hub id", 0),
    (DRAFTS, {"target": "./" + "y" * 5000}, 2, "Check the path of the target", 0),
    (DRAFTS, {"target": "a\x00b"}, 2, "", 0),
    (BOTH, {"dtype": "int3"}, 4, "'int3' is not a dtype. Use one of bfloat16, float16, float32", 0),
    (BOTH, {"device": "cuda"}, 4, "no CUDA device is available.*Use --device cpu", 0),
    (DRAFTS, PLAIN | {"prompt": "x" * POSITIONS}, 2, "256 tokens and 4 new .*Shorten the prom", 1),
    (DRAFTS, PLAIN | {"max_new_tokens": "9999"}, 2, "ask for at most 251 tokens", 1),
    (DRAFTS, {"policy": "fixed:99999999"}, 2, "does not fit the 256 positions.*smaller tree", 0),
    (DRAFTS, {"prompt": "\n\t"}, 2, r"the prompt is empty \(prompt-0\)\. Give some text\.", 0),
    (DRAFTS, PLAIN | {"temperature": "nan"}, 2, "temperature", 1),
    (DRAFTS, PLAIN | {"top_p": "1.5"}, 2, "top", 1),
    (DRAFTS, PLAIN | {"seed": "-1"}, 2, "seed", 1),
    (DRAFTS, {"policy": "fixed:0"}, 2, "fixed", 1),
]


@pytest.mark.parametrize("index", range(len(REFUSALS)), ids=lambda i: str(REFUSALS[i][1])[:40])
def test_options_that_cannot_be_used(place, index):
    commands, changed, expected, message, notes = REFUSALS[index]
    for command in commands:
        exit_code, line = place.refused(*place.arguments(command, **changed), notes=notes)
        assert exit_code == expected
        assert re.search(message, line), line


def test_a_device_beyond_those_that_exist_and_no_prompt_or_template(place, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("decoder.names.has_gpu", lambda: True)
    exit_code, line = place.refused(*place.arguments("generate", device="cuda:9"))
    assert exit_code == 4 and "there is no cuda:9: torch sees 2 CUDA device" in line
    assert "Give --prompt TEXT" in place.refused("generate", "--target", place.target)[1]
    words = place.arguments("generate", policy="plain")
    line = place.refused(*words, "--template", "a=1", notes=1)[1]
    assert "no chat template. Leave the template out" in line


def test_damaged_targets(place):
    target, words = Path(place.target), place.arguments("generate", policy="plain")
    for damage, message in (
        (lambda: [file.unlink() for file in target.glob("tokenizer*")], "no usable tokenizer"),
        (lambda: os.truncate(target / "model.safetensors", 9000), "cannot load the weights"),
        (lambda: (target / "config.json").write_text("{"), "config.json cannot be read"),
    ):
        damage()
        exit_code, line = place.refused(*words, notes=1)
        assert (exit_code, message in line) == (2, True), line


@pytest.mark.parametrize("changed", [
    {"head_dim": 2**40}, {"hidden_act": "no_such"}, {"rope_theta": "x"}, {"head_dim": 10**400},
])  # fmt: skip
def test_sizes_that_no_model_has(tmp_path, changed):
    write_config(tmp_path / "t", **changed)
    with pytest.raises(InputError):
        load_model(str(tmp_path / "t"), weights="random", dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("end", [2.5, [1, "a"], -1, [True]])
def test_end_tokens_that_are_none(end):
    model = random_model("llama-gqa")
    model.generation_config.eos_token_id = end
    with pytest.raises(InputError, match="eos_token_id of the target must be"):
        end_tokens(model)


def test_flipped_bytes_of_a_pickle(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(6.0), "b": torch.zeros(2, 2)}, path)
    sound = path.read_bytes()
    for position in range(0, len(sound), 23):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 0x5A]) + sound[position + 1 :])
        try:
            Weights(tmp_path, pickled=True)
        except InputError as error:
            assert str(path) in str(error)


class TestNoPermission:
    @pytest.fixture(params=["below a file", "refused"])
    def nowhere(self, request, place, monkeypatch):
        """A folder where nothing can be written; root may write everywhere, so it is staged."""
        if request.param == "below a file":
            (place.folder / "file").write_text("")
            return place.folder / "file" / "below"
        real_mkdir, folder = Path.mkdir, place.folder / "forbidden"

        def mkdir(self, *arguments, **options):
            if folder in (self, *self.parents):
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            real_mkdir(self, *arguments, **options)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        return folder

    def test_the_output_and_the_data_directory(self, place, nowhere, monkeypatch):
        """A calibration needs it, for the journal too; generating goes on without saving."""
        words = place.arguments("calibrate", output=str(nowhere / "a.yaml"))
        exit_code, line = place.refused(*words)
        assert exit_code == 6
        assert re.search(rf"cannot write to {nowhere}: .*Choose another place for --output", line)
        monkeypatch.setenv("ROOFTREE_HOME", str(nowhere))
        exit_code, line = place.refused(*place.arguments("calibrate"))
        assert exit_code == 6
        assert re.search(rf"cannot write to {nowhere}: .*Set ROOFTREE_HOME to a folder", line)
        words = place.arguments("calibrate", output=str(place.folder / "a.yaml"))
        exit_code, line = place.refused(*words, notes=1)
        assert exit_code == 5
        assert re.search(r"cannot write the journal .*set ROOFTREE_HOME", line)
        before = place.files()
        exit_code, (line,) = place.run(*place.arguments("generate"))
        assert (exit_code, "(not saved: " in line) == (0, True)
        assert place.files() == before
        monkeypatch.setenv("ROOFTREE_HOME", "~nosuchuser/x")
        exit_code, lines = place.run(*place.arguments("generate"))
        assert exit_code == 3
        assert "~nosuchuser/x: there is no such user's home folder" in lines[-1]


def test_texts_of_any_locale_and_controls_that_are_spelt_out(capsys):
    """As Python reads UTF-8 in a locale of ASCII, and Latin-1 in one of UTF-8."""
    assert utf8_text("\udcc3\udca9") == utf8_text("\u00e9") == "\u00e9"
    with pytest.raises(InputError, match="is not UTF-8 text"):
        utf8_text("caf\udce9")
    assert printable("a\x1b[31mb\tc\n\x9b1m\u202ee\r") == "a\\x1b[31mb\tc\n\\x9b1m\\u202ee\\r"
    cli.run(["generate", "--target", "./\x1b[2J\x07none", "--prompt", "x"])
    assert "\x1b" not in capsys.readouterr().err


class Disk(io.BytesIO):
    """A file in memory; `full` as long as there is no room."""

    full = False

    def write(self, data: Any) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


class TestStreams:
    def test_an_encoding_without_the_text_a_full_disk_and_no_stdout(self, monkeypatch, capsys):
        disk = Disk()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(disk, encoding="ascii"))
        assert cli.run(["--help"]) == 0
        sys.stdout.write("caf\u00e9 \ud800")
        sys.stdout.flush()
        assert disk.getvalue().endswith(b"caf\\xe9 \\ud800")
        full = Disk()
        full.full = True
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, encoding="utf-8"))
        assert cli.run(["--help"]) == cli.EXIT_OUTPUT
        full.full = False
        assert "the output: not written, the disk is full. Free" in capsys.readouterr().err
        monkeypatch.setattr(sys, "stdout", None)
        assert cli.run(["--help"]) == 0

    def test_a_current_folder_that_is_gone_and_a_trace_on_a_full_disk(
        self, monkeypatch, tmp_path, capsys
    ):
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "count"}\n')
        command = ["bench", "--target", str(tmp_path), "--prompts", str(tmp_path / "prompts.jsonl")]
        assert cli.run([*command, "--output", "result.json"]) == cli.EXIT_USAGE
        assert "the current folder is gone" in capsys.readouterr().err
        trace = RoundTrace(Path("/dev/full"))
        with pytest.raises(InputError, match="/dev/full: not written, the disk is full"):
            trace.write(round_of(EMPTY, []), None)
