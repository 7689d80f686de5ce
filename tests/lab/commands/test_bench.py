"""`rooftree bench` on a tiny target: a run, its files, going on after a kill, and bad input."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from costmodel.errors import InputError
from lab.bench.prompts import read_files
from lab.bench.record import Result, read_result
from profiler import cli
from tests.tiny_folder import isolate, listing, write_all

ARMS = {
    "plain", "chain+ngram", "fixed:3+ngram", "fixed:6+ngram", "transformers:plain",
    "transformers:prompt-lookup",
}  # fmt: skip
NEW_TOKENS = 12


class Place:
    """A tiny target and two prompt files, and a data directory to itself."""

    policies, new_tokens = ("chain", "fixed:3", "fixed:6"), NEW_TOKENS

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = str(write_all(folder / "tiny"))
        letters = self.write("letters", ("a", "abababab"), ("b", "cdcdcd"))
        self.files = [letters, self.write("numbers", ("n", "12 12 12 12"))]

    def write(self, name: str, *prompts: tuple[str, str]) -> Path:
        lines = [json.dumps({"id": i, "category": name, "prompt": text}) for i, text in prompts]
        path = self.folder / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    def arguments(self, *more: str) -> list[str]:
        words = ["bench", "--target", self.target, "--device", "cpu", "--dtype", "float32"]
        words += [word for path in self.files for word in ("--prompts", str(path))]
        words += [word for policy in self.policies for word in ("--policy", policy)]
        return [*words, "--new-tokens", str(self.new_tokens), *more]

    def bench(self, *more: str) -> int:
        return cli.run(self.arguments(*more))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("bench")
        isolate(patch, folder)
        yield Place(folder)


@pytest.fixture(scope="module")
def ran(place: Place) -> Result:
    output = place.folder / "out.json"
    assert place.bench("--output", str(output)) == 0
    return read_result(output)


@pytest.mark.slow
class TestRun:
    def test_every_arm_gives_the_plain_texts(self, ran: Result) -> None:
        assert {arm.name for arm in ran.arms} == ARMS
        texts = [one.tokens for one in ran.of("plain")]
        assert {len(tokens) for tokens in texts} == {NEW_TOKENS}
        for name in ARMS:
            assert [one.tokens for one in ran.of(name)] == texts
        assert [prompt.set for prompt in ran.prompts] == ["letters", "letters", "numbers"]
        assert [one.place for one in ran.responses] == list(range(18))

    def test_the_file_holds_the_figures_and_no_local_path(self, place: Place, ran: Result) -> None:
        text = (place.folder / "out.json").read_text()
        assert str(place.folder) not in text
        summary = json.loads(text)["summary"]
        assert {one["arm"] for one in summary["arms"]} == ARMS
        assert set(summary["sets"]) == {"letters", "numbers"}
        (sweep,) = summary["hindsight"]
        assert [size["nodes"] for size in sweep["sizes"]] == [0, 3, 6]

    def test_a_paper_s_protocol(self, place: Place, capsys) -> None:
        data, output = place.folder / "data", place.folder / "paper.json"
        data.mkdir()
        lines = [json.dumps({"prompt": text}) for text in ("abab", "cdcd")]
        (data / "humaneval.jsonl").write_text("\n".join(lines) + "\n")
        words = ["bench", "--protocol", "specblock", "--data", str(data), "--samples", "1"]
        words += ["--target", place.target, "--drafter", f"causal={place.target}"]
        words += ["--new-tokens", "6", "--device", "cpu", "--dtype", "float32"]
        assert cli.run([*words, "--output", str(output)]) == 0
        shown = capsys.readouterr()
        assert "specblock:1 of meta-llama/Llama-3.1-8B-Instruct, filled by tiny" in shown.out
        lacking = "specblock:1: no set in data: math500 (problem), alpaca (instruction), nq_open"
        assert shown.err.startswith(lacking)
        result = read_result(output)
        assert [prompt.id for prompt in result.prompts] == ["humaneval-0"]
        assert result.protocol is not None and result.protocol.arms == {"SpS": ("chain+tiny",)}
        assert "humaneval: 1 of 2 prompts, not 164 of 164" in result.protocol.differs
        assert "causal: tiny, not meta-llama/Llama-3.2-1B" in result.protocol.differs
        assert str(place.folder) not in output.read_text()

    def test_arms_together_on_one_text(self, place: Place, ran: Result, capsys) -> None:
        output = place.folder / "same.json"
        assert place.bench("--same-text", "--by-round", "--output", str(output)) == 0
        heading = "our arms writing plain decoding's text, round by round in turn"
        assert heading in capsys.readouterr().out
        result = read_result(output)
        assert result.settings.same_text and result.settings.by_round
        texts, others = ({o.key: o.tokens for o in one.responses} for one in (result, ran))
        assert texts == others

    def test_show(self, place: Place, ran: Result, capsys: pytest.CaptureFixture[str]) -> None:
        path = str(place.folder / "out.json")
        assert cli.run(["bench", "show", path]) == 0
        shown = capsys.readouterr()
        assert all(name in shown.out for name in ARMS)
        assert "warning: only 3 prompts" in shown.err


def test_the_template_is_stored_and_later_turns_follow_answers(tmp_path, monkeypatch) -> None:
    isolate(monkeypatch, tmp_path)
    place = Place(tmp_path)
    (tmp_path / "tiny" / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if not thinking %}!{% endif %}"
    )
    tokenizer = AutoTokenizer.from_pretrained(place.target)
    turns = [{"role": "user", "content": text} for text in ("hi", "and?")]
    place.files = [tmp_path / "turns.jsonl"]
    place.files[0].write_text(json.dumps({"id": "t", "messages": turns}))
    for template, mark in (("thinking=false", "!"), ("thinking=true", "")):
        output = tmp_path / f"{template}.json"
        words = ("--template", template, "--policy", "transformers:none", "--output", str(output))
        assert place.bench(*words) == 0
        result = read_result(output)
        assert (result.settings.chat, result.settings.template) == (True, {"thinking": not mark})
        answer = tokenizer.decode(result.of("plain")[0].tokens, skip_special_tokens=True)
        history = f"[user]hi[assistant]{answer}[user]and?{mark}"
        lengths = {"t/1": len(f"[user]hi{mark}"), "t/2": len(history.encode())}
        assert {one.id: one.tokens for one in result.prompts} == lengths


def test_texts_of_full_length(tmp_path, monkeypatch) -> None:
    isolate(monkeypatch, tmp_path)
    place = Place(tmp_path)
    place.files = place.files[1:]
    ends = {"eos_token_id": list(range(260))}  # each token would end a text
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps(ends))
    output = tmp_path / "out.json"
    assert place.bench("--ignore-eos", "--output", str(output)) == 0
    result = read_result(output)
    assert {one.arm for one in result.responses} == ARMS and result.settings.ignore_eos
    assert {(one.new_tokens, one.finish) for one in result.responses} == {(NEW_TOKENS, "length")}


class TestRefused:
    """One line, a code of 2, and nothing written."""

    def refused(self, capture: pytest.CaptureFixture[str], place: Place, *words: str) -> str:
        before = self.files(place)
        capture.readouterr()
        assert cli.run(words) == 2
        (line,) = capture.readouterr().err.splitlines()
        assert self.files(place) == before
        return line

    def files(self, place: Place) -> set[str]:
        return {name for name in listing(place.folder) if "locks/" not in name}

    @pytest.mark.parametrize(("more", "message"), [
        (("--prompts", "none.jsonl"), r"none\.jsonl: there is no such file"),
        (("--data", "."), r"--data needs --protocol"),
        (("--protocol", "ddtree"), r"--prompts does not go with --protocol"),
        (("--policy", "transformers:vllm"), r"'transformers:vllm' is no arm"),
        (("--new-tokens", "0"), r"'--new-tokens'"),
        (("--drafter", ""), r"the drafter's name is empty"),
        (("--same-text", "--temperature", "1"), r"text of plain decoding .* temperature 0 only"),
        (("--new-tokens", "250"), r"prompt 'a' of letters: a prompt of 8 tokens and 250 new"),
    ])  # fmt: skip
    def test_options(self, place, capsys, more: tuple[str, ...], message: str) -> None:
        assert re.search(message, self.refused(capsys, place, *place.arguments(*more)))

    def test_files_that_are_no_results(self, place, capsys) -> None:
        none = str(place.folder / "none.json")
        assert "there is no such file" in self.refused(capsys, place, "bench", "show", none)
        other = str(place.folder / "tiny" / "config.json")
        assert "is not a bench result" in self.refused(capsys, place, "bench", "show", other)


@pytest.mark.parametrize(("text", "message"), [
    ("", "holds no prompt"),
    ('{"prompt": "a"}\nnonsense', "line 2 cannot be read as JSON"),
    ('{"prompt": 3}', "line 1 is not a JSON object with a text `prompt`"),
    ('\n{"prompt": "  "}', "line 2: the prompt is empty"),
    (
        '{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}',
        "line 2: the id 'x' is that of line 1 too",
    ),
])  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_files([path])
    assert message in str(error.value)
    assert str(path) in str(error.value)
