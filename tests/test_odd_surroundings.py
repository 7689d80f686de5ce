"""Odd names, homes, encodings, streams and checkpoint fields: one line, or the right thing."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from costmodel.errors import InputError
from costmodel.io import folder_of
from decoder.drafters.checkpoint import Fields, Weights, architectures, read_shape
from decoder.drafters.dflash.model import is_dflash
from decoder.drafters.factory import load_drafter
from decoder.drafters.vocabulary import read_tokens
from decoder.model.loading import load_model
from decoder.statistics import RoundTrace
from profiler import cli
from profiler.commands.generate import read_prompts, utf8_text
from profiler.report.console import printable
from tests.decoder.models import random_model, round_of, target_of
from tests.test_bad_input import Place, place  # noqa: F401 - a fixture
from tests.tiny_folder import write_config, write_tokenizer, write_weights

LONG = "x" * 300
CPU = torch.device("cpu")


class TestNames:
    @pytest.mark.parametrize("name", [LONG, f"a/{LONG}", "~nosuchuser/x", "a\x00b"])
    def test_of_no_folder(self, name: str) -> None:
        assert folder_of(name) is None
        with pytest.raises(InputError):
            load_model(name, weights="random", dtype=torch.float32, device=CPU)
        with pytest.raises(InputError):
            load_drafter(name, target_of(random_model("llama-gqa")))

    def test_a_home_of_nobody(
        self,
        place: Place,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("ROOFTREE_HOME", "~nosuchuser/x")
        exit_code, lines = place.run(*place.generate())
        assert exit_code == 3
        assert "~nosuchuser/x: there is no such user's home folder" in lines[-1]

    def test_a_long_message_is_shortened(
        self,
        place: Place,  # noqa: F811
    ) -> None:
        exit_code, line = place.refused(*place.generate("--target", "./" + "y" * 5000))
        assert exit_code == 2
        assert len(line) < 720
        assert "Check the path of the target." in line


class TestTexts:
    def test_an_argument_is_utf8_whatever_the_locale(self) -> None:
        """As Python reads UTF-8 in a locale of ASCII, and Latin-1 in one of UTF-8."""
        assert utf8_text("\udcc3\udca9") == "\u00e9"
        assert utf8_text("\u00e9") == "\u00e9"
        with pytest.raises(InputError, match="is not UTF-8 text"):
            utf8_text("caf\udce9")

    def test_half_a_pair_in_prompts(self, tmp_path: Path) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text('{"prompt": "a"}\n{"prompt": "\\ud800"}\n')
        with pytest.raises(InputError, match=r"p\.jsonl, line 2 .*surrogate"):
            read_prompts((), path, None)

    def test_controls_are_spelt_out(self) -> None:
        assert printable("a\x1b[31mb\tc\nd\x9b1m\u202ee\x7f\r") == (
            "a\\x1b[31mb\tc\nd\\x9b1m\\u202ee\\x7f\\r"
        )
        assert printable("\u00e9\u4e2d\U0001f600") == "\u00e9\u4e2d\U0001f600"

    def test_an_id_with_controls(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
    def test_a_text_that_the_encoding_has_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = Disk()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(disk, encoding="ascii"))
        assert cli.run(["--help"]) == 0
        sys.stdout.write("caf\u00e9 \ud800")
        sys.stdout.flush()
        assert disk.getvalue().endswith(b"caf\\xe9 \\ud800")

    def test_a_full_disk_behind_stdout(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        disk = Disk()
        disk.full = True
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(disk, encoding="utf-8"))
        assert cli.run(["--help"]) == cli.EXIT_OUTPUT
        disk.full = False
        assert "the output: not written, the disk is full. Free" in capsys.readouterr().err

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG])
    def test_errors_of_files(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
    ) -> None:
        def fail(*arguments: object, **options: object) -> None:
            raise OSError(number, os.strerror(number), "a/file")

        monkeypatch.setattr(cli.cli, "main", fail)
        assert cli.run(["doctor"]) == (2 if number == errno.ENAMETOOLONG else cli.EXIT_OUTPUT)
        assert capsys.readouterr().err.startswith("rooftree: a/file: ")

    def test_a_current_folder_that_is_gone(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "count"}\n')
        command = ["bench", "--target", str(tmp_path), "--prompts", str(tmp_path / "prompts.jsonl")]
        assert cli.run([*command, "--output", "result.json"]) == cli.EXIT_USAGE
        assert "the current folder is gone" in capsys.readouterr().err

    def test_a_closed_stdout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        assert cli.run(["--help"]) == 0

    def test_a_trace_on_a_full_disk(self) -> None:
        from decoder.tree.draft_tree import EMPTY

        trace = RoundTrace(Path("/dev/full"))
        with pytest.raises(InputError, match="/dev/full: not written, the disk is full"):
            trace.write(round_of(EMPTY, []), None)


class TestTargets:
    @pytest.mark.parametrize(
        "changed",
        [
            {"head_dim": 2**40}, {"head_dim": 10**400}, {"hidden_act": "no_such"},
            {"hidden_act": 3}, {"rope_theta": "x"}, {"initializer_range": None},
        ],
    )  # fmt: skip
    def test_configs(self, tmp_path: Path, changed: dict[str, object]) -> None:
        write_config(tmp_path / "t", **changed)
        with pytest.raises(InputError) as caught:
            load_model(str(tmp_path / "t"), weights="random", dtype=torch.float32, device=CPU)
        assert len(str(caught.value)) < 700

    @pytest.mark.parametrize("end", [2.5, [1, "a"], {"a": 1}, -1, [True]])
    def test_end_tokens(self, end: object) -> None:
        from decoder.text import end_tokens

        model = random_model("llama-gqa")
        model.generation_config.eos_token_id = end
        with pytest.raises(InputError, match="eos_token_id of the target must be"):
            end_tokens(model)

    @pytest.mark.parametrize("number", [2**31, -1, 2.5, None, 2**70])
    def test_token_ids(self, tmp_path: Path, number: object) -> None:
        folder = write_tokenizer(write_weights(tmp_path / "t"))
        data = json.loads((folder / "tokenizer.json").read_text())
        data["model"]["vocab"]["a"] = number
        (folder / "tokenizer.json").write_text(json.dumps(data))
        loaded = load_model(str(folder), weights="pretrained", dtype=torch.float32, device=CPU)
        with pytest.raises(InputError, match="tokenizer"):
            loaded.tokenizer()


class TestDrafters:
    @pytest.mark.parametrize("names", [1, "DFlashDraftModel", {"a": 1}, None, 2.5])
    def test_architectures(self, names: object) -> None:
        assert architectures({"architectures": names}) == []
        assert not is_dflash({"architectures": names})

    @pytest.mark.parametrize("tokens", ["[1, 1180591620717411303424]", "[NaN]", "[" * 9999, "3"])
    def test_draft_tokens(self, tmp_path: Path, tokens: str) -> None:
        (tmp_path / "draft_tokens.json").write_text(tokens)
        with pytest.raises(InputError, match=r"draft_tokens\.json"):
            read_tokens(tmp_path)

    def test_flipped_bytes_of_a_pickle(self, tmp_path: Path) -> None:
        path = tmp_path / "pytorch_model.bin"
        torch.save({"a": torch.arange(6.0), "b": torch.zeros(2, 2)}, path)
        sound = path.read_bytes()
        for position in range(0, len(sound), 7):
            damaged = bytearray(sound)
            damaged[position] ^= 0x5A
            path.write_bytes(damaged)
            try:
                Weights(tmp_path, pickled=True)
            except InputError as error:
                assert str(path) in str(error)

    @pytest.mark.parametrize(
        "changed", [{"head_dim": 2**40}, {"head_dim": 2**21}, {"hidden_size": 2**70}]
    )
    def test_sizes(self, changed: dict[str, int]) -> None:
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 8}
        with pytest.raises(InputError, match=next(iter(changed))):
            read_shape(Fields(sizes | changed, "config.json"), head_dim=None, bias=False)
