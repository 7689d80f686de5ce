"""`rooftree generate`: prompts in, text or JSON out, and what it says of its profile."""

import json
from pathlib import Path

import pytest

from costmodel.errors import InputError
from profiler import cli
from profiler.commands.generate import read_prompts
from tests.tiny_folder import isolate, write_all

pytestmark = pytest.mark.cpu_kind

PROMPT = "hällo hällo"


class Command:
    """Calls of the command on a tiny target with a data directory of its own."""

    def __init__(self, folder: Path, home: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.home, self._capture = folder, home, capture
        write_all(folder / "tiny")

    def __call__(self, *more: str, tokens: int = 12) -> tuple[int, str, list[str]]:
        arguments = [
            "generate", "--target", str(self.folder / "tiny"), "--device", "cpu",
            "--dtype", "float32", "--max-new-tokens", str(tokens), *more,
        ]  # fmt: skip
        self._capture.readouterr()
        exit_code = cli.run(arguments)
        captured = self._capture.readouterr()
        return exit_code, captured.out, captured.err.splitlines()

    def record(self, *more: str, **options: int) -> dict:
        exit_code, out, lines = self(*more, "--json", **options)
        assert exit_code == 0, lines
        return json.loads(out)


@pytest.fixture
def generate(tmp_path, monkeypatch, capsys):
    return Command(tmp_path, isolate(monkeypatch, tmp_path), capsys)


class TestOutput:
    def test_text_and_json_agree(self, generate):
        record = generate.record("--prompt", PROMPT, "--policy", "fixed:6")
        assert sorted(record) == ["id", "schema_version", "stats", "text", "token_ids"]
        assert record["id"] == "prompt-0"
        assert len(record["token_ids"]) == record["stats"]["new_tokens"] == 12
        exit_code, out, lines = generate("--prompt", PROMPT, "--policy", "fixed:6")
        assert (exit_code, out) == (0, record["text"] + "\n")
        assert lines == ["policy fixed:6 needs no profile"]

    def test_busy_processes_are_named_first(self, generate, monkeypatch):
        monkeypatch.setattr("profiler.measure.machine.disturbances", lambda: ["miner is busy"])
        exit_code, _, lines = generate("--prompt", "ab", "--policy", "plain")
        assert (exit_code, lines[0]) == (0, "warning: miner is busy")

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

    def test_ends_are_ignored_if_wanted(self, generate):
        file = generate.folder / "tiny" / "generation_config.json"
        file.write_text(json.dumps({"eos_token_id": list(range(260))}))
        for more, tokens in ((), 1), (("--ignore-eos",), 12):
            record = generate.record("--prompt", PROMPT, "--policy", "fixed:6", *more)
            assert len(record["token_ids"]) == tokens

    def test_seeds(self, generate):
        options = ("--prompt", PROMPT, "--policy", "fixed:5", "--temperature", "2")
        drawn = (generate.record(*options, "--seed", seed, tokens=30) for seed in "112")
        one, again, other = (record["token_ids"] for record in drawn)
        assert one == again != other

    def test_top_k_and_stops_reach_the_decoder(self, generate):
        options = ("--prompt", PROMPT, "--policy", "plain")
        greedy = generate.record(*options)
        warm = generate.record(*options, "--temperature", "2", "--top-k", "1")
        assert warm["token_ids"] == greedy["token_ids"]
        end = greedy["text"][4:6]
        stopped = generate.record(*options, "--stop", "never", "--stop", end)
        assert stopped["text"] == greedy["text"][: greedy["text"].index(end)]


class TestChat:
    def write_template(self, generate: Command) -> None:
        (generate.folder / "tiny" / "chat_template.jinja").write_text(
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

    def test_a_template_without_the_option_says_so(self, generate):
        (generate.folder / "tiny" / "chat_template.jinja").write_text("{{ messages[0].content }}")
        arguments = ("--prompt", "hi", "--policy", "plain", "--template", "enable_thinking=false")
        exit_code, out, lines = generate(*arguments, tokens=2)
        assert (exit_code, out) == (2, "")
        assert "no option 'enable_thinking'" in lines[-1]


class TestPrompts:
    def write(self, folder: Path, text: str) -> Path:
        file = folder / "prompts.jsonl"
        file.write_text(text, encoding="utf-8")
        return file

    def test_other_line_ends_may_stand_in_a_text(self, tmp_path):
        file = self.write(tmp_path, '{"prompt": "one\u2028two\x85three"}\r\n')
        assert read_prompts((), file) == [("line-1", "one\u2028two\x85three")]

    def test_turns_of_a_chat(self, tmp_path):
        turns = [{"role": "user", "content": "ab"}]
        for content in ("ab", [{"type": "text", "text": one} for one in "ab"]):
            line = json.dumps({"messages": [{"role": "user", "content": content}]})
            assert read_prompts((), self.write(tmp_path, line + "\n")) == [("line-1", turns)]

    @pytest.mark.parametrize(("line", "message"), [
        *((line, r".*JSON") for line in ("no json", "[1]", "{}", '{"messages": []}')),
        *((line, r".*JSON") for line in ('{"prompt": null}', '{"prompt": 5}')),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "`prompt` beside"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "no text"),
    ])  # fmt: skip
    def test_a_bad_line_is_named(self, tmp_path, line, message):
        with pytest.raises(InputError, match=rf"prompts\.jsonl, line 2.*{message}"):
            read_prompts((), self.write(tmp_path, '{"prompt": "good"}\n' + line + "\n"))

    def test_no_prompt_at_all(self, tmp_path):
        with pytest.raises(InputError, match="there is no prompt"):
            read_prompts((), None)
        with pytest.raises(InputError, match="there is no prompt"):
            read_prompts((), self.write(tmp_path, "\n\n"))
