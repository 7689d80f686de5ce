"""The demo model as a GGUF file in bfloat16, with the weights of its Hugging Face folder.

python -m benchmarks.peers.gguf_file FILE
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

from decoder.target.demo_model import fetch_gguf

SHORT = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def convert(source: Path, path: Path) -> None:
    """Write `source` with its matrices in bfloat16 and its vectors in float32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for field in reader.fields.values():
        if not field.name.startswith(SHORT):
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = gguf.GGMLQuantizationType.BF16 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        convert(fetch_gguf(Path(work)), Path(sys.argv[1]))
