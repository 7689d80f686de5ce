"""TensorRT-LLM's settings from a plan: its command and options file, with draft lengths by batch.

Names of options are those of TensorRT-LLM 1.2, and 1.3.0rc27 for DFlash, MTP and PARD
(llmapi/llm_args.py). In 1.2 a length holds from its batch on, and up to its batch in later sources;
both ends of each range are written, so that both readings are the same.
"""

from __future__ import annotations

from costmodel.planning.exports import Export, SettingsWriter, one_option_a_line, written_file

# Its names of drafters; the schedule holds for the last three from a later version on.
NAMES = {"ngram": "NGram", "eagle3": "Eagle3", "dflash": "DFlash", "mtp": "MTP", "pard": "PARD"}
NGRAM_LOOKUP = 4  # longest n-gram that is looked up


def _write(export: Export) -> list[str]:
    request, best = export.request, export.best
    table, target = export.table, export.target
    options = [
        f"trtllm-serve {target}",
        f"--tp_size {best.tensor_parallel}",
        f"--max_batch_size {table[-1][1]}",
    ]
    config = ["kv_cache_config:", "  dtype: fp8"] if request.precision.cache == "fp8" else []
    notes, most = [], table[0][2]
    if most:
        kind = export.kind("TensorRT-LLM", tuple(NAMES))
        config += ["speculative_config:", f"  decoding_type: {NAMES[kind]}"]
        if kind == "ngram":
            config.append(f"  max_matching_ngram_size: {NGRAM_LOOKUP}")
        elif kind != "mtp":
            config.append(f"  speculative_model: {export.checkpoint}")
        ends = {batch: size for first, last, size in table for batch in (first, last)}
        schedule = ", ".join(f"{batch}: {size}" for batch, size in ends.items())
        config += [f"  max_draft_len: {most}", f"  draft_len_schedule: {{{schedule}}}"]
    else:
        notes = [f"# no speculative_config: {export.why_plain}"]
    if not config:
        return [*one_option_a_line(options), *notes]
    options.append("--extra_llm_api_options options.yaml")
    return [*written_file("options.yaml", *config), *one_option_a_line(options), *notes]


COMMAND = SettingsWriter(
    engine="trtllm",
    version="TensorRT-LLM 1.2",
    versions=dict.fromkeys(("dflash", "mtp", "pard"), "TensorRT-LLM 1.3.0rc27"),
    write=_write,
    by_batch=lambda kind: True,
)
