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
    hardness = {prompt.id: generator.uniform(0.45, 0.85) for prompt in prompts}
    lengths = {prompt.id: int(generator.integers(20, NEW_TOKENS + 20)) for prompt in prompts}
    responses: list[Response] = []
    for repeat in range(repeats):
        for prompt in prompts:
            for arm in arms:
                response = _respond(arm, prompt, hardness[prompt.id], lengths[prompt.id], generator)
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


def verify_seconds(nodes: int, context: int) -> float:
    """What a forward of the made target costs: a floor, a slope and steps of 16 rows."""
    return PLAIN_STEP_S * (1 + 0.02 * (-(-(nodes + 1) // 16) * 16 - 16)) + context * 2e-6


def _respond(
    arm: Arm, prompt: Prompt, hardness: float, wanted: int, generator: np.random.Generator
) -> Response:
    """One response: the same tokens for every arm, times from the made costs."""
    new_tokens = min(wanted, NEW_TOKENS)
    tokens = tuple((7 * index + prompt.tokens) % 49000 for index in range(new_tokens))
    finish = "eos" if wanted <= NEW_TOKENS else "length"
    rate = PLAIN_STEP_S * float(generator.normal(1.0, 0.02))
    common = {"arm": arm.name, "prompt": prompt.id, "repeat": 0, "place": 0, "tokens": tokens,
              "finish": finish, "first_token_s": 0.0004 * prompt.tokens}  # fmt: skip
    decoded = new_tokens - 1
    if arm.kind == "peer":
        gain = {"plain": 0.8, "prompt-lookup": 1.1, "assisted": 0.6}[arm.policy]
        total_s = common["first_token_s"] + decoded * rate / gain
        return Response(total_s=total_s, **common)
    rounds, stages = _rounds(arm, prompt, hardness, decoded, generator)
    total_s = common["first_token_s"] + sum(rounds.cycle_s)
    return Response(total_s=total_s, limit_s=0.6 * PLAIN_STEP_S * decoded, stages=stages,
                    rounds=rounds, **common)  # fmt: skip


def _rounds(
    arm: Arm, prompt: Prompt, hardness: float, decoded: int, generator: np.random.Generator
) -> tuple[Rounds, dict[str, float]]:
    columns: dict[str, list[float]] = {name: [] for name in (
        "nodes", "depths", "accepted", "expected", "verify_s", "cycle_s",
        "predicted_verify_s", "predicted_cycle_s")}  # fmt: skip
    stages = dict.fromkeys(("draft_s", "build_s", "verify_s", "accept_s", "commit_s"), 0.0)
    done = 0
    while done < decoded:
        sure = float(np.clip(hardness + generator.normal(0, 0.12), 0.05, 0.97))
        nodes, depth = _size(arm, sure, generator)
        depth = min(depth, decoded - done - 1)
        nodes = 0 if depth == 0 else nodes
        good = sure * (1 if arm.drafter == "demo" else 0.75) * (nodes > 0)
        widened = good + (1 - good) * min(0.5, 0.1 * np.log2(1 + nodes / BLOCK))
        chances = widened ** np.arange(1, depth + 1)
        accepted = int((generator.random(depth) < widened).cumprod().sum())
        verify_s = verify_seconds(nodes, prompt.tokens + done)
        noisy_s = verify_s * float(generator.lognormal(0, 0.05))
        draft_s = {"demo": 0.006, "ngram": 0.0004}.get(arm.drafter or "", 0.0) * (nodes > 0)
        parts = (draft_s, 2e-5 * nodes, noisy_s, 3e-4, 2e-4)
        for stage, seconds in zip(stages, parts, strict=True):
            stages[stage] += seconds
        row = (nodes, depth, accepted, 1 + 0.9 * float(chances.sum()), noisy_s, sum(parts) * 1.004,
               verify_s, draft_s + verify_s + 5e-4)  # fmt: skip
        for name, value in zip(columns, row, strict=True):
            columns[name].append(value)
        done += accepted + 1
    return Rounds(**{name: tuple(values) for name, values in columns.items()}), stages


def _size(arm: Arm, sure: float, generator: np.random.Generator) -> tuple[int, int]:
    """(nodes, depth) of the tree that the made policy of an arm would verify."""
    if arm.kind == "plain":
        return 0, 0
    if arm.policy == "chain":
        return BLOCK, BLOCK
    if arm.nodes is not None:
        return arm.nodes, min(arm.nodes, BLOCK)
    return (0, 0) if sure < 0.2 else (int(generator.choice([7, 15, 15, 15, 31])), BLOCK)
