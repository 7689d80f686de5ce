"""A policy of one's own: every node whose whole path is likely enough.

python examples/own_policy.py [TARGET]
cd examples && rooftree generate --policy own_policy:Likely --prompt "One, two, one,"
"""

import sys

from rooftree import Policy, TreeDecoder, best_first


class Likely(Policy):
    name = "likely"

    def __init__(self, max_nodes=32, least=0.2):
        self.max_nodes = max_nodes
        self.least = least

    def choose(self, candidates, context, limits):
        tree = best_first(candidates, min(self.max_nodes, limits.nodes))
        return tree.first(int((tree.scores >= self.least).sum()))  # best scores come first


def main(target: str | None = None) -> None:
    decoder = TreeDecoder.from_pretrained(target, drafter="ngram", policy=Likely())
    result = decoder.generate("One, two, three, one, two, three, one,", max_new_tokens=32)
    print(result.text)
    print(
        f"{decoder.policy.name}: {result.stats.tokens_per_verification:.2f} tokens a verification"
    )


if __name__ == "__main__":
    main(*sys.argv[1:2])
