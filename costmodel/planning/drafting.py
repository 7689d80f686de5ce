"""The drafter of a planned server: seconds of a draft, bytes, and acceptance that fits it."""

from __future__ import annotations

import dataclasses
from typing import Any

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import Peaks, device_by_name
from costmodel.errors import InputError
from costmodel.planning.acceptance import OTHER_TARGET_SPREAD, Acceptance, AcceptanceSource
from costmodel.planning.forwards import ForwardSeconds, TargetForward
from costmodel.profile.schema import DrafterSection, EngineDrafterSection
from costmodel.roofline import Roofline

# A DFlash drafter as its published configs have it: five layers of the target's width, and a
# projection of the hidden states of five target layers.
DFLASH_LAYERS = 5
DFLASH_FEATURES = 5
BLOCK_ROWS = 16
NAMES = ("dflash", "ngram")
BLOCK_KINDS = ("dflash2", "dflash", "dspark", "domino", "jetspec")  # the longer name first
# Published DFlash drafters (z-lab on the Hugging Face hub) by the last part of the target's name.
CHECKPOINTS = {
    "qwen3-4b": "z-lab/Qwen3-4B-DFlash-b16",
    "qwen3-8b": "z-lab/Qwen3-8B-DFlash-b16",
    "llama-3.1-8b-instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
}
# Host seconds of one n-gram look-up where none was timed: 0.55 % of the cycles of chain+ngram in
# lab/studies/results/bench.json.
NGRAM_S = 1.8e-4
# Peaks only decide where memory and compute meet; of an unknown device the usual ratio does.
_USUAL_PEAKS = Peaks(flops_per_s=3e14, bytes_per_s=2e12)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """A drafter and its cost beside a target.

    name       the name that `--drafter` takes, such as `ngram`
    label      the drafter and the source of its cost, for people
    block      whether it has weights and a cache, estimated as those of a DFlash drafter
    layers     layers that pay the engine's overhead per layer
    host_s     seconds on the host of one sequence's draft, beside `draft_s`
    timed      its times at batch 1 in the profile; larger batches scale like the target's forward
    in_engine  its times inside a serving engine, by batch, draft length and context

    Without times a draft is one forward of a block of 16 rows a sequence: five dense layers of the
    target's width, the projection of the target's features, and the target's LM head; the target's
    time is scaled by the ratio of both physical rooflines. A look-up takes none on the device.
    """

    name: str
    label: str
    block: bool = True
    layers: int = 0
    host_s: float = 0.0
    timed: DrafterSection | None = None
    in_engine: EngineDrafterSection | None = None
    architecture_hash: str | None = None

    def draft_s(
        self, forward: TargetForward, batch: float, context: float, tokens: int
    ) -> ForwardSeconds:
        """Seconds of drafting `tokens` for each of `batch` sequences with `context` tokens."""
        if self.in_engine is not None:
            seconds = float(self.in_engine.seconds(tokens, context, batch))
            return ForwardSeconds(products=max(seconds, 0.0))
        if self.timed is not None:
            one_s = float(self.timed.seconds(context))
            if batch > 1:
                many, one = (forward.decode(b, context, BLOCK_ROWS).total for b in (batch, 1))
                one_s *= many / one
            return ForwardSeconds(products=one_s)
        if not self.block:
            return ForwardSeconds()
        device = device_by_name(forward.device.name)
        target = Roofline(
            architecture=forward.architecture,
            peaks=device.peaks if device else _USUAL_PEAKS,
            element_bytes=forward.value_bytes.weight,
            count="physical",
            tensor_parallel=forward.tensor_parallel,
        )
        drafter = dataclasses.replace(target, architecture=block_architecture(target.architecture))
        shape = (BLOCK_ROWS, context, batch)
        share = float(drafter.seconds(*shape) / target.seconds(*shape))
        share *= 1 + _projection(forward.architecture) / drafter.architecture.parameters
        return forward.decode(batch, context, BLOCK_ROWS).scaled(share)

    def weight_bytes(self, architecture: ModelArchitecture) -> float:
        """Bytes of its bfloat16 weights over all devices, without the head, the target's."""
        if not self.block:
            return 0.0
        head = architecture.vocab * architecture.hidden
        layers = block_architecture(architecture).parameters - head
        return 2.0 * (layers + _projection(architecture))

    def cache_bytes_per_token(self, architecture: ModelArchitecture) -> float:
        """Bytes of its bfloat16 keys and values of a token over all devices."""
        return 2.0 * 2 * DFLASH_LAYERS * architecture.kv_width if self.block else 0.0


