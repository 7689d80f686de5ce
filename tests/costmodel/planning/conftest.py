"""Made-up step times and acceptance whose numbers are simple formulas."""

import dataclasses
from types import SimpleNamespace

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceFingerprint, find_target
from costmodel.io import shipped_directory
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.batching import Overheads
from costmodel.planning.engines import EngineRules, ValueBytes, engine_rules
from costmodel.planning.forwards import ForwardSeconds, Origin
from costmodel.planning.request import PlanRequest, ServingPolicy
from costmodel.planning.servers import OperatingPoint, Server
from costmodel.planning.simulation.steps import Speculation, StepTime, exact_steps
from costmodel.planning.sources import forward_for
from costmodel.planning.traffic import Traffic
from costmodel.profile.schema import StagesSection
from costmodel.profile.store import ProfileStore

SHIPPED = ProfileStore([shipped_directory()])
LLAMA = find_target("meta-llama/Llama-3.1-8B-Instruct").architecture
MADE_UP = DeviceFingerprint(
    kind="cuda", name="made up", memory_bytes=80_000_000_000, power_limit_w=500.0
)
CHAT = Traffic(prompt_tokens=1000, output_tokens=400)


def asked(**changes) -> PlanRequest:
    """Qwen3-8B on an H100, for five chats a second."""
    usual = {"target": "Qwen/Qwen3-8B", "gpus": ("h100-sxm",), "traffic": CHAT, "rate": 5.0}
    return PlanRequest(**(usual | changes))


def find_forward(device, target, store, *, tensor_parallel=1, **changes):
    """The forward times of a plan of one device and degree."""
    request = asked(target=target.name, gpus=(device.slug,), **changes)
    return forward_for(request, target, (device.slug, tensor_parallel), store)


def server_of(forward, **changes) -> Server:
    """vLLM without overheads or drafts."""
    usual = {"rules": engine_rules("vllm"), "overheads": Overheads(), "policy": ServingPolicy()}
    return Server(forward=forward, **(usual | changes))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LineSteps:
    """Steps of `fixed_s` + `row_s` a row + `token_s` a cached token; prompts also `key_s` a key."""

    architecture: ModelArchitecture = LLAMA
    engine: str = "trtllm"
    fixed_s: float = 10e-3
    row_s: float = 20e-6
    token_s: float = 1e-8
    key_s: float = 0.0
    value_bytes: ValueBytes = dataclasses.field(default_factory=ValueBytes)
    device: DeviceFingerprint = MADE_UP
    origin: Origin = dataclasses.field(
        default_factory=lambda: Origin(kind="measured", text="", error=0.05, whole_runtime=True)
    )
    tensor_parallel: int = 1
    ranks: int = 1
    unsplit: bool = False
    most_tree_rows: int | None = None
    plans_on_host: bool = False
    shares_pcie: bool = False
    power_error: float = 0.0
    logit_s: float = 0.0
    profile: SimpleNamespace = dataclasses.field(
        default_factory=lambda: SimpleNamespace(
            stages=StagesSection(), drafters={}, engine_drafters={}
        )
    )

    def decode(self, batch: float, context: float, rows: int = 1) -> ForwardSeconds:
        return ForwardSeconds(
            products=self.fixed_s + self.row_s * batch * rows,
            attention=self.token_s * batch * context,
        )

    def prompt(self, tokens: float, rows: float, chunks: int, cached: float = 0) -> ForwardSeconds:
        attention_s = self.prompt_attention_s(tokens, tokens / 2 + cached)
        return ForwardSeconds(products=self.row_s * tokens, attention=attention_s)

    def prompt_attention_s(self, tokens: float, keys: float) -> float:
        return self.key_s * tokens * keys

    def logits_s(self, rows: float) -> float:
        return self.logit_s * rows

    def power_share(self, rows_per_s: float) -> float:
        return 0.5


def commits(rows: int, *shares: float) -> Speculation:
    """One tree for all batches; `shares` are the probabilities of 1, 2, ... committed tokens."""
    return Speculation(up_to=(1,), rows=(rows,), committed=(shares,))


def point(running: int, shape: str = "plain", nodes: int = 0, **numbers: float) -> OperatingPoint:
    """An operating point whose other numbers are 1 where they are not given."""
    names = ("committed", "cycle_s", "tpot_s", "prefill_s", "ttft_s", "requests_per_s")
    fields = dict.fromkeys(names, 1.0) | numbers
    return OperatingPoint(running=running, shape=shape, nodes=nodes, **fields)


def plain_steps(forward, rules: EngineRules, overheads: Overheads) -> StepTime:
    """The steps of a server that drafts nothing."""
    server = server_of(forward, rules=rules, overheads=overheads)
    return exact_steps(server, [point(1)])


# Chains of 0.8 a token; trees that gain half of 6 tokens by 8 nodes.
LINE_ACCEPTANCE = Acceptance(
    label="made up", kind="given", chain=np.cumsum(0.8 ** np.arange(16)),
    tree=1 + 6 * np.arange(512) / (np.arange(512) + 8), spread=0.1,
)  # fmt: skip
