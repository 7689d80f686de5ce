"""A capacity plan: GPUs and cost for some traffic, from the shipped profiles; needs no GPU.

python examples/plan_fleet.py [TARGET]
"""

import sys

from rooftree import Goals, PlanRequest, Traffic, plan


def main(target: str = "qwen3-8b") -> None:
    request = PlanRequest(
        target=target,
        gpus=("h100-sxm", "l40s"),
        traffic=Traffic(prompt_tokens=1000, output_tokens=400),
        rate=5.0,  # requests a second
        goals=Goals(tpot_s=0.03, ttft_s=1.0),
        acceptance="0.8",
        drafter="ngram",
        prices={"h100-sxm": 2.5, "l40s": 1.0},
    )
    for option in plan(request).options:
        sizing = option.sizing
        if sizing is None:
            print(f"{option.gpu}: {option.problem}")
            continue
        print(
            f"{option.gpu}: {sizing.gpus.value:.0f} GPUs, trees of {sizing.at_load.nodes} nodes, "
            f"{sizing.tpot_s.value * 1e3:.1f} ms a token, "
            f"{sizing.cost_per_million.value:.2f} per million tokens"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
