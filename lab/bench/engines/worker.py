"""One engine in a process of its own, which decodes prompts that come on standard input.

    PYTHON worker.py ENGINE OPTIONS

PYTHON is an interpreter that has the engine; nothing of this project is imported. OPTIONS is a JSON
object with

model, dtype, threads, context  as their names say; `context` is the longest text in tokens
ends                            token ids that end a text
mode                            null for plain decoding, else [name, number] of a way to draft
drafter                         folder of the drafter for vLLM's mode `dflash`
arguments                       further arguments of the engine

A line `{"ids": [...], "new_tokens": N}` asks for a greedy continuation. The answer is a line with a
list of token ids whenever there are new ones, null for one that is not known yet, and then an
object: empty, or with all ids as `text` where some were null. The first answer is `{}` when the
engine has started. Nothing else is written to standard output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any
from urllib.request import Request, urlopen

Put = Callable[[list[Any]], None]
# Prompt ids, new tokens -> all ids where some were put as None.
Decode = Callable[[list[int], int, Put], "list[int] | None"]


def vllm(options: dict[str, Any]) -> Decode:
    """vLLM in process, which gives new tokens after each step. Modes: ngram, dflash."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = {
        "enforce_eager": True,  # compilation takes minutes
        "enable_prefix_caching": False,  # prompts share their chat template's head
        "max_num_seqs": 1,
        "max_model_len": options["context"],
    }
    if options["mode"] is not None:
        method, tokens = options["mode"]
        speculation = {"method": method, "num_speculative_tokens": tokens}
        speculation |= (
            {"prompt_lookup_max": 3} if method == "ngram" else {"model": options["drafter"]}
        )
        arguments["speculative_config"] = speculation
    given = arguments | options["arguments"]
    engine = LLM(options["model"], dtype=options["dtype"], **given).llm_engine

    def decode(ids: list[int], new_tokens: int, put: Put) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, stop_token_ids=options["ends"],
            ignore_eos=True,  # the ends are named
            detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        engine.add_request("text", {"prompt_token_ids": ids}, sampling)
        while engine.has_unfinished_requests():
            for result in engine.step():
                put(list(result.outputs[0].token_ids))

    return decode


def openvino(options: dict[str, Any]) -> Decode:
    """OpenVINO GenAI. Mode: prompt-lookup."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    class Streamer(genai.StreamerBase):
        def __init__(self, put: Put) -> None:
            super().__init__()
            self._put = put

        def write(self, token: Any) -> Any:
            self._put([int(one) for one in token] if isinstance(token, list) else [int(token)])
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            return

    precision = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[options["dtype"]]
    properties = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    properties["INFERENCE_NUM_THREADS"] = options["threads"]
    if options["mode"] is not None:
        properties["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(options["model"], "CPU", **(properties | options["arguments"]))

    def decode(ids: list[int], new_tokens: int, put: Put) -> None:
        config = genai.GenerationConfig(max_new_tokens=new_tokens, do_sample=False)
        config.apply_chat_template = False
        config.stop_token_ids = set(options["ends"])
        config.ignore_eos = not options["ends"]
        config.eos_token_id = next(iter(options["ends"]), -1)
        if options["mode"] is not None:
            config.num_assistant_tokens, config.max_ngram_size = options["mode"][1], 3
        tokens = ov.Tensor(np.asarray([ids], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        pipeline.generate(genai.TokenizedInputs(tokens, mask), config, Streamer(put))

    return decode


def llama(options: dict[str, Any]) -> Decode:
    """llama.cpp's server, which listens on this machine alone. Modes: its draftless types."""
    import xllamacpp as xlc

    params = xlc.CommonParams()
    params.model.path = options["model"]
    params.n_ctx, params.n_parallel, params.cache_prompt = options["context"], 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    if options["mode"] is not None:
        kind = options["mode"][0].upper().replace("-", "_")
        types = xlc.common_speculative_type
        params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    for name, value in options["arguments"].items():
        setattr(params, name, value)
    server = xlc.Server(params)

    def post(body: dict[str, Any]) -> Any:
        sent = Request(f"{server.listening_address}/completion", json.dumps(body).encode())
        return urlopen(sent)

    def decode(ids: list[int], new_tokens: int, put: Put) -> list[int] | None:
        body = {
            "prompt": ids,
            "n_predict": new_tokens,
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": False,
            "ignore_eos": not options["ends"],
            "return_tokens": True,
        }
        sent, gaps = 0, False
        with post(body | {"stream": True}) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                # Tokens inside a character of several are counted, but their ids are not sent.
                unknown = event["tokens_predicted"] - sent - len(event["tokens"])
                sent, gaps = event["tokens_predicted"], gaps or unknown > 0
                if event["tokens"] or unknown:
                    put([None] * unknown + event["tokens"])
        if not gaps:
            return None
        with post(body) as answer:  # after the last token, so outside the time that counts
            return [int(token) for token in json.load(answer)["tokens"]]

    return decode


def main() -> None:
    engine, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines write to standard output

    def send(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    engines = {"vllm": vllm, "openvino": openvino, "llama.cpp": llama}
    decode = engines[engine](json.loads(options))
    send({})
    for line in sys.stdin:
        request = json.loads(line)
        text = decode(request["ids"], request["new_tokens"], send)
        send({} if text is None else {"text": text})
    os._exit(0)  # engines' threads may not end by themselves


if __name__ == "__main__":
    main()