def lookup_drafter(host_s: float = NGRAM_S) -> DraftCost:
    """An n-gram drafter that was not timed: a look-up on the host for each sequence."""
    label = f"n-gram: {NGRAM_S * 1e3:.2f} ms on the host a sequence, as in this decoder's benchmark"
    return DraftCost(name="ngram", label=label, block=False, host_s=host_s)


def block_drafter(name: str = "dflash") -> DraftCost:
    """A DFlash drafter that was not timed."""
    label = "DFlash by its size: 5 layers of the target's width and its LM head over blocks of 16"
    return DraftCost(name=name, label=label, layers=DFLASH_LAYERS)


def block_architecture(target: ModelArchitecture) -> ModelArchitecture:
    """The architecture of a target's DFlash drafter, with the target's embedding and head."""
    fields = dataclasses.fields(target)
    first = [field.name for field in fields].index("index_heads")  # of indexers, hybrids
    usual: dict[str, Any] = {field.name: field.default for field in fields[first:]}
    return dataclasses.replace(
        target,
        **usual,
        name=f"DFlash drafter of {target.name}",
        layers=DFLASH_LAYERS,
        tied=True,
        sliding_window=None,
        full_layers=0,
        experts=0,
        active_experts=0,
        expert_ffn=0,
        dense_layers=0,
        shared_ffn=0,
        router_bias=False,
    )


def _projection(architecture: ModelArchitecture) -> int:
    return DFLASH_FEATURES * architecture.hidden**2


def find_drafter(
    forward: TargetForward, name: str | None, measured: AcceptanceSource | None = None
) -> DraftCost:
    """The cost of the drafter called `name`; a drafter timed in the profile comes first.

    `name` is `dflash`, `ngram`, a published DFlash checkpoint, a timed drafter's name or part of
    it, or its architecture's hash. A part of a name matches an ensemble (`ngram+dflash`) only if it
    contains `+`. None means the drafter whose acceptance was `measured`, else the profile's only
    drafter, else a DFlash drafter of the target's width. Raises InputError.
    """
    timed = forward.profile.drafters
    engine = list(forward.profile.engine_drafters.values())
    if name is None and measured is not None and (measured.drafter or measured.drafter_kind):
        if measured.drafter_hash in timed:
            return _timed(measured.drafter_hash, timed[measured.drafter_hash])
        kind = measured.drafter_kind or measured.drafter
        name = kind if kind in NAMES else measured.drafter
    if name is None:
        if len(timed) == 1:
            return _timed(*next(iter(timed.items())))
        return _in_engine(engine[0]) if len(engine) == 1 else block_drafter()
    if name in timed:
        return _timed(name, timed[name])
    for key, section in timed.items():
        if name.lower() in section.name.lower() and ("+" in name) == ("+" in section.name):
            return _timed(key, section)
    for timed_in_engine in engine:
        if name.lower() in timed_in_engine.name.lower():
            return _in_engine(timed_in_engine)
    if name == "ngram":
        return lookup_drafter()
    if name == "dflash":
        return block_drafter()
    if name.lower() in (checkpoint.lower() for checkpoint in CHECKPOINTS.values()):
        return block_drafter(name)
    names = ", ".join(
        [*NAMES, *(one.name for one in timed.values()), *(one.name for one in engine)]
    )
    raise InputError(
        f"no drafter is called '{name}', and there is no time of one in the profile",
        hint=f"Use one of: {names}; or time it, by its folder or hub id: `rooftree calibrate"
        f" --target {forward.architecture.name} --drafter FOLDER`",
    )


def _timed(key: str, section: DrafterSection) -> DraftCost:
    how = "timed by a decoder at its start" if section.kind == "quick" else "measured"
    return DraftCost(
        name=section.name,
        label=f"{section.name}, {how}",
        block="gram" not in section.name.lower(),
        timed=section,
        architecture_hash=key,
    )


