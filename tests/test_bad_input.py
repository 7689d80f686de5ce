"""Bad input through the real command line: one line that says what to do, and nothing written."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError

from profiler import cli
from tests.tiny_folder import POSITIONS, fake_clock, isolate, listing, write_all

PROMPT = ("--prompt", "hello")


class Place:
    """A whole tiny target and a machine to itself; runs commands and sees what they leave."""

    def __init__(self, folder: Path, home: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.home, self._capture = folder, home, capture
        self.target = str(write_all(folder / "tiny"))
        home.mkdir()

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        """Exit code and the lines on stderr."""
        self._capture.readouterr()
        exit_code = cli.run(arguments)
        return exit_code, self._capture.readouterr().err.splitlines()

    def files(self) -> dict[str, bytes]:
        """Every file, the empty locks aside."""
        return {name: text for name, text in listing(self.folder).items() if "locks/" not in name}

    def refused(self, *arguments: str, notes: int = 0) -> tuple[int, str]:
        """Run what must fail in one line after at most `notes` others, and leave nothing new."""
        before = self.files()
        exit_code, lines = self.run(*arguments)
        assert exit_code not in (0, 1, 70), lines
        assert 1 <= len(lines) <= 1 + notes, lines
        assert lines[-1].startswith("rooftree: ")
        assert not any("Traceback" in line for line in lines)
        assert self.files() == before
        return exit_code, lines[-1]

    def calibrate(self, *more: str) -> tuple[str, ...]:
        options = {
            "--target": self.target, "--device": "cpu", "--dtype": "float32",
            "--contexts": "32,128", "--max-nodes": "15",
        }  # fmt: skip
        options |= dict(zip(more[::2], more[1::2], strict=True))
        return ("calibrate", *(word for pair in options.items() for word in pair))

    def generate(self, *more: str) -> tuple[str, ...]:
        options = {
            "--target": self.target, "--device": "cpu", "--dtype": "float32", "--prompt": "hello",
            "--max-new-tokens": "4",
        }  # fmt: skip
        options |= dict(zip(more[::2], more[1::2], strict=True))
        return ("generate", *(word for pair in options.items() for word in pair))

    def arguments(self, command: str, *more: str) -> tuple[str, ...]:
        return self.calibrate(*more) if command == "calibrate" else self.generate(*more)


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Place:
    def no_hub(name: str, **options: Any) -> str:
        huggingface_hub.utils.validate_repo_id(name)
        raise LocalEntryNotFoundError("the hub cannot be reached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    fake_clock(monkeypatch)
    return Place(tmp_path, isolate(monkeypatch, tmp_path), capsys)


BOTH = pytest.mark.parametrize("command", ["calibrate", "generate"])


@pytest.mark.slow
def test_the_good_case_works(place: Place) -> None:
    """Otherwise every refusal below might have another reason."""
    assert place.run(*place.calibrate())[0] == 0
    exit_code, (line,) = place.run(*place.generate())
    assert exit_code == 0
    assert "(measured, " in line


class TestTarget:
    @BOTH
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("nonesuch", r"Nearest|give a model folder"),
            ("someone/nonesuch", r"Nearest|give a model folder"),
            ("./nonesuch", r"there is no folder \./nonesuch\. Check the path"),
            ("/no/such/place", r"there is no folder /no/such/place"),
            ("not a name", r"neither a folder, a known target nor a hub id"),
            ("", r"the target's name is empty\. Give a folder, a hub id"),
        ],
    )
    def test_missing(self, place: Place, command: str, name: str, message: str) -> None:
        exit_code, line = place.refused(*place.arguments(command, "--target", name))
        assert exit_code == 2
        assert re.search(message, line)

    @BOTH
    def test_broken_config(self, place: Place, command: str) -> None:
        Path(place.target, "config.json").write_text('{"model_type": ')
        exit_code, line = place.refused(*place.arguments(command))
        assert (exit_code, "cannot read the config" in line) == (2, True)

    @BOTH
    def test_truncated_weights(self, place: Place, command: str) -> None:
        file = Path(place.target, "model.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
        exit_code, line = place.refused(*place.arguments(command))
        assert (exit_code, "cannot load the weights" in line) == (2, True)

    def test_no_tokenizer(self, place: Place) -> None:
        for file in Path(place.target).glob("tokenizer*"):
            file.unlink()
        exit_code, line = place.refused(*place.generate("--policy", "plain"), notes=1)
        assert (exit_code, "no usable tokenizer" in line) == (2, True)


class TestDevice:
    @BOTH
    @pytest.mark.parametrize("name", ["int3", "bf16x", "bool", "Float32", ""])
    def test_wrong_dtype(self, place: Place, command: str, name: str) -> None:
        exit_code, line = place.refused(*place.arguments(command, "--dtype", name))
        assert exit_code == 4
        assert f"'{name}' is not a dtype. Use one of bfloat16, float16, float32" in line

    @BOTH
    @pytest.mark.parametrize(
        ("name", "count", "message"),
        [
            ("cuda", 0, r"no CUDA device is available.*Use --device cpu"),
            ("cuda:9", 0, r"no CUDA device is available"),
            ("cuda:9", 2, r"there is no cuda:9: torch sees 2 CUDA device"),
            ("tpu", 0, r"'tpu' is not a device\. Use cpu, cuda or cuda:N"),
            ("cuda:x", 0, r"'cuda:x' is not a device"),
            ("meta", 0, r"device type 'meta' is not supported\. Use cpu or cuda"),
            ("", 0, r"'' is not a device"),
        ],
    )
    def test_unknown(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, command: str, name: str, count: int,
        message: str,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        exit_code, line = place.refused(*place.arguments(command, "--device", name))
        assert exit_code == 4
        assert re.search(message, line)


class TestSizes:
    def test_a_prompt_longer_than_the_model(self, place: Place) -> None:
        prompt = "x" * POSITIONS
        exit_code, line = place.refused(
            *place.generate("--prompt", prompt, "--policy", "plain"), notes=1
        )
        assert exit_code == 2
        assert re.search(r"prompt of 256 tokens and 4 new ones exceed the 256 positions", line)
        assert "Shorten the prompt" in line

    def test_more_new_tokens_than_the_model_has(self, place: Place) -> None:
        arguments = place.generate("--max-new-tokens", "9999", "--policy", "plain")
        exit_code, line = place.refused(*arguments, notes=1)
        assert (exit_code, "ask for at most 251 tokens" in line) == (2, True)

    def test_contexts_longer_than_the_model(self, place: Place) -> None:
        exit_code, line = place.refused(*place.calibrate("--contexts", "64,5000"), notes=1)
        assert exit_code == 2
        assert re.search(r"exceeds the 256 positions.*Choose smaller --contexts", line)

    @pytest.mark.parametrize(
        "more",
        [("--max-nodes", "256"), ("--policy", "fixed:256"), ("--policy", "fixed:99999999")],
    )
    def test_trees_larger_than_the_model(self, place: Place, more: tuple[str, str]) -> None:
        exit_code, line = place.refused(*place.generate(*more))
        assert exit_code == 2
        assert re.search(r"a tree of \d+ nodes does not fit the 256 positions.*smaller tree", line)

    def test_calibrated_trees_larger_than_the_model(self, place: Place) -> None:
        exit_code, line = place.refused(*place.calibrate("--max-nodes", "5000"), notes=1)
        assert exit_code == 2
        assert re.search(r"exceeds the 256 positions.*--max-nodes", line)

    @pytest.mark.parametrize("prompt", ["", "   ", "\n\t"])
    def test_empty_prompts(self, place: Place, prompt: str) -> None:
        exit_code, line = place.refused(*place.generate("--prompt", prompt))
        assert exit_code == 2
        assert "the prompt is empty (prompt-0). Give some text." in line

    def test_no_prompt(self, place: Place) -> None:
        exit_code, line = place.refused("generate", "--target", place.target)
        assert exit_code == 2
        assert "Give --prompt TEXT or --prompts FILE.jsonl" in line

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--temperature", "-1"),
            ("--temperature", "nan"),
            ("--top-p", "0"),
            ("--top-p", "1.5"),
            ("--top-k", "-2"),
            ("--max-nodes", "0"),
            ("--max-new-tokens", "0"),
            ("--policy", "fastest"),
            ("--policy", "fixed:0"),
            ("--seed", "-1"),
            ("--weights", "good"),
        ],
    )
    def test_options_out_of_range(self, place: Place, option: str, value: str) -> None:
        more = () if option == "--policy" else ("--policy", "plain")
        exit_code, _ = place.refused(*place.generate(option, value, *more), notes=1)
        assert exit_code == 2

    def test_chat_without_a_template(self, place: Place) -> None:
        arguments = (*place.generate("--policy", "plain"), "--chat")
        exit_code, line = place.refused(*arguments, notes=1)
        assert (exit_code, "no chat template. Leave --chat out" in line) == (2, True)


class TestNoPermission:
    @pytest.fixture(params=["below a file", "refused"])
    def nowhere(
        self, request: pytest.FixtureRequest, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> Path:
        """A folder where nothing can be written; root may write everywhere, so it is staged."""
        if request.param == "below a file":
            (place.folder / "file").write_text("")
            return place.folder / "file" / "below"
        real_mkdir, real_write = Path.mkdir, Path.write_bytes
        folder = place.folder / "forbidden"

        def mkdir(self: Path, *arguments: Any, **options: Any) -> None:
            if folder in (self, *self.parents):
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            real_mkdir(self, *arguments, **options)

        def write_bytes(self: Path, data: bytes) -> int:
            if folder in self.parents:
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return real_write(self, data)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "write_bytes", write_bytes)
        return folder

    def test_the_data_directory(
        self, place: Place, nowhere: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ROOFTREE_HOME", str(nowhere))
        exit_code, line = place.refused(*place.calibrate())
        assert exit_code == 2
        assert re.search(rf"cannot write to {nowhere}: .*set ROOFTREE_HOME to a folder", line)

    def test_the_output(self, place: Place, nowhere: Path) -> None:
        exit_code, line = place.refused(*place.calibrate("--output", str(nowhere / "a.yaml")))
        assert exit_code == 2
        assert re.search(rf"cannot write to {nowhere}: .*Choose another --output", line)

    def test_the_journal(
        self, place: Place, nowhere: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The profile may go elsewhere; the journal lies in the data directory."""
        monkeypatch.setenv("ROOFTREE_HOME", str(nowhere))
        arguments = place.calibrate("--output", str(place.folder / "a.yaml"))
        exit_code, line = place.refused(*arguments, notes=1)
        assert exit_code == 5
        assert re.search(r"cannot write the journal .*set ROOFTREE_HOME", line)

    def test_generating_goes_on_without_saving(
        self, place: Place, nowhere: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ROOFTREE_HOME", str(nowhere))
        before = place.files()
        exit_code, (line,) = place.run(*place.generate())
        assert exit_code == 0
        assert "(not saved: " in line
        assert place.files() == before


class FullAfter:
    """A file on a disk that takes only so many bytes more."""

    def __init__(self, stream: Any, room: int) -> None:
        self._stream, self._room = stream, room

    def write(self, data: bytes) -> int:
        if len(data) > self._room:
            written = self._stream.write(data[: self._room])
            self._room = 0
            return written
        self._room -= len(data)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def no_space(*arguments: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
class TestFullDisk:
    def test_before_measuring(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("profiler.calibrate.files.tempfile.TemporaryFile", no_space)
        exit_code, line = place.refused(*place.calibrate())
        assert exit_code == 2
        assert "No space left on device" in line

    @pytest.mark.parametrize("room", [0, 10, 3000])
    def test_at_the_journal(self, place: Place, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        real_open = io.FileIO

        def opened(*arguments: Any, **options: Any) -> FullAfter:
            return FullAfter(real_open(*arguments, **options), room)

        with monkeypatch.context() as patch:
            patch.setattr("profiler.measure.journal.io.FileIO", opened)
            exit_code, lines = place.run(*place.calibrate())
        assert exit_code == 5
        assert lines[-1].startswith("rooftree: cannot write the journal ")
        assert "No space left on device. Free some space" in lines[-1]
        left = [name for name in listing(place.home) if not name.startswith("journals/")]
        assert left == []
        (journal,) = place.home.glob("journals/*.jsonl")
        content = journal.read_bytes()
        assert content == b"" or content.endswith(b"\n")  # whole lines only
        exit_code, lines = place.run(*place.calibrate())
        assert exit_code == 0
        kept = content.count(b"\n") - 1
        resumed = any(f"went on from {kept} samples" in line for line in lines)
        assert resumed == (kept > 0)

    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["write", "replace"])
    def test_at_the_profile(self, place: Place, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(f"costmodel.io.os.{call}", no_space)
            exit_code, lines = place.run(*place.calibrate())
        assert exit_code == 3
        assert re.search(r"^rooftree: .*\.yaml: not written, the disk is full\. Free", lines[-1])
        (journal,) = listing(place.home)
        assert journal.startswith("journals/")
        assert place.run(*place.calibrate())[0] == 0

    def test_at_the_picture(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        real_write = os.write

        def write(handle: int, data: bytes) -> int:
            if bytes(data[:4]) == b"\x89PNG":
                real_write(handle, data[:1000])
                no_space()
            return real_write(handle, data)

        with monkeypatch.context() as patch:
            patch.setattr("costmodel.io.os.write", write)
            exit_code, lines = place.run(*place.calibrate())
        assert exit_code == 2
        assert re.search(r"^rooftree: .*\.png: not written, the disk is full\. Free", lines[-1])
        suffixes = sorted(name.rpartition(".")[2] for name in listing(place.home))
        assert suffixes == ["jsonl", "yaml"]  # the journal and a whole profile
        (profile,) = place.home.glob("*/*.yaml")
        assert place.run("profiles", "validate", str(profile))[0] == 0

    def test_at_a_probe(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """Decoding does not need the profile to be kept."""
        before = place.files()
        monkeypatch.setattr("costmodel.io.os.write", no_space)
        exit_code, (line,) = place.run(*place.generate())
        assert exit_code == 0
        assert "not saved: " in line and "the disk is full" in line
        assert place.files() == before


def fields_of(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field, sections and what is in them."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield (*path, key)
            yield from fields_of(value, (*path, key))


class TestProfileFile:
    @pytest.fixture
    def good(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A profile of the target that fits; the target is loaded once for all runs."""
        assert place.run(*place.generate())[0] == 0
        (path,) = place.home.glob("*/*.yaml")
        from decoder import engine

        loaded = engine.load_model(
            place.target, dtype=torch.float32, device=torch.device("cpu"), weights="pretrained"
        )
        monkeypatch.setattr(engine, "load_model", lambda *arguments, **options: loaded)
        assert place.run(*place.generate("--profile", str(path)))[0] == 0
        return path

    def refused(self, place: Place, path: Path) -> str:
        exit_code, line = place.refused(*place.generate("--profile", str(path)))
        assert exit_code == 3
        assert str(path) in line
        return line

    def test_missing(self, place: Place, good: Path) -> None:
        line = self.refused(place, good.with_name("none.yaml"))
        assert "there is no such file. Check the path" in line

    def test_a_folder(self, place: Place, good: Path) -> None:
        assert "cannot be read" in self.refused(place, good.parent)

    def test_truncated(self, place: Place, good: Path) -> None:
        """Wherever it is cut before its optional end: in words, lists and between sections."""
        text = good.read_bytes()
        needed = text.index(b"\ndrafters:")
        bad = good.with_name("cut.yaml")
        for size in [*range(0, needed - 1, 97), needed - 1]:
            bad.write_bytes(text[:size])
            line = self.refused(place, bad)
            assert re.search(r"measure again|is not a profile|schema_version", line), line

    @pytest.mark.slow
    def test_each_field_wrong_in_turn(self, place: Place, good: Path) -> None:
        bad = good.with_name("edited.yaml")
        paths = list(fields_of(yaml.safe_load(good.read_text())))
        assert len(paths) > 60
        for path in paths:
            data = yaml.safe_load(good.read_text())
            section = data
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = {"nonsense": 1}
            bad.write_text(yaml.safe_dump(data, sort_keys=False))
            line = self.refused(place, bad)
            assert path[0] in line, (path, line)
            assert "rooftree calibrate" in line

    @pytest.mark.slow
    def test_each_field_misspelt_in_turn(self, place: Place, good: Path) -> None:
        bad = good.with_name("edited.yaml")
        for path in fields_of(yaml.safe_load(good.read_text())):
            data = yaml.safe_load(good.read_text())
            section = data
            for key in path[:-1]:
                section = section[key]
            if path[:-1] in (("drafters",), ("calibration", "cross_validated")):
                continue  # these map names of any kind to sections
            section[path[-1] + "x"] = section.pop(path[-1])
            bad.write_text(yaml.safe_dump(data, sort_keys=False))
            self.refused(place, bad)

    @pytest.mark.parametrize(
        "text", ["", "[]", "3", "a: &a [*a]", "\x00", "{", "a: 1\na: 2", "---"]
    )
    def test_not_a_profile(self, place: Place, good: Path, text: str) -> None:
        bad = good.with_name("other.yaml")
        bad.write_text(text)
        self.refused(place, bad)

    def test_nothing_in_it_is_executed(self, place: Place, good: Path) -> None:
        marker = place.folder / "executed"
        bad = good.with_name("evil.yaml")
        for tag in (
            f"!!python/object/apply:os.mknod ['{marker}']",
            f"!!python/object/apply:os.system ['touch {marker}']",
            f"!!python/object/new:pathlib.Path ['{marker}']",
            "!!python/name:os.system",
            "!!python/module:this",
        ):
            for text in (f"schema_version: {tag}\n", good.read_text() + f"note: {tag}\n"):
                bad.write_text(text)
                self.refused(place, bad)
        assert not marker.exists()

    def test_of_another_dtype(self, place: Place, good: Path) -> None:
        bad = good.with_name("other.yaml")
        bad.write_text(good.read_text().replace("dtype: float32", "dtype: float16"))
        exit_code, line = place.refused(*place.generate("--profile", str(bad)))
        assert exit_code == 3
        assert re.search(r"other\.yaml \(dtype float16, here float32\)", line)
