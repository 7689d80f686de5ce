"""The drafter of a planned server: seconds of a draft, bytes, and acceptance that fits it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import Peaks, device_by_name
from costmodel.compose.transfer import transfer_errors
from costmodel.errors import InputError
from costmodel.hf_config import is_hub_id
from costmodel.io import read_yaml, shipped_directory
from costmodel.planning.acceptance import OTHER_TARGET_SPREAD, Acceptance, AcceptanceSource
from costmodel.planning.forwards import ForwardSeconds, TargetForward
from costmodel.profile.schema import DrafterSection, EngineDrafterSection
from costmodel.roofline import Roofline

BLOCK_ROWS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftSize:
    """A kind of drafter as its published configs have it, beside a target of any width.

    Its `layers` have the target's width and its usual shape, with `experts` those of its sparse
    layers. It projects `features` hidden states. A forward drafts a block of rows, or with
    `each_token` one token. `vocab`: of an LM head of its own (0: it uses the target's).
    `wide`: queries, keys and values are made of two states. `rank`: each token's logits are
    corrected by a product of this rank over the vocabulary.
    """

    text: str
    layers: int = 5
    features: int = 5
    experts: bool = False
    each_token: bool = False
    vocab: int = 0
    wide: bool = False
    rank: int = 0

    def own_weights(self, target: ModelArchitecture) -> int:
        """Weights beside its layers: projection, wider inputs, and an LM head of its own."""
        a = target
        wide = self.layers * a.hidden * (a.query_width + 2 * a.kv_width) if self.wide else 0
        return self.features * a.hidden**2 + wide + self.vocab * a.hidden

    def correction(self, target: ModelArchitecture) -> int:
        """Weights that each drafted token reads beside those of the block."""
        return self.rank * target.vocab


_TABLE = read_yaml(shipped_directory() / "drafters.yaml")
SIZES = {kind: DraftSize(**sizes) for kind, sizes in _TABLE["sizes"].items()}
CHECKPOINTS: dict[str, str] = _TABLE["checkpoints"]
NAMES = ("dflash", "ngram", "dspark", "eagle3", "mtp")
_OF_OTHERS = ("dspark", "eagle3", "mtp")
BLOCK_KINDS = ("dflash2", "dflash", "dspark", "domino", "jetspec")  # the longer name first
NGRAM_S: float = _TABLE["lookup_s"]
FORWARD_S: dict[str, float] = _TABLE["forward_s"]
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

    Without times a draft is one forward of a block of 16 rows a sequence, or one of a row for each
    token, of a drafter of its kind's size: the target's time is scaled by the ratio of both
    physical rooflines, and one of a token takes at least its engine's FORWARD_S. A look-up takes
    none on the device.
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
        size, rows = self.size, 1 if self.size.each_token else BLOCK_ROWS
        device = device_by_name(forward.device.name)
        target = Roofline(
            architecture=forward.architecture,
            peaks=device.peaks if device else _USUAL_PEAKS,
            element_bytes=forward.value_bytes.weight,
            count="physical",
            tensor_parallel=forward.tensor_parallel,
        )
        made = block_architecture(target.architecture, size)
        share = _share_of(target, size, (rows, context, batch))
        more = size.own_weights(forward.architecture) + tokens * size.correction(made)
        share *= 1 + more / made.active_parameters
        whole = forward.decode(batch, context, rows)
        if not size.each_token:
            return whole.scaled(share)
        least_s = size.layers * transfer_errors().fixed_s_per_layer
        least_s = max(least_s, FORWARD_S.get(forward.engine, 0.0))
        return whole.scaled(tokens * max(share, least_s / whole.total))

    @property
    def size(self) -> DraftSize:
        """The sizes of its kind; a DFlash drafter's for kinds without."""
        return SIZES.get(drafter_kind(self.name), SIZES["dflash"])

    def weight_bytes(self, architecture: ModelArchitecture) -> float:
        """Bytes of its bfloat16 weights over all devices, without the head, the target's."""
        if not self.block:
            return 0.0
        made = block_architecture(architecture, self.size)
        layers = made.parameters - made.vocab * made.hidden
        own = self.size.own_weights(architecture) + 2 * self.size.correction(architecture)
        return 2.0 * (layers + own)

    def cache_bytes_per_token(self, architecture: ModelArchitecture) -> float:
        """Bytes of its bfloat16 keys and values of a token over all devices."""
        width = block_architecture(architecture, self.size).cached_width
        return 2.0 * self.size.layers * width if self.block else 0.0


def lookup_drafter() -> DraftCost:
    """An n-gram drafter that was not timed: a look-up on the host for each sequence."""
    label = f"n-gram: {NGRAM_S * 1e3:.2f} ms on the host a sequence, as in this decoder's benchmark"
    return DraftCost(name="ngram", label=label, block=False, host_s=NGRAM_S)


def block_drafter(name: str = "dflash") -> DraftCost:
    """A drafter with weights that was not timed, of the size of its kind."""
    size = SIZES[drafter_kind(name)]
    return DraftCost(name=name, label=size.text, layers=size.layers)


@functools.lru_cache(maxsize=4096)  # a plan asks once for each length of a draft
def _share_of(target: Roofline, size: DraftSize, shape: tuple[int, float, float]) -> float:
    """Roofline seconds of the drafter's forward of (rows, context, batch) over the target's."""
    made = block_architecture(target.architecture, size)
    drafter_s = dataclasses.replace(target, architecture=made).seconds(*shape)
    return float(drafter_s / target.seconds(*shape))


@functools.cache
def block_architecture(
    target: ModelArchitecture, size: DraftSize = SIZES["dflash"]
) -> ModelArchitecture:
    """The architecture of a target's drafter, with the target's embedding and head."""
    dense: dict[str, Any] = dict.fromkeys(
        ("experts", "active_experts", "expert_ffn", "shared_ffn"), 0
    )
    fields = dataclasses.fields(target)
    first = [field.name for field in fields].index("index_heads")  # of indexers, hybrids
    usual: dict[str, Any] = {field.name: field.default for field in fields[first:]}
    if not size.experts:
        usual |= dense | {"router_bias": False}
    return dataclasses.replace(
        target,
        **usual,
        name=f"drafter of {target.name}",
        layers=size.layers,
        vocab=size.vocab or target.vocab,
        tied=True,
        sliding_window=None,
        full_layers=0,
        dense_layers=0,
    )


def find_drafter(
    forward: TargetForward, name: str | None, measured: AcceptanceSource | None = None
) -> DraftCost:
    """The cost of the drafter called `name`; a drafter timed in the profile comes first.

    `name` is one of NAMES, a checkpoint whose name has its kind, a timed drafter's name or part of
    it, or its architecture's hash. A part of a name matches an ensemble (`ngram+dflash`) only if it
    contains `+`. None means the drafter whose acceptance was `measured`, else the profile's only
    drafter, else a DFlash drafter of the target's width. Raises InputError.
    """
    timed = {key: _timed(section, key) for key, section in forward.profile.drafters.items()}
    engine = [_timed(section) for section in forward.profile.engine_drafters.values()]
    if name is None and measured is not None and (measured.drafter or measured.drafter_kind):
        if measured.drafter_hash in timed:
            return timed[measured.drafter_hash]
        kind = measured.drafter_kind or measured.drafter
        name = kind if kind in NAMES else measured.drafter
    if name is None:
        only = list(timed.values()) if len(timed) == 1 else engine
        return only[0] if len(only) == 1 else block_drafter()
    if name in timed:
        return timed[name]
    alike = [one for one in timed.values() if ("+" in name) == ("+" in one.name)]
    for one in (*alike, *engine):
        if name.lower() in one.name.lower():
            return one
    if name == "ngram":
        return lookup_drafter()
    published = name.lower() in (checkpoint.lower() for checkpoint in CHECKPOINTS.values())
    if name in SIZES or published or (is_hub_id(name) and drafter_kind(name) in _OF_OTHERS):
        return block_drafter(name)
    names = ", ".join([*NAMES, *(one.name for one in (*timed.values(), *engine))])
    raise InputError(
        f"no drafter is called '{name}', and there is no time of one in the profile",
        hint=f"Use one of: {names}; or time it, by its folder or hub id: `rooftree calibrate"
        f" --target {forward.architecture.name} --drafter FOLDER`",
    )


def _timed(section: DrafterSection | EngineDrafterSection, key: str | None = None) -> DraftCost:
    block = "gram" not in section.name.lower()
    if isinstance(section, EngineDrafterSection):
        label = f"{section.name}, measured in the engine"
        return DraftCost(name=section.name, label=label, block=block, in_engine=section)
    how = "timed by a decoder at its start" if section.kind == "quick" else "measured"
    return DraftCost(
        name=section.name, label=f"{section.name}, {how}", block=block, timed=section,
        architecture_hash=key,
    )  # fmt: skip


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
    timed = drafter.timed is not None and measured.drafter_hash == drafter.architecture_hash
    if not timed and (measured.drafter or measured.drafter_kind):
        kind = measured.drafter_kind or drafter_kind(measured.drafter or "")
        if kind != drafter_kind(drafter.name):
            raise InputError(
                f"the acceptance of {acceptance.label} is of the drafter"
                f" {measured.drafter or kind}, not of {drafter.name}",
                hint=f"Measure it: {_bench_command(name, drafter.name)}, or give a rate such as"
                " --acceptance 0.6",
            )
        if acceptance.kind != "published" and measured.drafter != drafter.name:
            doubts.append(
                f"acceptance is of the drafter {measured.drafter}, costs are of {drafter.label}"
            )
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


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _bench_command(target: str, drafter: str) -> str:
    """The command that writes a file of acceptance; a mere kind of drafter is no name for it."""
    if drafter == "dflash":
        drafter = CHECKPOINTS.get(target.lower().rpartition("/")[2], "FOLDER")
    return f"`rooftree bench --target {target} --drafter {drafter} --output FILE`"


def _last(name: str | None) -> str | None:
    return None if name is None else name.rstrip("/").lower().rpartition("/")[2]
