"""The target in an engine's own format: the named one, or a conversion."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from costmodel.errors import InputError
from decoder.model.demo_model import DEMO_NAME, fetch_gguf
from lab.bench.engines.requested import InstalledEngine, RequestedEngine

_SHORT = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_EXPORT = "optimum-cli export openvino --task text-generation-with-past --weight-format"
_EXPORT_LIMIT_S = 3600.0


def check_model(engine: InstalledEngine, target: str) -> None:
    """Raise InputError where the model in the engine's format is neither there nor can be made."""
    name, model, wanted = (getattr(engine.requested, one) for one in ("name", "model", "kind"))
    path = None if model is None else Path(model).expanduser()
    if name == "openvino":
        export = f"Write it with `{_EXPORT} fp16 --model {target} FOLDER`"
        if path is not None and not (path / "openvino_model.xml").is_file():
            raise InputError(f"{model} is not {wanted.model}", hint=f"{export}.")
        if path is None and not engine.exports:
            raise InputError(
                f"OpenVINO needs {wanted.model}, and {engine.python} has no optimum-intel"
                " to write it",
                hint=f"{export}, and give --engine-option openvino:model=FOLDER.",
            )
    elif name == "llama.cpp":
        script, option = "convert_hf_to_gguf.py", "--engine-option llama.cpp:model=FILE."
        if path is not None and not (path.is_file() and is_gguf(path)):
            raise InputError(
                f"{model} is not {wanted.model}",
                hint=f"Write it with llama.cpp's {script} --outtype bf16.",
            )
        if path is None and target != DEMO_NAME:
            raise InputError(
                f"llama.cpp needs {wanted.model}, and only the demo model's can be made here",
                hint=f"Write it with llama.cpp's `{script} {target} --outtype bf16`, and give"
                f" {option}",
            )
        if path is None and find_spec("gguf") is None:
            raise InputError(
                "writing the demo model as a GGUF file needs the package gguf",
                hint=f"pip install gguf, or give {option}",
            )


def engine_model(engine: InstalledEngine, source: str, dtype: str, work: Path) -> str:
    """The path that the engine loads; converts into the folder `work` where none is named.

    source  folder or hub id of the target's weights
    Raises InputError where the conversion fails.
    """
    requested = engine.requested
    if requested.model is not None:
        return str(Path(requested.model).expanduser().absolute())
    if requested.name == "openvino":
        return str(_export(engine.python, source, dtype, work))
    if requested.name == "llama.cpp":
        write_gguf(fetch_gguf(work), work / "model.gguf", dtype)
        return str(work / "model.gguf")
    return source


def precision(requested: RequestedEngine, dtype: str) -> str:
    """The precision of an engine's weights and computation, in words."""
    if requested.name == "vllm":
        return dtype
    weights = {"openvino": _exported(dtype), "llama.cpp": dtype}[requested.name]
    weights = (
        f"{weights} weights" if requested.model is None else "weights as its model file has them"
    )
    return weights if requested.name == "llama.cpp" else f"{weights}, computed in {dtype}"


def _exported(dtype: str) -> str:
    """The dtype of weights that optimum-intel exports; it has no bfloat16."""
    return "float32" if dtype == "float32" else "float16"


def _export(python: str, source: str, dtype: str, work: Path) -> Path:
    folder = work / "openvino"
    weights = {"float32": "fp32", "float16": "fp16"}[_exported(dtype)]
    arguments = ["-m", "optimum.commands.optimum_cli", *_EXPORT.split()[1:], weights]
    command = [python, *arguments, "--model", source, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_EXPORT_LIMIT_S
    )
    if done.returncode != 0 or not (folder / "openvino_model.xml").is_file():
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(
            f"optimum-intel could not export {source}: {reason}",
            hint="Export it by hand, and give --engine-option openvino:model=FOLDER.",
        )
    return folder


def write_gguf(source: Path, path: Path, dtype: str) -> None:
    """Write the GGUF file `source` again with its matrices in `dtype` and its vectors in float32.

    dtype  bfloat16, float16 or float32
    """
    import gguf

    matrices = gguf.GGMLQuantizationType[_KINDS[dtype]]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_file_type(
        gguf.LlamaFileType["ALL_F32" if dtype == "float32" else f"MOSTLY_{_KINDS[dtype]}"]
    )
    for field in reader.fields.values():
        if not field.name.startswith(_SHORT):
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = matrices if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
