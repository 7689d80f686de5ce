"""A benchmark result made by hand: believable numbers from a seed, no model, no clock."""

from collections.abc import Sequence
from dataclasses import replace

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
    fields={"torch_version": "2.13.0", "cpu_frequency_hz": 2.5961e9, "memory_bytes": 3 << 33,
            "governor": None},
    absent={"GPU": "no NVIDIA driver was found"},
    busy=("python train.py (1.9 cores)",),
)  # fmt: skip


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


def full_arms() -> tuple[Arm, ...]:
    """Every study that the harness knows, with two drafters and the peers."""
    arms = [PLAIN_ARM]
    for drafter in ("demo", "ngram"):
        arms += [policy_arm("chain", drafter), policy_arm("bastion", drafter)]
        arms += [policy_arm(f"fixed:{nodes}", drafter) for nodes in (1, 3, 7, 15, 31, 63)]
    for estimator in ("static", "ema", "ema+calib"):
        name = f"bastion[{estimator}]+demo"
        arms.append(policy_arm("bastion", name=name, variant=estimator, estimator=estimator,
                               studies=("estimator",)))  # fmt: skip
    arms.append(policy_arm("beam:4x15", studies=("shape",), nodes=60))
    arms.append(policy_arm("fixed:60", studies=("shape",), nodes=60))
    for policy, variant in (("static-tree:5x2", ""), ("dynatree", "no-history"), ("dynatree", "")):
        name = f"{policy}[{variant}]+demo" if variant else f"{policy}+demo"
        arms.append(policy_arm(policy, name=name, variant=variant, studies=("dynatree",)))
    for peer in ("plain", "prompt-lookup", "assisted"):
        arms.append(Arm(name=f"transformers:{peer}", kind="peer", policy=peer,
                        studies=("policies",), options={"do_sample": False}))  # fmt: skip
    return tuple(arms)


def make_result(
    arms: Sequence[Arm] | None = None,
    *,
    per_set: int = 6,
    repeats: int = 2,
    seed: int = 1,
    sets: Sequence[str] = SETS,
) -> Result:
    """A run of `arms` (all of them by default) over made prompts, the same for a seed."""
    generator = np.random.default_rng(seed)
    arms = full_arms() if arms is None else tuple(arms)
    prompts = tuple(
        Prompt(id=f"{name}/{index}", set=name, category="", hash=f"{name}{index}",
               tokens=int(generator.integers(40, 400)))
        for name in sets for index in range(per_set)
    )  # fmt: skip
    lengths = {prompt.id: int(generator.integers(20, NEW_TOKENS + 20)) for prompt in prompts}
    responses: list[Response] = []
    for repeat in range(repeats):
        for prompt in prompts:
            for arm in arms:
                response = _respond(arm, prompt, lengths[prompt.id], generator)
                responses.append(replace(response, repeat=repeat, place=len(responses)))
    drafters = tuple(dict.fromkeys(arm.drafter for arm in arms if arm.drafter is not None))
    return Result(
        environment=ENVIRONMENT,
        settings=record.BenchSettings(
            new_tokens=NEW_TOKENS, temperature=0.0, repeats=repeats, chat=True, seed=seed,
            dtype="bfloat16", runtime="eager", device="cpu",
            files=tuple(record.PromptFile(name=one, sha256="ab" * 32, prompts=80) for one in sets),
        ),
        target=Model(name="made/target-135m", hash="0123abcd", source="made"),
        drafters=tuple(Model(name=name, hash=f"hash-of-{name}") for name in drafters),
        profile=record.ProfileInfo(line="measured on the made device", sha256="cd" * 32,
                                   kind="measured", created_utc="2026-03-01T00:00:00Z"),
        arms=arms,
        prompts=prompts,
        responses=tuple(responses),
        warnings=("other processes were busy; stop them and run again",),
    )  # fmt: skip


def raw_rate(result: Result, arm: str, prompt_set: str | None = None) -> float:
    """Tokens after the first over seconds after the first, from the raw responses alone."""
    inside = {one.id for one in result.prompts if prompt_set in (None, one.set)}
    own = [one for one in result.responses if one.arm == arm and one.prompt in inside]
    tokens = sum(len(one.tokens) - one.first_tokens for one in own)
    return tokens / sum(one.total_s - one.first_token_s for one in own)


def _respond(arm: Arm, prompt: Prompt, wanted: int, generator: np.random.Generator) -> Response:
    """One response: the same tokens for every arm, times as drawn."""
    new_tokens = min(wanted, NEW_TOKENS)
    tokens = tuple((7 * index + prompt.tokens) % 49000 for index in range(new_tokens))
    finish = "eos" if wanted <= NEW_TOKENS else "length"
    first_token_s, decoded = 0.0004 * prompt.tokens, new_tokens - 1
    common = {"arm": arm.name, "prompt": prompt.id, "repeat": 0, "place": 0, "tokens": tokens,
              "finish": finish, "first_token_s": first_token_s}  # fmt: skip
    if arm.kind == "peer":
        gain = {"plain": 0.8, "prompt-lookup": 1.1, "assisted": 0.6}[arm.policy]
        rate = PLAIN_STEP_S * float(generator.normal(1.0, 0.02))
        return Response(total_s=first_token_s + decoded * rate / gain, **common)
    rounds, stages = _rounds(arm, decoded, generator)
    total_s = first_token_s + sum(rounds.cycle_s)
    return Response(total_s=total_s, limit_s=0.6 * PLAIN_STEP_S * decoded, stages=stages,
                    rounds=rounds, **common)  # fmt: skip


def _rounds(
    arm: Arm, decoded: int, generator: np.random.Generator
) -> tuple[Rounds, dict[str, float]]:
    """Rounds until so many tokens are there, each of the arm's nodes, and the stages' seconds."""
    rows, stages_s = [], np.zeros(5)
    done = 0
    while done < decoded:
        nodes = 0 if arm.kind == "plain" or done + 1 == decoded else arm.nodes or BLOCK
        depth = min(nodes, BLOCK, decoded - done - 1)
        accepted = int(generator.integers(depth + 1))
        parts_s = np.array([0.1 * (nodes > 0), 0.01, 1.0, 0.01, 0.01]) * PLAIN_STEP_S
        parts_s[2] *= float(generator.lognormal(0, 0.05))
        stages_s += parts_s
        cycle_s = 1.004 * float(parts_s.sum())
        rows.append((nodes, depth, accepted, 1 + depth / 2, float(parts_s[2]), cycle_s,
                     PLAIN_STEP_S, 1.2 * PLAIN_STEP_S))  # fmt: skip
        done += accepted + 1
    names = ("nodes", "depths", "accepted", "expected", "verify_s", "cycle_s",
             "predicted_verify_s", "predicted_cycle_s")  # fmt: skip
    stages = ("draft_s", "build_s", "verify_s", "accept_s", "commit_s")
    columns = zip(*rows, strict=True)
    return Rounds(**dict(zip(names, columns, strict=True))), dict(
        zip(stages, stages_s.tolist(), strict=True)
    )
