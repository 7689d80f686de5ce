"""`rooftree bench` with the real vLLM as a peer, on the demo model in float32."""

import json

from lab.bench.record import read_result
from tests.integrations.vllm.test_real_engine import WITH_VLLM, run

PROMPTS = ("Count from one to ten, twice.", "Repeat this sentence three times: it rains.")

pytestmark = WITH_VLLM


def test_texts_of_vllm_are_those_of_plain_decoding(smollm2_folder, tmp_path):
    prompts, output = tmp_path / "made.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    arguments = (
        "-m rooftree bench --device cpu --dtype float32 --policy chain --policy transformers:none "
        "--new-tokens 32 --engine vllm --engine-option vllm:modes=dflash-7"
    )
    files = ("--target", smollm2_folder, "--prompts", prompts, "--output", output)
    run(*arguments.split(), *files, ROOFTREE_HOME=tmp_path)
    result = read_result(output)
    assert result.failed == ()
    assert result.engines[0].versions["torch"].startswith("2.")
    plain = [response.tokens for response in result.of("plain")]
    for name in ("vllm:plain", "vllm:dflash-7"):
        responses = result.of(name)
        assert [response.tokens for response in responses] == plain, name
        # The first token comes with the prefill, the others in steps of their own.
        assert all(one.first_tokens == 1 and one.total_s > one.first_token_s for one in responses)
