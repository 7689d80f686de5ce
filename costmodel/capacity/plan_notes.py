"""What a reader of a plan should know beside its numbers, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from costmodel.capacity.request import PlanRequest
from costmodel.capacity.sizing import SERVER_ERROR

if TYPE_CHECKING:
    from costmodel.capacity.planner import Option


def plan_notes(request: PlanRequest, options: Sequence[Option]) -> list[str]:
    """The notes of a plan with these options."""
    notes = []
    if request.acceptance is None and request.policy.kind == "auto":
        notes.append(
            "no acceptance data: plain decoding only; --acceptance gsm8k, a rate or a JSON file of"
            " measured acceptance lets it speculate"
        )
    unpriced = [gpu for gpu in request.gpus if gpu not in request.prices]
    if request.prices and unpriced:
        notes.append(f"no price for {', '.join(unpriced)}: ranked behind those that have one")
    if not request.prices:
        notes.append("no prices: ranked by the number of GPUs; --price GPU=2.5 is per hour")
    kinds = sorted({option.origin.kind for option in options if option.origin})
    if borrowed := [kind for kind in kinds if kind != "measured"]:
        notes.append(
            f"times are {' or '.join(borrowed)}, not measured on the GPU;"
            " `rooftree calibrate` there narrows the intervals"
        )
    if any(option.sizing for option in options):
        notes.append("J a token: at most, as if every GPU always drew its power limit or TDP")
        notes.append(
            "intervals are of 80 %: errors of the profile, of the server model"
            f" ({SERVER_ERROR:.1%}, on 1,043 published servers) and of acceptance, in squares"
        )
    if request.sampling is not None:
        notes.append(
            "percentiles leave out the first and last tenth of the requests; their intervals are"
            " those of the whole simulation with all times shorter and longer"
        )
    if request.acceptance is not None:
        notes.append("drafting for many requests at once was not checked against measured servers")
    return notes
