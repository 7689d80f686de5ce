"""The demo model as a GGUF file without quantisation, from the published file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_SHORT = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
_KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_gguf(source: Path, path: Path, dtype: str) -> None:
    """Write the GGUF file `source` again with its matrices in `dtype` and its vectors in float32.

    dtype  bfloat16, float16 or float32
    """
    gguf = _package()
    matrices = gguf.GGMLQuantizationType[_KINDS[dtype]]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType[_file_type(dtype)])
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


def _file_type(dtype: str) -> str:
    return "ALL_F32" if dtype == "float32" else f"MOSTLY_{_KINDS[dtype]}"


def _package() -> Any:
    import gguf

    return gguf
