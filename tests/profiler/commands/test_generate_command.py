"""`rooftree generate`: prompts in, text or JSON out, and what it says of its profile."""

import json
import shutil
from pathlib import Path

import pytest

from costmodel.errors import InputError
from profiler.commands.generate import read_prompts
from tests.tiny_folder import isolate

pytestmark = pytest.mark.cpu_kind

PROMPT = "hällo hällo"


class Command:
    """Calls of the command on a tiny target with a data directory of its own."""

    def __init__(self, folder: Path, target: Path, run) -> None:
        self.folder, self._run = folder, run
        self.target = shutil.copytree(target, folder / "tiny")

    def __call__(self, *more: str, tokens: int = 12) -> tuple[int, str, list[str]]:
        on_cpu = ("--target", str(self.target), "--device", "cpu", "--dtype", "float32")
        code, out, err = self._run("generate", *on_cpu, "--max-new-tokens", str(tokens), *more)
        return code, out, err.splitlines()

    def record(self, *more: str, **options: int) -> dict:
        exit_code, out, lines = self(*more, "--json", **options)
        assert exit_code == 0, lines
        return json.loads(out)


@pytest.fixture
def generate(tmp_path, monkeypatch, tiny_target, run):
    isolate(monkeypatch, tmp_path)
    return Command(tmp_path, tiny_target, run)


class TestOutput:
    def test_text_and_json_agree_and_options_reach_the_decoder(self, generate, monkeypatch):
        record = generate.record("--prompt", PROMPT, "--policy", "fixed:6")
        assert sorted(record) == ["id", "schema_version", "stats", "text", "token_ids"]
        assert record["id"] == "prompt-0"
        assert len(record["token_ids"]) == record["stats"]["new_tokens"] == 12
        exit_code, out, lines = generate("--prompt", PROMPT, "--policy", "fixed:6")
        assert (exit_code, out) == (0, record["text"] + "\n")
        assert lines == ["policy fixed:6 needs no profile"]
        monkeypatch.setattr("profiler.measure.machine.disturbances", lambda: ["miner is busy"])
        assert generate("--prompt", "ab", "--policy", "plain")[2][0] == "warning: miner is busy"
        warm = ("--prompt", PROMPT, "--policy", "fixed:5", "--temperature", "2")
        drawn = (generate.record(*warm, "--seed", seed, tokens=30) for seed in "112")
        one, again, other = (record["token_ids"] for record in drawn)
        assert one == again != other
        options = ("--prompt", PROMPT, "--policy", "plain")
        greedy = generate.record(*options)
        warm = generate.record(*options, "--temperature", "2", "--top-k", "1")
        assert warm["token_ids"] == greedy["token_ids"]

    def test_several_prompts_are_headed_by_their_names(self, generate):
        file = generate.folder / "prompts.jsonl"
        file.write_text('{"id": "first", "prompt": "one"}\n\n{"prompt": "two"}\n')
        arguments = ("--prompts", str(file), "--policy", "plain")
        exit_code, out, _ = generate(*arguments, tokens=1)
        assert exit_code == 0
        heads = [line for line in out.splitlines() if line.startswith("[")]
        assert heads == ["[first]", "[line-3]"]
        exit_code, out, _ = generate(*arguments, "--json", "--prompt", "zero")
        names = [json.loads(line)["id"] for line in out.splitlines()]
        assert names == ["prompt-0", "first", "line-3"]


class TestChat:
    def write_template(self, generate: Command) -> None:
        (generate.target / "chat_template.jinja").write_text(
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if not enable_thinking %}!{% endif %}"
        )

    def test_options_reach_the_template(self, generate):
        self.write_template(generate)
        for more, text in (
            (["--template", "none"], "hi"), (["--template", "enable_thinking=true"], "[user]hi"),
            ([], "[user]hi!"),
        ):  # fmt: skip
            record = generate.record("--prompt", "hi", "--policy", "plain", *more, tokens=2)
            assert record["stats"]["prompt_tokens"] == len(text)

    def test_the_model_answers_between_two_turns_of_the_user(self, generate):
        self.write_template(generate)
        turns = [{"role": "user", "content": text} for text in ("hi", "and?")]
        file = generate.folder / "turns.jsonl"
        file.write_text(json.dumps({"id": "a", "messages": turns}))
        exit_code, out, _ = generate("--prompts", str(file), "--policy", "plain", "--json")
        first, second = (json.loads(line) for line in out.splitlines())
        assert (exit_code, first["id"], second["id"]) == (0, "a/1", "a/2")
        history = f"[user]hi[assistant]{first['text']}[user]and?!"
        assert second["stats"]["prompt_tokens"] == len(history.encode())
        (generate.target / "chat_template.jinja").write_text("{{ messages[0].content }}")
        arguments = ("--prompt", "hi", "--policy", "plain", "--template", "enable_thinking=false")
        exit_code, out, lines = generate(*arguments, tokens=2)
        assert (exit_code, out) == (2, "")
        assert "no option 'enable_thinking'" in lines[-1]


class TestPrompts:
    @pytest.fixture
    def read(self, tmp_path):
        def prompts(text: str) -> list:
            (tmp_path / "prompts.jsonl").write_text(text, encoding="utf-8")
            return read_prompts((), tmp_path / "prompts.jsonl")

        return prompts

    def test_turns_of_a_chat_and_other_line_ends(self, read):
        assert read('{"prompt": "a\u2028b\x85c"}\r\n') == [("line-1", "a\u2028b\x85c")]
        turns = [{"role": "user", "content": "ab"}]
        for content in ("ab", [{"type": "text", "text": one} for one in "ab"]):
            line = json.dumps({"messages": [{"role": "user", "content": content}]})
            assert read(line + "\n") == [("line-1", turns)]

    @pytest.mark.parametrize(("line", "message"), [
        *((line, r".*JSON") for line in ("no json", "[1]", "{}", '{"messages": []}')),
        *((line, r".*JSON") for line in ('{"prompt": null}', '{"prompt": 5}')),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "`prompt` beside"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "no text"),
    ])  # fmt: skip
    def test_a_bad_line_is_named(self, read, line, message):
        with pytest.raises(InputError, match=rf"prompts\.jsonl, line 2.*{message}"):
            read('{"prompt": "good"}\n' + line + "\n")
        with pytest.raises(InputError, match="there is no prompt"):
            read("\n\n")
