"""vLLM's settings from a plan: its command, with draft lengths by batch, or by batch and context.

Names of options are those of vLLM 0.32 (v1/spec_decode/dynamic/utils.py), which takes draft lengths
by batch only. A table by batch and context has the form of its open pull request 48944;
`integrations.vllm.CostScheduler` reads it until vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from costmodel.planning.acceptance import Acceptance
from costmodel.planning.exports import (
    NO_DIFFERENCE,
    Export,
    SettingsWriter,
    joined,
    one_option_a_line,
    step_s,
)
from costmodel.planning.servers import CONCURRENCIES, Server
from costmodel.planning.traffic import Traffic

KINDS = ("dflash", "dspark", "eagle3", "mtp", "ngram")  # of drafters, as its methods
NGRAM_LOOKUP = 4  # longest n-gram that is looked up, as in vLLM's own example
# The first range of contexts ends here, and each other one at twice the end of the one before.
_SHORT, _LONG = 512, 131_072
# Batches up to which each one is tried: rows then fill the kernels' tiles one by one.
_EACH = 16


def _write(
    export: Export, server: Server | None = None, synthetic: Acceptance | None = None
) -> list[str]:
    """The command; with a server, for its draft lengths by batch and context.

    synthetic  accepts drafts by chance, as this acceptance has it, whatever they are: for tests
    """
    request, best = export.request, export.best
    table, target = export.table, export.target
    options = [
        f"vllm serve {target}",
        f"--tensor-parallel-size {best.tensor_parallel}",
        *([f"--data-parallel-size {request.data_parallel}"] if request.data_parallel > 1 else ()),
        *(["--enable-expert-parallel"] if request.expert_parallel else ()),
        f"--max-num-seqs {table[-1][1]}",
        *export.precision_options,
    ]
    most = max(tokens for _, _, tokens in table)
    if not most:
        return [*one_option_a_line(options), f"# no --speculative-config: {export.why_plain}"]
    config: dict[str, Any] = {"method": export.kind("vLLM", KINDS)}
    if config["method"] == "ngram":
        config["prompt_lookup_max"] = NGRAM_LOOKUP
    elif config["method"] != "mtp":
        config["model"] = export.checkpoint
    config["num_speculative_tokens"] = most
    config["num_speculative_tokens_per_batch_size"] = table
    if synthetic is not None:
        config["rejection_sample_method"] = "synthetic"
        rates = np.diff(synthetic.chain)[:most]
        config["synthetic_acceptance_rates"] = [round(float(rate), 6) for rate in rates]
    options.append(f"--speculative-config '{json.dumps(config)}'")
    if server is None:
        return one_option_a_line(options)
    # vLLM prepares the lengths that the table by batch alone names, and no others.
    lengths = {0, *(tokens for _, _, tokens in table)}
    schedule = context_table(server, sorted(lengths), most_running=table[-1][1])
    options += [
        "--scheduler-cls integrations.vllm.CostScheduler",
        f"--additional-config '{json.dumps({'rooftree_schedule': schedule})}'",
    ]
    return [
        "# rooftree_schedule: [first batch, last batch, first context, last context, tokens], the",
        "# form of vLLM's open #48944, whose vLLM takes it in place of the table by batch alone",
        *one_option_a_line(options),
    ]


def context_table(server: Server, lengths: Sequence[int], *, most_running: int) -> list[list[int]]:
    """Rows of [first batch, last batch, first context, last context, drafted tokens].

    The ranges cover every batch to `most_running` and every context once; where the cache does not
    hold so many, the length of the longest context that it holds is repeated.
    lengths  draft lengths that may be chosen
    """
    tried = {*range(1, _EACH + 1), *CONCURRENCIES, most_running}
    batches = sorted(batch for batch in tried if batch <= most_running)
    room = server.cache_tokens()
    longest = max(min(room, _LONG), _SHORT)
    ends = [_SHORT * 2**power for power in range(int(np.log2(longest / _SHORT)) + 1)]
    firsts = [0, *(end + 1 for end in ends[:-1])]
    sizes = []
    for running in batches:
        middles = [0.75 * end for end in ends if 0.75 * end * running <= room] or [_SHORT]
        row = [_best_length(server, lengths, running, middle) for middle in middles]
        sizes.append(row + row[-1:] * (len(ends) - len(row)))
    return [
        [*batch, *context, tokens]
        for batch, row in joined(batches, most_running, sizes)
        for context, tokens in joined(firsts, ends[-1], row)
    ]


def _best_length(server: Server, lengths: Sequence[int], running: int, context: float) -> int:
    """The shortest draft within 1 % of the most tokens a second, without prompts."""
    traffic = Traffic(prompt_tokens=context, output_tokens=1)
    acceptance = server.acceptance
    rates = {0: 1 / step_s(server, traffic, running, 1, drafts=False)}
    for tokens in lengths:
        if acceptance is None or not 0 < tokens < len(acceptance.chain):
            continue
        if running * (tokens + 1) <= server.most_rows:
            seconds = step_s(server, traffic, running, tokens + 1)
            rates[tokens] = acceptance.committed("chain", tokens) / seconds
    most = max(rates.values())
    return min(tokens for tokens, rate in rates.items() if rate >= most * (1 - NO_DIFFERENCE))


def _writer(write: Callable[[Export], list[str]]) -> SettingsWriter:
    return SettingsWriter(
        engine="vllm", version="vLLM 0.32", write=write, by_batch=lambda kind: True
    )


BY_BATCH = _writer(_write)
BY_CONTEXT = _writer(lambda export: _write(export, export.best.server))
SYNTHETIC = _writer(lambda export: _write(export, synthetic=export.plan.acceptance))
