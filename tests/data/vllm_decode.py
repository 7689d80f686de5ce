"""Greedy texts of one vLLM engine after the other, a line of JSON each.

An arm is `plain`, has draft lengths by a table (`table`), or by the profile at a path.
"""

import json
import os
import sys
from collections import Counter

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

from integrations.vllm.configuration import speculative_options

PROMPTS = [
    "one two three four one two three four one two",
    "The cat sat on the mat. The cat sat on the",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
]


def decode(folder: str, arm: str) -> None:
    options = {}
    if arm != "plain":
        table = {"rooftree_schedule": [[1, 2, 0, 24, 2], [1, 2, 25, 288, 5]]}  # 2 tokens, then 5
        options = {
            "speculative_config": speculative_options("ngram", 7),
            "scheduler_cls": "integrations.vllm.CostScheduler",
            "additional_config": table if arm == "table" else {"rooftree_profile": arm},
        }
    llm = LLM(
        model=folder,
        dtype="float32",
        max_model_len=288,
        max_num_seqs=2,
        enforce_eager=True,
        enable_prefix_caching=False,
        distributed_executor_backend="mp",  # as in a server
        **options,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    verified: Counter[int] = Counter()
    asked: set[int] = set()
    pilot = getattr(scheduler, "pilot", None)
    if pilot is not None:
        choose = pilot.choose

        def noted(decoding):
            choice = choose(decoding)
            verified.update(choice.verified.values())
            asked.add(choice.draft_tokens)
            return choice

        pilot.choose = noted
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    print(
        json.dumps(
            {
                "texts": [list(output.outputs[0].token_ids) for output in outputs],
                "verified": sum(length * count for length, count in verified.items()),
                "asked": sorted(asked),
                "piloted": getattr(scheduler, "pilot", None) is not None,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    for arm in sys.argv[2:]:
        decode(sys.argv[1], arm)
