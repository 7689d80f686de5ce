"""A drafter of one's own: the tokens that followed the last token where it stood before.

python examples/own_drafter.py [TARGET]
cd examples && rooftree generate --drafter own_drafter:Recall --prompt "One, two, one,"
"""

import sys

import numpy as np

from rooftree import Drafter, DraftSession, Lattice, TreeDecoder


class Recall(Drafter):
    name = "recall"

    def start(self, prompt, features, logits=None):
        return RecallSession()


class RecallSession(DraftSession):
    def draft(self, context, request):
        places = np.flatnonzero(context[:-1] == context[-1])
        begin = places[-1] + 1 if len(places) else len(context)
        tokens = context[begin : begin + request.depth, None]  # [depth, candidates]
        return Lattice(tokens, np.full(tokens.shape, 0.6))


def main(target: str | None = None) -> None:
    decoder = TreeDecoder.from_pretrained(target, drafter=Recall(), policy="fixed:7")
    result = decoder.generate("One, two, three, one, two, three, one,", max_new_tokens=32)
    print(result.text)
    print(
        f"{decoder.drafter.name}: {result.stats.tokens_per_verification:.2f} tokens a verification"
    )


if __name__ == "__main__":
    main(*sys.argv[1:2])
