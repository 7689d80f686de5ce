"""Benchmark results made by hand, and believable ones from a seed: no model, no clock."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lab.bench import record
from lab.bench.record import Arm, Model, Prompt, Response, Result, Rounds

SETS = ("gsm8k", "humaneval", "mt_bench")
NEW_TOKENS = 64
PLAIN_STEP_S = 0.030
BLOCK = 7  # depth of a draft

PLAIN_ARM = Arm(name="plain", kind="plain", policy="plain", studies=("policies",))

ENVIRONMENT = record.Environment(
    created_utc="2026-03-04T05:06:07Z",
    device="Made CPU 3000 (16 cores)",
    threads=2,
    instruction_set="avx512",
    fields={},
    absent={},
)


def policy_arm(policy: str, drafter: str = "demo", **changes: object) -> Arm:
    """An arm such as `fixed:16+demo`, in the study `policies` unless told otherwise."""
    defaults: dict[str, object] = {"studies": ("policies",)}
    if policy.startswith("fixed:"):
        defaults = {"studies": ("sweep",), "nodes": int(policy[6:])}
    elif policy == "bastion":
        defaults = {"studies": ("policies",), "estimator": "ema+calib", "cost": "made"}
    return replace(
        Arm(name=f"{policy}+{drafter}", kind="policy", policy=policy, drafter=drafter),
        **(defaults | changes),
    )


def arm(name: str, **changed: Any) -> Arm:
    kind = "plain" if name == "plain" else "policy"
    return Arm(**{"name": name, "kind": kind, "policy": name.partition("+")[0]} | changed)


def prompt(name: str, prompt_set: str = "set", tokens: int = 3) -> Prompt:
    return Prompt(id=name, set=prompt_set, category="", tokens=tokens, hash=f"hash-{name}")


def settings(**changed: Any) -> record.BenchSettings:
    usual: dict[str, Any] = {
        "new_tokens": 64, "temperature": 0.0, "repeats": 1, "chat": False, "seed": 0, "files": (),
        "dtype": "float32", "runtime": "eager", "device": "cpu",
    }  # fmt: skip
    return record.BenchSettings(**usual | changed)


def response(arm_name: str, prompt_id: str, tokens: int, decode_s: float, **more: Any) -> Response:
    """`tokens` tokens, the first of them after 1 s and the last `decode_s` later."""
    usual: dict[str, Any] = {
        "arm": arm_name, "prompt": prompt_id, "repeat": 0, "place": 0, "finish": "length",
        "tokens": tuple(range(tokens)), "first_token_s": 1.0, "total_s": 1.0 + decode_s,
    }  # fmt: skip
    return Response(**usual | more)


def rounds(nodes: Sequence[int], accepted: Sequence[int], depths=None, **more: Any) -> Rounds:
    """Rounds of chains, unless `depths` says otherwise; every forward takes 10 ms."""
    count = len(nodes)
    usual: dict[str, Any] = {
        "nodes": tuple(nodes), "depths": tuple(nodes if depths is None else depths),
        "accepted": tuple(accepted), "expected": (1.0,) * count, "verify_s": (0.01,) * count,
        "cycle_s": (0.02,) * count,
    }  # fmt: skip
    return Rounds(**usual | more)


def result(arms: Sequence[Arm], prompts, responses, **changed: Any) -> Result:
    labels = dict.fromkeys(one.drafter for one in arms if one.drafter is not None)
    usual: dict[str, Any] = {
        "environment": ENVIRONMENT, "settings": settings(),
        "target": Model(name="target", hash="t" * 16),
        "drafters": tuple(Model(name=label, hash=label) for label in labels), "profile": None,
        "arms": tuple(arms), "prompts": tuple(prompts), "responses": tuple(responses),
    }  # fmt: skip
    return Result(**usual | changed)


def make_result(arms: Sequence[Arm], *, per_set=6, repeats=2, sets=SETS) -> Result:
    """A run of `arms` over made prompts."""
    generator = np.random.default_rng(1)
    pairs = [(name, index) for name in sets for index in range(per_set)]
    prompts = [prompt(f"{s}/{i}", s, int(generator.integers(40, 400))) for s, i in pairs]
    lengths = {one.id: int(generator.integers(20, NEW_TOKENS + 20)) for one in prompts}
    responses: list[Response] = []
    for repeat in range(repeats):
        for one in prompts:
            for own in arms:
                answer = _respond(own, one, lengths[one.id], generator)
                responses.append(replace(answer, repeat=repeat, place=len(responses)))
    return result(
        arms, prompts, responses, settings=settings(new_tokens=NEW_TOKENS, repeats=repeats)
    )


def raw_rate(of: Result, arm_name: str, prompt_set: str | None = None) -> float:
    """Tokens after the first over seconds after the first, from the raw responses alone."""
    inside = {one.id for one in of.prompts if prompt_set in (None, one.set)}
    own = [one for one in of.responses if one.arm == arm_name and one.prompt in inside]
    tokens = sum(len(one.tokens) - one.first_tokens for one in own)
    return tokens / sum(one.total_s - one.first_token_s for one in own)


def _respond(own: Arm, to: Prompt, wanted: int, generator: np.random.Generator) -> Response:
    """One response: the same tokens for every arm, times as drawn."""
    new_tokens = min(wanted, NEW_TOKENS)
    tokens = tuple((7 * index + to.tokens) % 49000 for index in range(new_tokens))
    finish = "eos" if wanted <= NEW_TOKENS else "length"
    first_token_s, decoded = 0.0004 * to.tokens, new_tokens - 1
    common = {"arm": own.name, "prompt": to.id, "repeat": 0, "place": 0, "tokens": tokens,
              "finish": finish, "first_token_s": first_token_s}  # fmt: skip
    if own.kind == "peer":
        gain = {"plain": 0.8, "prompt-lookup": 1.1, "assisted": 0.6}[own.policy]
        rate = PLAIN_STEP_S * float(generator.normal(1.0, 0.02))
        return Response(total_s=first_token_s + decoded * rate / gain, **common)
    made, stages = _rounds(own, decoded, generator)
    total_s = first_token_s + sum(made.cycle_s)
    return Response(total_s=total_s, limit_s=0.6 * PLAIN_STEP_S * decoded, stages=stages,
                    rounds=made, **common)  # fmt: skip


def _rounds(own: Arm, decoded: int, generator) -> tuple[Rounds, dict[str, float]]:
    """Rounds until so many tokens are there, each of the arm's nodes, and the stages' seconds."""
    rows, done = [], 0
    while done < decoded:
        nodes = 0 if own.kind == "plain" or done + 1 == decoded else own.nodes or BLOCK
        depth = min(nodes, BLOCK, decoded - done - 1)
        accepted = int(generator.integers(depth + 1))
        rows.append((nodes, accepted, depth, PLAIN_STEP_S * float(generator.lognormal(0, 0.05))))
        done += accepted + 1
    *columns, verify_s = zip(*rows, strict=True)
    cycle_s = tuple(1.1 * seconds for seconds in verify_s)
    draft_s = 0.1 * PLAIN_STEP_S * np.count_nonzero(columns[0])
    stages = {"draft_s": float(draft_s), "verify_s": sum(verify_s)}
    return rounds(*columns, verify_s=verify_s, cycle_s=cycle_s), stages
