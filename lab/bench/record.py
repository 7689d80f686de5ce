"""A benchmark result as a file: settings, machine, models, arms, prompts, responses.

It holds measurements only; `lab.bench.analysis` derives figures from them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from costmodel.errors import InputError
from costmodel.io import read_json, write_atomic
from costmodel.profile.text import describe_error

SCHEMA_VERSION = 1
PLAIN = "plain"  # the arm that every result has
PEER = "transformers:"  # before the name of a peer
STUDIES = ("sweep", "shape", "estimator")

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]

ArmKind = Literal["plain", "policy", "peer"]
Finish = Literal["eos", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine, its state, and the versions of the software.

    fields  by name, from profiler/measure/machine.py: package versions, threads, governor, ...
    absent  reason by group of fields that could not be read
    busy    other processes that used more than a fifth of a core when the run began
    """

    created_utc: Name
    device: Name
    threads: int | None
    instruction_set: str | None
    fields: dict[str, str | int | float | bool | None]
    absent: dict[str, str] = field(default_factory=dict)
    busy: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """One file of prompts. Its name without the suffix is the name of the set."""

    name: Name
    sha256: Name
    prompts: AtLeastOne  # in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The settings of a run; two results can be compared where these agree.

    seed       of sampling (prompt and repeat are added), and of drafters that learn
    same_text  all arms but the peers wrote the text of plain decoding
    by_round   all arms but the peers decoded each prompt together, a round each in turn
    """

    new_tokens: AtLeastOne
    temperature: Seconds
    repeats: AtLeastOne
    chat: bool
    seed: Count
    files: tuple[PromptFile, ...]
    dtype: Name
    runtime: Name
    device: Name
    same_text: bool = False
    by_round: bool = False
    quantization: Name | None = None
    ignore_eos: bool = False
    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolUse:
    """The table of a paper that a run fills.

    row   the paper's target whose figures stand beside
    arms  names by the paper's method; of several the fastest of each set counts
    """

    name: Name
    row: Name
    arms: dict[str, tuple[Name, ...]]
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A target or drafter; `hash` is that of its architecture, as profiles use it.

    Only drafters have:
    kind        as ngram, dflash or specblock; causal for a language model, combined for several
    without     parts of the method that it lacks, as `no-shift` of a SpecBlock drafter
    block_size  of a DFlash drafter with a fixed block size
    updates     name of the updater between texts; empty without one
    same_as     the first drafter of the run with the same weights; None if it is this one
    """

    name: Name
    hash: Name
    source: str = ""
    weights: str = "pretrained"
    kind: str = ""
    without: tuple[str, ...] = ()
    block_size: AtLeastOne | None = None
    updates: str = ""
    same_as: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileInfo:
    """The profile that the adaptive arms read; `sha256` leaves out drafter costs."""

    line: str
    sha256: Name
    kind: Name
    created_utc: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of decoding.

    name       unique, and the same in every run: `plain`, `fixed:16+ngram`,
               `bastion[ema]+ngram`, `transformers:prompt-lookup`
    policy     what `--policy` takes, or the peer's name
    drafter    name of one of the result's drafters
    updates    name of its drafter's updater between texts
    variant    the change to the policy's defaults; empty without one
    studies    the groups of arms it belongs to: policies, sweep, shape, estimator
    nodes      size of a fixed tree; None where the policy chooses the size
    estimator  mode of the online correction of the cost model; None without a cost model
    options    arguments of a peer's `generate`
    engine     name of one of the result's engines; None for an arm in the run's own process
    """

    name: Name
    kind: ArmKind
    policy: Name
    drafter: str | None = None
    variant: str = ""
    studies: tuple[str, ...] = ()
    updates: str = ""
    nodes: AtLeastOne | None = None
    estimator: str | None = None
    cost: str = ""
    options: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    engine: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Another inference engine.

    versions   by distribution
    precision  of weights and computation
    model      name of its file or folder; empty for the target's own or one converted for the run
    """

    name: Name
    versions: dict[str, str]
    precision: Name
    model: str = ""
    options: dict[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedArm:
    """An arm that ended at this prompt (None: at its start); its texts are left out."""

    name: Name
    prompt: Name | None
    answered: Count
    reason: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt; `tokens` counts its token ids and `hash` is of them."""

    id: Name
    set: Name
    category: str
    tokens: AtLeastOne
    hash: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The rounds of one response, in arrays of one length.

    nodes, depths      of the verified tree; 0 for a plain step
    accepted           accepted levels of the tree, those after the end of the text included
    expected           predicted committed length: 1 + the sum of the tree's path scores
    verify_s, cycle_s  seconds of the target's forward and of the whole round
    predicted_*        by the cost model before the round; empty without one
    """

    nodes: tuple[Count, ...]
    depths: tuple[Count, ...]
    accepted: tuple[Count, ...]
    expected: tuple[Finite, ...]
    verify_s: tuple[Seconds, ...]
    cycle_s: tuple[Seconds, ...]
    predicted_verify_s: tuple[Seconds, ...] = ()
    predicted_cycle_s: tuple[Seconds, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.nodes)
        for name in ("depths", "accepted", "expected", "verify_s", "cycle_s"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} must have one entry a round ({count})")
        for name in ("predicted_verify_s", "predicted_cycle_s"):
            if len(getattr(self, name)) not in (0, count):
                raise ValueError(f"{name} must have one entry a round ({count}), or none")
        rounds = zip(self.nodes, self.depths, self.accepted, strict=True)
        for index, (nodes, depth, accepted) in enumerate(rounds):
            if not min(nodes, 1) <= depth <= nodes:
                raise ValueError(f"depths[{index}] is {depth}, of a tree of {nodes} nodes")
            if accepted > depth:
                raise ValueError(f"accepted[{index}] is {accepted}, of a tree {depth} deep")

    @property
    def count(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An arm's update of its drafter between two texts.

    action    use of the text for training
    rollback  whether weights were restored to the last good ones
    """

    seconds: Seconds
    action: Literal["skip", "heads", "full"]
    trained: bool
    rollback: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One prompt decoded once by one arm, timed and counted alike for all arms.

    place              position in the order in which all responses were made
    tokens             token ids from the first new one, a reached end token included, cut at the
                       settings' `new_tokens`
    first_tokens       tokens that came with the first one; more than 1 only for peers that draft
                       in the prefill
    finish             `eos` where the last token ends the text, else `length`
    first_token_s      from the call until the first token; total_s until the last
    limit_s            least seconds of its plain steps, by the physical roofline at the profile's
                       peaks; None without a profile
    stages             seconds of each stage over all rounds; empty for peers, as rounds are None
    update             after the text; None for arms whose drafter does not learn
    """

    arm: Name
    prompt: Name
    repeat: Count
    place: Count
    tokens: tuple[Count, ...]
    finish: Finish
    first_token_s: Seconds
    total_s: Seconds
    limit_s: Seconds | None = None
    first_tokens: AtLeastOne = 1
    stages: dict[str, Seconds] = field(default_factory=dict)
    rounds: Rounds | None = None
    update: Update | None = None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens must not be empty")
        if self.first_tokens > len(self.tokens):
            raise ValueError("first_tokens must not be more than there are tokens")
        if self.total_s < self.first_token_s:
            raise ValueError("total_s must not be less than first_token_s")

    @property
    def new_tokens(self) -> int:
        return len(self.tokens)

    @property
    def decoded_tokens(self) -> int:
        """Tokens after the first one and those that came with it."""
        return len(self.tokens) - self.first_tokens

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.total_s - self.first_token_s

    @property
    def occupied_s(self) -> float:
        """Seconds until the arm could take the next text, its update included."""
        return self.total_s + (0.0 if self.update is None else self.update.seconds)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.arm, self.prompt, self.repeat


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run: every arm has answered every prompt in every repeat.

    failed    arms that did not; they are not among `arms`
    warnings  reasons to doubt the figures, each with a remedy
    """

    schema_version: Literal[1] = 1
    environment: Environment
    settings: BenchSettings
    target: Model
    drafters: tuple[Model, ...]
    profile: ProfileInfo | None
    arms: tuple[Arm, ...]
    prompts: tuple[Prompt, ...]
    responses: tuple[Response, ...]
    engines: tuple[EngineInfo, ...] = ()
    failed: tuple[FailedArm, ...] = ()
    warnings: tuple[str, ...] = ()
    protocol: ProtocolUse | None = None

    def __post_init__(self) -> None:
        for kind, names in (
            ("arms", [one.name for one in (*self.arms, *self.failed)]),
            ("engines", [engine.name for engine in self.engines]),
            ("prompts", [prompt.id for prompt in self.prompts]),
            ("drafters", [drafter.name for drafter in self.drafters]),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{kind}: '{twice}' is there twice")
        for kind, parts in (("drafter", self.drafters), ("engine", self.engines)):
            names = {None, *(one.name for one in parts)}
            for arm in self.arms:
                if (name := getattr(arm, kind)) not in names:
                    raise ValueError(f"arms: '{arm.name}' has an unknown {kind} '{name}'")
        if PLAIN not in {arm.name for arm in self.arms}:
            raise ValueError(f"arms: '{PLAIN}' is missing")
        self._check_responses()

    def _check_responses(self) -> None:
        wanted = {
            (arm.name, prompt.id, repeat)
            for arm in self.arms
            for prompt in self.prompts
            for repeat in range(self.settings.repeats)
        }
        most = self.settings.new_tokens
        for index, response in enumerate(self.responses):
            if response.key not in wanted:
                raise ValueError(f"responses[{index}]: {response.key} is unknown or there twice")
            wanted.discard(response.key)
            if response.new_tokens > most:
                raise ValueError(f"responses[{index}]: more than {most} tokens")
        if wanted:
            raise ValueError(f"responses: {len(wanted)} are missing, as {min(wanted)}")

    @cached_property
    def _by_arm(self) -> dict[str, tuple[Response, ...]]:
        order = {prompt.id: index for index, prompt in enumerate(self.prompts)}
        by_arm: dict[str, list[Response]] = {arm.name: [] for arm in self.arms}
        for response in sorted(self.responses, key=lambda one: (order[one.prompt], one.repeat)):
            by_arm[response.arm].append(response)
        return {name: tuple(responses) for name, responses in by_arm.items()}

    def of(self, arm: str) -> tuple[Response, ...]:
        """An arm's responses by prompt and repeat. Raises InputError for an unknown one."""
        if arm not in self._by_arm:
            names = ", ".join(self._by_arm)
            raise InputError(f"there is no arm '{arm}'", hint=f"There are {names}.")
        return self._by_arm[arm]

    def arm(self, name: str) -> Arm:
        self.of(name)
        return next(arm for arm in self.arms if arm.name == name)

    def study(self, name: str) -> tuple[Arm, ...]:
        """The arms of one study, in the order of the run."""
        return tuple(arm for arm in self.arms if name in arm.studies)

    @property
    def sets(self) -> tuple[str, ...]:
        """The prompt sets in the order of the run."""
        return tuple(dict.fromkeys(prompt.set for prompt in self.prompts))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values in the order of the fields."""
        return asdict(self)


_HINT = "Give a file that `rooftree bench --output` of this version wrote."


def read_result(path: str | Path) -> Result:
    """Read and check a result. Raises InputError naming the file, the field and the problem."""
    data = read_json(Path(path), hint=_HINT)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise InputError(
            f"{path}: is not a bench result: schema_version must be {SCHEMA_VERSION}"
            f" (is {version!r})",
            hint=_HINT,
        )
    try:
        return TypeAdapter(Result).validate_json(json.dumps(data), strict=True)
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
        problem = " ".join(describe_error(errors[0]).split())
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise InputError(f"{path}: {problem}{more}", hint=_HINT) from None


def write_result(result: Result, path: str | Path, **derived: Any) -> None:
    """Write the result and the `derived` fields, which `read_result` ignores, in one step."""
    text = json.dumps(result.as_dict() | derived, allow_nan=False, separators=(",", ":"))
    write_atomic(Path(path), text + "\n", InputError)
