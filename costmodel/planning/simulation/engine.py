"""Step-by-step simulation of one server with continuous batching.

A server is one rank, or several that share experts, to which requests are dealt in turn. Before
each step it admits waiting requests in the order of arrival, as far as sequences and cache allow. A
step decodes every running request once and fills its remaining tokens with prompts, cut into
chunks. (An engine that never mixes the two runs prompts alone while there are any.) The last chunk
gives the first token of the answer.

An engine that admits by the whole answer holds the cache for it. Another admits by the prompt; when
the answers outgrow the cache, the last request to decode is evicted, and prefills all its tokens
again before others are admitted. Of each prompt the engine's share of prefix hits is not computed.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from costmodel.errors import InputError
from costmodel.planning.engines import EngineRules
from costmodel.planning.simulation.steps import PLAIN, Speculation, StepTime
from costmodel.planning.traffic import Trace
from costmodel.statistics import Array

_DRAWN_AT_ONCE = 4096
# A queue grows if more requests than this wait at the last arrival.
_OVERLOAD_SHARE, _OVERLOAD_LEAST = 0.02, 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedServer:
    """Limits of a server: the engine's rules, tokens of cache, sequences at once.

    `held_tokens` gives the tokens of the cache that a sequence of so many takes. Cache and
    sequences are those of each of `ranks`. A request reaches the engine `front_s` after it arrives.
    """

    rules: EngineRules
    cache_tokens: float
    max_sequences: int = 256
    held_tokens: Callable[[float], float] = float
    ranks: int = 1
    front_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulationResult:
    """Times in seconds of every request [requests], and of idle spells [spells, (start, end)]."""

    requests: Trace
    admitted_s: Array
    first_s: Array
    last_s: Array
    idle_s: Array
    steps: int

    @property
    def arrival_s(self) -> Array:
        return self.requests.arrival_s

    @property
    def waiting_s(self) -> Array:
        return self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> Array:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> Array:
        """Seconds a token after the first; NaN for answers of one token."""
        further = self.requests.output_tokens - 1
        spent_s = self.last_s - self.first_s
        return np.where(further > 0, spent_s / np.maximum(further, 1), np.nan)

    @property
    def overloaded(self) -> bool:
        """Whether the queue was growing when the last request arrived."""
        count = len(self.requests)
        waiting = int(np.sum(self.admitted_s > self.arrival_s[-1]))
        return waiting > max(_OVERLOAD_SHARE * count, _OVERLOAD_LEAST)

    def busy_share(self, start_s: float, end_s: float) -> float:
        """Share of the time from `start_s` to `end_s` (later) in which a step ran."""
        spells_s = np.clip(self.idle_s, start_s, end_s)
        idle_s = float(np.sum(spells_s[:, 1] - spells_s[:, 0]))
        return 1.0 - idle_s / (end_s - start_s)


def simulate(
    requests: Trace,
    server: SimulatedServer,
    step_s: StepTime,
    speculation: Speculation = PLAIN,
    generator: np.random.Generator | None = None,
) -> SimulationResult:
    """Serve all requests; equal requests and generators give equal results.

    `generator` draws committed lengths; without speculation nothing is drawn. Every step takes as
    long as the slowest rank's. Raises InputError where a request can never be admitted.
    """
    _check_fits(requests, server)
    _check_room(server, speculation)
    draw = _draws(speculation, generator or np.random.default_rng(0))
    ranks = [_Rank(requests, number, server, speculation, draw) for number in range(server.ranks)]
    now, steps, idle = 0.0, 0, []
    while True:
        busy = [load for rank in ranks if (load := rank.prepare(now)) is not None]
        if busy:
            now += max(step_s(*load) for load in busy)
            steps += 1
            for rank in ranks:
                rank.advance(now)
        elif arrivals_s := [rank.next_s for rank in ranks if rank.next_s is not None]:
            idle.append((now, now := min(arrivals_s)))
        else:
            break
    times = np.empty((3, len(requests)))
    for number, rank in enumerate(ranks):
        times[:, number :: server.ranks] = rank.admitted_s, rank.first_s, rank.last_s
    admitted_s, first_s, last_s = times
    return SimulationResult(
        requests=requests, admitted_s=admitted_s, first_s=first_s, last_s=last_s,
        idle_s=np.array(idle).reshape(-1, 2), steps=steps,
    )  # fmt: skip


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    """One admitted request.

    `context`: cached tokens once it decodes; `found`: tokens of its prompt that are cached before;
    `left`: tokens of its answer; `held`: tokens of the cache; `share`: of the current step's prompt
    tokens.
    """

    index: int
    context: int
    found: int
    prompt_left: int
    left: int
    held: float
    share: int = 0


def _draws(speculation: Speculation, generator: np.random.Generator) -> Callable[[int], list[int]]:
    """A function from a batch to the committed tokens of each of its sequences in one step."""

    def uniform() -> Iterator[float]:
        while True:
            yield from generator.random(_DRAWN_AT_ONCE).tolist()

    # The last edge is left out: probabilities may add up to a little less than 1.
    edges_of = [list(itertools.accumulate(shares))[:-1] for shares in speculation.committed]
    drawn = uniform()

    def draw(batch: int) -> list[int]:
        edges = edges_of[speculation.level(batch)]
        if not edges:
            return [1] * batch
        return [bisect.bisect_right(edges, next(drawn)) + 1 for _ in range(batch)]

    return draw


class _Rank:
    """The state of one rank between steps, which is dealt every so many requests."""

    def __init__(
        self, requests: Trace, number: int, server: SimulatedServer, speculation: Speculation,
        draw: Callable[[int], list[int]],
    ) -> None:  # fmt: skip
        self._server, self._speculation, self._draw = server, speculation, draw
        # Plain lists: a scalar of a numpy array costs ten times as much to read.
        dealt = slice(number, None, server.ranks)
        self._arrival_s: list[float] = (requests.arrival_s[dealt] + server.front_s).tolist()
        self._prompt: list[int] = requests.prompt_tokens[dealt].tolist()
        self._output: list[int] = requests.output_tokens[dealt].tolist()
        ends = [
            (server.held_tokens(float(p)), server.held_tokens(float(p + o)))
            for p, o in zip(self._prompt, self._output, strict=True)
        ]
        whole = server.rules.memory.whole_answer
        self._held = [end if whole else start for start, end in ends]
        # Tokens of the cache that a token of the answer adds: windows and states hold fewer.
        self._growth = [
            0.0 if whole else (end - start) / o
            for (start, end), o in zip(ends, self._output, strict=True)
        ]
        self._next = 0  # the first request that is not admitted
        self._free = server.cache_tokens
        self._prefilling: list[_Sequence] = []
        self._decoding: list[_Sequence] = []
        self._evicted: list[_Sequence] = []
        self._context = 0  # cached tokens of all that decode
        self._step = 0, 0  # sequences that decode in the current step, and its prompt tokens
        self.admitted_s, self.first_s, self.last_s = ([0.0] * len(self._prompt) for _ in range(3))

    @property
    def next_s(self) -> float | None:
        """Arrival of the first request that is not admitted; None after the last."""
        return self._arrival_s[self._next] if self._next < len(self._arrival_s) else None

    def prepare(self, now: float) -> tuple[int, int, float, float] | None:
        """Admit requests, and the arguments of the next step's StepTime; None while idle."""
        self._admit(now)
        rules, speculation = self._server.rules, self._speculation
        batch = len(self._decoding) if rules.mixes_prompts or not self._prefilling else 0
        prompt_tokens, keys = 0, 0.0
        if self._prefilling:
            room = rules.step_tokens - batch * speculation.rows[speculation.level(batch)]
            for sequence in self._prefilling:
                share = sequence.share = min(sequence.prompt_left, room - prompt_tokens)
                prompt_tokens += share
                keys += share * (sequence.context - sequence.prompt_left + share / 2)
        self._step = batch, prompt_tokens
        if not (batch or prompt_tokens):
            return None
        context = self._context / batch if batch else 0.0
        return batch, prompt_tokens, context, keys / prompt_tokens if prompt_tokens else 0.0

    def advance(self, now: float) -> None:
        batch, prompt_tokens = self._step
        if batch:
            self._decode(now)
        if prompt_tokens:
            self._prefill(now)

    def _admit(self, now: float) -> None:
        arrival_s, held, count = self._arrival_s, self._held, len(self._held)
        room = self._server.max_sequences - len(self._prefilling) - len(self._decoding)
        while room:
            if self._evicted:
                sequence = self._evicted[-1]
            elif self._next < count and arrival_s[self._next] <= now:
                index = self._next
                prompt, left = self._prompt[index], self._output[index]
                found = min(int(self._server.rules.prefix_hits * prompt), prompt - 1)
                sequence = _Sequence(index, prompt, found, prompt - found, left, held[index])
            else:
                break
            if sequence.held > self._free:
                break
            if self._evicted:
                self._evicted.pop()
            else:
                self.admitted_s[sequence.index] = now
                self._next += 1
            self._free -= sequence.held
            self._prefilling.append(sequence)
            room -= 1

    def _decode(self, now: float) -> None:
        finished, growth = False, self._growth
        drawn = self._draw(len(self._decoding))
        for sequence, tokens in zip(self._decoding, drawn, strict=True):
            sequence.left -= tokens
            sequence.context += tokens
            added = growth[sequence.index] * tokens
            sequence.held += added
            self._free -= added
            if sequence.left <= 0:
                finished = True
                self._context -= sequence.context - tokens
                self._finish(sequence, now)
            else:
                self._context += tokens
        if finished:
            self._decoding = [sequence for sequence in self._decoding if sequence.left > 0]
        while self._free < 0 and len(self._decoding) > 1:
            self._evict(self._decoding.pop())

    def _evict(self, sequence: _Sequence) -> None:
        """Free the cache of a request, which prefills again all but the prefix that is found."""
        self._context -= sequence.context
        self._free += sequence.held
        sequence.context += 1  # the last token was not cached yet
        sequence.held += self._growth[sequence.index]
        sequence.prompt_left = sequence.context - sequence.found
        self._evicted.append(sequence)

    def _prefill(self, now: float) -> None:
        for sequence in self._prefilling:
            sequence.prompt_left -= sequence.share
            if sequence.prompt_left:
                continue
            if sequence.context == self._prompt[sequence.index]:
                self.first_s[sequence.index] = now
            sequence.left -= 1
            if sequence.left:
                self._decoding.append(sequence)
                self._context += sequence.context
            else:
                self._finish(sequence, now)
        self._prefilling = [sequence for sequence in self._prefilling if sequence.prompt_left]

    def _finish(self, sequence: _Sequence, now: float) -> None:
        self.last_s[sequence.index] = now
        self._free += sequence.held


def _check_fits(requests: Trace, server: SimulatedServer) -> None:
    tokens = requests.prompt_tokens + requests.output_tokens
    held = [server.held_tokens(float(count)) for count in tokens]
    largest = int(np.argmax(held))
    if held[largest] > server.cache_tokens:
        raise InputError(
            f"request {largest + 1} ({requests.prompt_tokens[largest]} prompt and"
            f" {requests.output_tokens[largest]} answer tokens) never fits into a cache of"
            f" {server.cache_tokens:.0f} tokens",
            hint="Leave such requests out, or use more devices",
        )


def _check_room(server: SimulatedServer, speculation: Speculation) -> None:
    """Raise InputError where decoding can fill a whole step, so that no prompt ever runs."""
    if not server.rules.mixes_prompts:
        return
    most = server.max_sequences
    batches = [min(most, upper) for upper in speculation.up_to[:-1]] + [most]
    rows = max(batch * rows for batch, rows in zip(batches, speculation.rows, strict=True))
    if rows >= server.rules.step_tokens:
        raise InputError(
            f"{rows} decoded rows leave no room for prompts in steps of"
            f" {server.rules.step_tokens} tokens",
            hint="Use fewer max_sequences, smaller trees or larger steps",
        )
