"""Decoding with draft trees: a whole text, a stream and a batch.

python examples/decode.py [TARGET]
"""

import sys

from rooftree import TreeDecoder


def main(target: str | None = None) -> None:
    decoder = TreeDecoder.from_pretrained(target)
    print(decoder.profile_line)

    result = decoder.generate("The capital of France is", max_new_tokens=24)
    print(result.text)
    print(f"{result.stats.tokens_per_s:.1f} tokens/s")

    for piece in decoder.stream("Count to ten: one,", max_new_tokens=24, temperature=0.8, seed=1):
        print(piece, end="", flush=True)
    print()

    prompts = ["The sea is", "The sky is", "The grass is"]
    for prompt, answer in zip(
        prompts, decoder.generate_batch(prompts, max_new_tokens=8), strict=True
    ):
        print(f"{prompt} ->{answer.text}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
