"""What NVIDIA's own planner predicts for the servers of `lab.studies.capacity_accuracy`.

    pip install --target DIR 'aiconfigurator==0.12.*'
    PYTHONPATH=DIR python -m lab.studies.nvidia_planner

The planner (Apache-2.0) is not a dependency: its predictions are stored, about 20 minutes on one
core. It is asked for each row's engine, devices, lengths, batch and quantised products, all else at
its defaults. Where it says that the target does not fit, null is stored.
"""

from __future__ import annotations

import csv
import importlib
import json
import logging
from importlib.metadata import version
from typing import Any

from costmodel.compose.aiconfigurator import data_folder
from lab.studies.capacity_accuracy import MODELS, PLANNER, QUANTISED, SYSTEMS

# Names of the configurations that come with the planner, which needs no hub for these.
BUNDLED = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
}


def predict_ms(estimate: Any, line: dict[str, str]) -> float | None:
    """Milliseconds per output token, or None where the planner refuses."""
    options = {"gemm_quant_mode": line["gemm_quant_mode"]} if line["gemm_quant_mode"] else {}
    try:
        found = estimate(
            BUNDLED.get(line["model_path"], line["model_path"]),
            line["system"],
            backend_name=line["backend"],
            isl=int(line["isl"]),
            osl=int(line["osl"]),
            batch_size=int(line["batch_size"]),
            tp_size=int(line["tp_size"]),
            **options,
        )
    except RuntimeError as refusal:
        if "OOM" not in str(refusal):
            raise
        return None
    return round(float(found.tpot), 4)


def main() -> None:
    estimate = importlib.import_module("aiconfigurator.cli.api").cli_estimate
    logging.disable(logging.CRITICAL)
    path = data_folder().parent / "silicon_sample.csv"
    with path.open(encoding="utf-8", newline="") as stream:
        lines = [
            line
            for line in csv.DictReader(stream)
            if line["model_path"] in MODELS | QUANTISED
            and line["system"] in SYSTEMS
            and line["mode"] == "agg"
        ]
    found = {line["id"]: predict_ms(estimate, line) for line in lines}
    result = {"planner": f"aiconfigurator {version('aiconfigurator')}", "tpot_ms": found}
    PLANNER.write_text(json.dumps(result, indent=0) + "\n", encoding="utf-8")
    print(f"stored {PLANNER}")


if __name__ == "__main__":
    main()
