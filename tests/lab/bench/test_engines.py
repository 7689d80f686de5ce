"""Other engines as peers: options, processes that fail, model files."""

import sys
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import InputError
from decoder.model.demo_model import DEMO_NAME
from lab.bench.engines.model_file import check_model, is_gguf, write_gguf
from lab.bench.engines.requested import InstalledEngine, look_into, requested_engines
from lab.bench.record import Result, read_result
from tests.lab.commands.test_bench import Place
from tests.tiny_folder import isolate

ROOT = Path(__file__).parents[3]
STUB = ROOT / "tests" / "data" / "stub_engine.py"


@pytest.fixture
def stub(tmp_path: Path) -> str:
    """An interpreter with llama.cpp, as far as a run can tell."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" "$@"\n')
    path.chmod(0o755)
    return str(path)


class EnginePlace(Place):
    """With three prompts, an engine, and a file that begins as GGUF files do."""

    policies, new_tokens = ("chain", "transformers:none"), 8

    def __init__(self, folder: Path, stub: str) -> None:
        super().__init__(folder)
        self.stub, self.output, self.gguf = stub, folder / "out.json", folder / "model.gguf"
        self.files = [self.write("letters", *((f"p{i}", "ab" * i) for i in range(1, 4)))]
        self.gguf.write_bytes(b"GGUF and more")

    def arguments(self, *more: str) -> list[str]:
        words = ("--engine", f"llama.cpp={self.stub}", "--output", str(self.output))
        return super().arguments(*words, *self.option(f"model={self.gguf}"), *more)

    def option(self, words: str) -> tuple[str, str]:
        return "--engine-option", f"llama.cpp:{words}"

    def result(self, option: str) -> Result:
        assert self.bench(*self.option(option)) == 0
        return read_result(self.output)


@pytest.fixture
def place(tmp_path: Path, stub: str, monkeypatch: pytest.MonkeyPatch) -> EnginePlace:
    isolate(monkeypatch, tmp_path)
    return EnginePlace(tmp_path, stub)


class TestRuns:
    def test_arms_of_an_engine_are_timed_like_others(self, place: EnginePlace) -> None:
        result = place.result("late=true")
        names = ["plain", "chain+ngram", "llama.cpp:plain", "llama.cpp:ngram-mod"]
        assert [arm.name for arm in result.arms] == names and not result.failed
        (engine,) = result.engines
        assert engine.versions == {"xllamacpp": "1.2.3"} and engine.model == "model.gguf"
        assert engine.options == {"late": True}
        assert engine.precision == "weights as its model file has them"
        for response in result.of("llama.cpp:ngram-mod"):
            assert response.tokens == (3,) * 8 and response.first_tokens == 1
            assert 0 < response.first_token_s < response.total_s
            assert response.rounds is None

    @pytest.mark.parametrize(("fails", "reason"), [
        ("exits", "its process ended with exit code 7: MemoryError: no room"),
        ("killed", "its process was ended by SIGKILL"),
        ("stops", "its text ended after 4 of 8 tokens without an end token"),
    ])  # fmt: skip
    def test_an_engine_that_fails_is_a_row_and_the_rest_goes_on(self, place, fails, reason, capsys):
        result = place.result(f"fails={fails}")
        (failed,) = result.failed
        assert (failed.name, failed.prompt, failed.answered) == ("llama.cpp:ngram-mod", "p2", 1)
        assert failed.reason == reason
        assert [arm.name for arm in result.arms] == ["plain", "chain+ngram", "llama.cpp:plain"]
        assert len(result.of("llama.cpp:plain")) == 3
        captured = capsys.readouterr()
        row = next(line for line in captured.out.splitlines() if "ngram-mod" in line)
        assert row.split()[:2] == ["llama.cpp:ngram-mod", "failed"]
        assert f"failed at prompt 'p2', after 1 texts, which are left out: {reason}" in captured.err


REFUSED = [
    (("sglang",), (), "'sglang' is not an engine. Use vllm, openvino, llama.cpp."),
    (("vllm", "vllm=p"), (), "the engine vllm is named twice"),
    (("vllm",), (("openvino", "model", "x"),), "of an engine that does not run"),
    (("vllm",), (("vllm", "modes", "ngram-3,tree-5"),), "'tree-5' is not a mode of vllm"),
    (("vllm",), (("vllm", "modes", "ngram"),), "'ngram' is not a mode of vllm"),
    (("vllm",), (("vllm", "model", "x"),), "vllm takes the target itself"),
]


@pytest.mark.parametrize(("engines", "options", "message"), REFUSED)
def test_what_cannot_be_asked_for_is_named(engines, options, message) -> None:
    with pytest.raises(InputError) as raised:
        requested_engines(engines, options)
    assert message in str(raised.value)


def test_an_interpreter_without_the_engine(stub: str) -> None:
    (requested,) = requested_engines([f"openvino={stub}"], [])
    with pytest.raises(InputError, match="has no package openvino_genai") as raised:
        look_into(requested)
    assert "pip install openvino-genai" in raised.value.hint


@pytest.mark.parametrize(("engine", "model", "target", "message"), [
    ("llama.cpp", None, "Qwen/Qwen3-8B", "convert_hf_to_gguf.py Qwen/Qwen3-8B --outtype bf16"),
    ("llama.cpp", "none.gguf", DEMO_NAME, "none.gguf is not a GGUF file"),
    ("llama.cpp", "other.bin", DEMO_NAME, "other.bin is not a GGUF file"),
    ("openvino", None, "Qwen/Qwen3-8B", "--weight-format fp16 --model Qwen/Qwen3-8B FOLDER"),
    ("openvino", ".", "Qwen/Qwen3-8B", ". is not a folder with openvino_model.xml"),
])  # fmt: skip
def test_a_missing_model_is_named(engine, model, target, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.bin").write_bytes(b"\x00" * 9)
    options = [] if model is None else [(engine, "model", model)]
    (requested,) = requested_engines([engine], options)
    installed = InstalledEngine(
        requested=requested, python="python", exports=False, prefix=Path("/"), versions={}
    )
    with pytest.raises(InputError) as raised:
        check_model(installed, target)
    assert message in str(raised.value)


@pytest.mark.parametrize("more", [("--temperature", "1"), ("--dtype", "int8")])
def test_engines_decode_greedily_with_the_targets_weights(place: EnginePlace, more, capsys) -> None:
    assert place.bench(*more) == 2
    line = capsys.readouterr().err
    assert "engines decode at temperature 0" in line or "target's own weights" in line
    assert line.count("\n") == 1


def test_a_gguf_file_keeps_its_fields_and_values(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    source, path = tmp_path / "quantised.gguf", tmp_path / "plain.gguf"
    matrix = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    norm = np.linspace(0, 1, 64, dtype=np.float32)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(30)
    writer.add_token_list(["a", "b"])
    kind = gguf.GGMLQuantizationType.Q8_0
    quantised = gguf.quants.quantize(matrix, kind)
    writer.add_tensor("matrix", quantised, raw_dtype=kind)
    writer.add_tensor("norm", norm)
    for part in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, part)()
    write_gguf(source, path, "float32")
    assert is_gguf(path)
    reader = gguf.GGUFReader(path)
    assert reader.fields["llama.block_count"].contents() == 30
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert np.array_equal(tensors["norm"].data, norm)
    scale_error = np.abs(matrix).max() / 127
    assert np.allclose(tensors["matrix"].data, matrix, atol=scale_error)
    write_gguf(source, path, "bfloat16")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds == {"matrix": "BF16", "norm": "F32"}
