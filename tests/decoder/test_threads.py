"""One decoder in several threads: every text is the one that it is alone, or an error says why."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from tests.decoder.models import decoder_of, greedy, random_model

THREADS, TEXTS, TOKENS = 4, 12, 24
PROMPTS = [[5 + number, 17, 3, 88, 5 + number, 17] for number in range(THREADS)]


@pytest.fixture(scope="module")
def expected():
    model = random_model("llama-gqa")
    return [greedy(model, prompt, TOKENS) for prompt in PROMPTS]


def in_threads(work):
    """The results of work(number), started at once in all threads."""
    barrier = Barrier(THREADS)

    def run(number):
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


@pytest.mark.parametrize("policy", ["fixed:9", "chain"])
def test_generate_gives_every_thread_its_text(expected, policy):
    decoder = decoder_of(random_model("llama-gqa"), policy)

    def work(number):
        prompt = PROMPTS[number]
        return [decoder.generate(prompt, max_new_tokens=TOKENS).token_ids for _ in range(TEXTS)]

    assert in_threads(work) == [[text] * TEXTS for text in expected]
