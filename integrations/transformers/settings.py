"""A script for this project's decoder, from a plan: the target, drafter and policy."""

from __future__ import annotations

from costmodel.errors import InputError
from costmodel.planning.exports import Export, SettingsWriter, checkpoint_of
from costmodel.planning.request import Precision


def _write(export: Export) -> list[str]:
    request, best = export.request, export.best
    if request.precision not in (Precision(), Precision(weights="bfloat16")):
        raise InputError(
            f"this decoder cannot be told to use {request.precision.weights} weights and a"
            f" {request.precision.cache} cache",
            hint="Leave out --weights and --cache, and name a quantised checkpoint as --target",
        )
    if best.tensor_parallel > 1:
        raise InputError(
            f"settings of {best.tensor_parallel} devices a target are not exported: this decoder"
            " runs on one",
            hint="Plan with --tp 1, or export to vllm or sglang",
        )
    load, planned, target = export.at_load, request.policy, export.target
    arguments, policy = [f'"{target}"'], "plain"
    if best.drafter is not None:
        names = {"auto": "bastion", "fixed": f"fixed:{planned.nodes}"}
        policy = names.get(planned.kind, planned.kind)
    if policy != "plain" and best.drafter is not None:
        drafter = "+".join(checkpoint_of(part, target) for part in best.drafter.name.split("+"))
        arguments.append(f'drafter="{drafter}"')
    arguments.append(f'policy="{policy}"')
    if policy == "chain" and load.nodes:
        arguments.append(f"max_nodes={load.nodes}")
    shape = f"{load.shape} of {load.nodes} tokens" if load.nodes else "plain step"
    return [
        f"# the plan's best with {load.running} at once is a {shape}",
        "from rooftree import TreeDecoder",
        "",
        f"decoder = TreeDecoder.from_pretrained({', '.join(arguments)})",
    ]


SCRIPT = SettingsWriter(engine="rooftree", version="rooftree 0.1", write=_write)
