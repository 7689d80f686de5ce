"""A benchmark's result as data: what was run, on what, and every response it gave.

Only what was measured is kept; figures are derived from it (profiler/bench/figures.py), so
that another reader can derive others. profiler/bench/store.py reads and writes it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from costmodel.errors import InputError

SCHEMA_VERSION = 1
PLAIN = "plain"  # the arm that every result has

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]

ArmKind = Literal["plain", "policy", "peer"]
Finish = Literal["eos", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine, its state and the versions that the numbers belong to.

    fields  by name, from profiler/device.py: package versions, threads, governor, ...
    absent  why a group of fields is not there
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
    """One file of prompts: its name without the suffix names the set."""

    name: Name
    sha256: Name
    prompts: AtLeastOne  # in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for; two results can be compared where these agree.

    seed       which prompts of a file are taken, of sampling (prompt and repeat are added), and
               of the exploration of drafters that are updated
    same_text  every arm of ours wrote the text of plain decoding
    by_round   our arms decoded each prompt together, a round each in turn
    """

    new_tokens: AtLeastOne
    temperature: Seconds
    repeats: AtLeastOne
    chat: bool
    seed: Count
    per_file: AtLeastOne | None
    files: tuple[PromptFile, ...]
    dtype: Name
    runtime: Name
    device: Name
    max_nodes: AtLeastOne | None = None
    acceptance: str = "auto"
    stage_times: bool = False
    same_text: bool = False
    by_round: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A target or drafter; `hash` is that of its architecture, as profiles use it.

    Of drafters alone:
    kind        ngram, dflash, blockpilot, specblock, eagle3, causal or combined; empty: another
    without     parts of its kind that it lacks, as `no-shift` of a SpecBlock drafter
    block_size  of a DFlash drafter that always drafts the same
    updates     how it is updated between texts; empty where it is not
    same_as     the first drafter of the run that has its weights, where that is another one
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
    """The profile that the adaptive arms read.

    line    one line: where it lies and what it is, or what was probed in its place
    sha256  of its content without the costs of drafters, which a run may add
    """

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
    drafter    the name of one of the result's drafters; None where nothing drafts
    updates    how its drafter is updated between texts; empty where it is not
    variant    what is changed of the policy's defaults, empty where nothing is
    studies    the groups of arms it belongs to: policies, sweep, shape, estimator, dynatree
    nodes      of a tree of fixed size; None where the size is chosen
    estimator  how measured times correct the cost model; None without one
    cost       one line: where the cost model came from
    options    of a peer: what its `generate` was called with
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as the target sees it; `hash` is of its token ids."""

    id: Name
    set: Name
    category: str
    tokens: AtLeastOne
    hash: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What each round of one response did; arrays of one length.

    nodes, depths      of the tree that was verified; 0 for a plain step
    accepted           levels accepted of it, those behind the end of the text included
    expected           1 + the sum of its path scores: the predicted committed length
    verify_s, cycle_s  seconds of the target's forward and of the whole round
    predicted_*        by the cost model as it stood before the round; empty without one
    expected_by_depth  not by round: path scores at depth 1, 2, ... summed over all rounds,
                       the predicted number of rounds that accept so deep
    """

    nodes: tuple[Count, ...]
    depths: tuple[Count, ...]
    accepted: tuple[Count, ...]
    expected: tuple[Finite, ...]
    verify_s: tuple[Seconds, ...]
    cycle_s: tuple[Seconds, ...]
    predicted_verify_s: tuple[Seconds, ...] = ()
    predicted_cycle_s: tuple[Seconds, ...] = ()
    expected_by_depth: tuple[Finite, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.nodes)
        for name in ("depths", "accepted", "expected", "verify_s", "cycle_s"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} must have one entry a round ({count})")
        for name in ("predicted_verify_s", "predicted_cycle_s"):
            if len(getattr(self, name)) not in (0, count):
                raise ValueError(f"{name} must have one entry a round ({count}), or none")
        if len(self.expected_by_depth) != max(self.depths, default=0):
            raise ValueError("expected_by_depth must have one entry a depth of the deepest tree")
        for index, (accepted, depth) in enumerate(zip(self.accepted, self.depths, strict=True)):
            if accepted > depth:
                raise ValueError(f"accepted[{index}] is {accepted}, of a tree {depth} deep")

    @property
    def count(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an arm did with its drafter behind a text, before it was ready for the next one.

    seconds   of all of it, the decision included
    action    skip, heads or full: what the text was kept for
    trained   whether weights were updated now
    rollback  whether they went back to the last good ones
    """

    seconds: Seconds
    action: Literal["skip", "heads", "full"]
    trained: bool
    rollback: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One prompt decoded once by one arm. The same clock and the same counting for all arms.

    place              of this response in the order in which all were made
    tokens             token ids from the first new one, the end token included where it was
                       reached, cut at the settings' `new_tokens`
    first_tokens       tokens that came at once with the first one: 1, but peers that draft
                       already in the prefill may have more
    finish             `eos` where the last token ends the text, else `length`
    first_token_s      from the call until the first token was there (prefill, set-up)
    total_s            from the call until the last token was there
    limit_s            what the plain steps of this response would take at the bandwidth
                       limit: the physical roofline at the profile's peaks; None without them
    stages             seconds of each stage over all rounds; empty for peers
    peak_memory_bytes  of the device's allocator, on a CPU of the process; None if unknown
    rounds             None for peers, which do not tell
    update             behind the text; None for arms whose drafter stays as it is
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
    peak_memory_bytes: AtLeastOne | None = None
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
        """Tokens that came after the first one and those that came with it."""
        return len(self.tokens) - self.first_tokens

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.total_s - self.first_token_s

    @property
    def occupied_s(self) -> float:
        """Seconds until the arm could take the next text: its update is paid for too."""
        return self.total_s + (0.0 if self.update is None else self.update.seconds)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.arm, self.prompt, self.repeat


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run: every arm has answered every prompt in every repeat.

    warnings  what to know before believing the figures, each with what to do about it
    """

    schema_version: Literal[1] = 1
    environment: Environment
    settings: Settings
    target: Model
    drafters: tuple[Model, ...]
    profile: ProfileInfo | None
    arms: tuple[Arm, ...]
    prompts: tuple[Prompt, ...]
    responses: tuple[Response, ...]
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind, names in (
            ("arms", [arm.name for arm in self.arms]),
            ("prompts", [prompt.id for prompt in self.prompts]),
            ("drafters", [drafter.name for drafter in self.drafters]),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{kind}: '{twice}' is there twice")
        drafters = {None, *(drafter.name for drafter in self.drafters)}
        for arm in self.arms:
            if arm.drafter not in drafters:
                raise ValueError(f"arms: '{arm.name}' has an unknown drafter '{arm.drafter}'")
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
        given = [response.key for response in self.responses]
        for index, key in enumerate(given):
            if key not in wanted:
                raise ValueError(f"responses[{index}]: {key} is unknown or there twice")
            wanted.discard(key)
        if wanted:
            raise ValueError(f"responses: {len(wanted)} are missing, as {min(wanted)}")
        most = self.settings.new_tokens
        for index, response in enumerate(self.responses):
            if response.new_tokens > most:
                raise ValueError(f"responses[{index}]: more than {most} tokens")

    @cached_property
    def _by_arm(self) -> dict[str, tuple[Response, ...]]:
        found: dict[str, list[Response]] = {arm.name: [] for arm in self.arms}
        for response in self.responses:
            found[response.arm].append(response)
        order = {prompt.id: index for index, prompt in enumerate(self.prompts)}
        return {
            name: tuple(sorted(own, key=lambda one: (order[one.prompt], one.repeat)))
            for name, own in found.items()
        }

    def of(self, arm: str) -> tuple[Response, ...]:
        """An arm's responses by prompt and repeat, in the same order for every arm.

        Raises InputError that lists the arms.
        """
        if arm not in self._by_arm:
            names = ", ".join(self._by_arm)
            raise InputError(f"there is no arm '{arm}'", hint=f"There are {names}.")
        return self._by_arm[arm]

    def arm(self, name: str) -> Arm:
        self.of(name)
        return next(arm for arm in self.arms if arm.name == name)

    def study(self, name: str) -> tuple[Arm, ...]:
        """The arms of one group, in the order of the run."""
        return tuple(arm for arm in self.arms if name in arm.studies)

    @property
    def sets(self) -> tuple[str, ...]:
        """The prompt sets in the order of the run."""
        return tuple(dict.fromkeys(prompt.set for prompt in self.prompts))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values in the order of the fields."""
        return asdict(self)