def _in_engine(section: EngineDrafterSection) -> DraftCost:
    return DraftCost(
        name=section.name,
        label=f"{section.name}, measured in the engine",
        block="gram" not in section.name.lower(),
        in_engine=section,
    )


def drafter_kind(name: str) -> str:
    """The kind of a drafter's name: `dflash@block=4` and a published checkpoint are `dflash`.

    The same for other kinds with weights, and `EAGLE3` or `EAGLE-3` in a checkpoint's name.
    """
    if "+" in name:
        return "combined"
    for kind in (*BLOCK_KINDS, "eagle3", "pard", "mtp"):
        if kind in name.lower().replace("-", ""):
            return kind
    return name.partition("@")[0].partition(":")[0]


def acceptance_for(
    acceptance: Acceptance,
    target: tuple[str, ModelArchitecture],
    drafter: DraftCost,
    *,
    trees: bool,
) -> Acceptance:
    """The acceptance as it holds for this target (name and architecture) and drafter.

    Raises InputError for acceptance of another target or drafter, and for that of trees where only
    chains are planned (not `trees`).
    """
    measured = acceptance.measured
    doubts = list(acceptance.doubts)
    spread = acceptance.spread
    name, architecture = target
    if _differ(measured.target_hash, architecture.hash) or (
        measured.target_hash is None and _differ(_last(measured.target), _last(name))
    ):
        raise InputError(
            f"the acceptance of {acceptance.label} is of {measured.target or 'another target'},"
            f" not of {name}",
            hint=f"Measure it: {_bench_command(name, drafter.name)}",
        )
    if _differ(_last(measured.target), _last(name)):
        doubts.append(f"acceptance is of {measured.target}, which has {name}'s architecture")
        spread = max(spread, OTHER_TARGET_SPREAD)
    doubts += _check_drafter(acceptance, drafter, name)
    if acceptance.kind == "recorded":
        missing = [part for part in ("target", "drafter") if getattr(measured, part) is None]
        if missing:
            doubts.append(f"{acceptance.label} does not say of which {' and '.join(missing)} it is")
        if trees and measured.policy == "chain":
            doubts.append(f"acceptance of trees is modelled from the chains of {acceptance.label}")
        if not trees and measured.policy != "chain":
            raise InputError(
                f"{acceptance.label} has acceptance of trees, and only chains are planned",
                hint="Give that of a chain: FILE#chain+DRAFTER; or plan with --engine rooftree",
            )
    return dataclasses.replace(acceptance, spread=spread, doubts=tuple(doubts))


def _check_drafter(acceptance: Acceptance, drafter: DraftCost, target: str) -> list[str]:
    """Doubts in acceptance of another drafter of this kind. Raises InputError for other kinds."""
    measured = acceptance.measured
    if drafter.timed is not None and measured.drafter_hash == drafter.architecture_hash:
        return []
    if measured.drafter is None and measured.drafter_kind is None:
        return []
    kind = measured.drafter_kind or drafter_kind(measured.drafter or "")
    if kind != drafter_kind(drafter.name):
        raise InputError(
            f"the acceptance of {acceptance.label} is of the drafter"
            f" {measured.drafter or kind}, not of {drafter.name}",
            hint=f"Measure it: {_bench_command(target, drafter.name)}, or give a rate such as"
            " --acceptance 0.6",
        )
    if acceptance.kind == "published" or measured.drafter == drafter.name:
        return []
    return [f"acceptance is of the drafter {measured.drafter}, costs are of {drafter.label}"]


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _bench_command(target: str, drafter: str) -> str:
    """The command that writes a file of acceptance; a mere kind of drafter is no name for it."""
    if drafter == "dflash":
        drafter = CHECKPOINTS.get(target.lower().rpartition("/")[2], "FOLDER")
    return f"`rooftree bench --target {target} --drafter {drafter} --output FILE`"


def _last(name: str | None) -> str | None:
    """The last part of a target's name, in lower case."""
    return None if name is None else name.rstrip("/").lower().rpartition("/")[2]
