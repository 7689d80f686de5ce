"""The decoder inside transformers' own `model.generate`.

    decoder = TreeDecoder.from_pretrained(model, policy="fixed:16")
    inputs = tokenizer(["One prompt", "Another, longer one"], padding=True, return_tensors="pt")
    model.generate(**inputs, max_new_tokens=64, custom_generate=CustomGenerate(decoder))

Greedy output is that of `model.generate` (as far as two roundings of one model agree), and
sampled output has its distribution: temperature, top-k and top-p are honoured, all stopping
criteria too, and prompts may be padded on the left. What cannot be done exactly is refused:
beams, logits processors that change the distribution in other ways (as
repetition_penalty), scores and hidden states as output, input embeddings, a filled cache.

Generation configs have a top-k of 50 where nobody says otherwise; `top_k=0` is all tokens.
Sampling is seeded from torch's generator, as by `transformers.set_seed`. transformers does
not pass on `streamer` or `assistant_model`: stream with `TreeDecoder.stream`, and give the
drafter to the decoder. The empty cache that it does pass is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    LogitNormalization,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.configuration_utils import GenerationMode

from costmodel.errors import InputError
from decoder.engine import TreeDecoder
from decoder.run import run_together
from decoder.sampling import Sampling
from decoder.sequence import TextRequest
from decoder.statistics import Statistics
from decoder.text import StopStrings

# Arguments of the model's forward that change nothing here, or are looked at below.
KNOWN_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # in their order
ROW_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
PLAIN_HINT = "Leave it out, or call generate without custom_generate."


class CustomGenerate:
    """For the argument `custom_generate` of the decoder's own model.

    stats  of the last call, one for each row
    """

    def __init__(self, decoder: TreeDecoder) -> None:
        self.decoder = decoder
        self.stats: list[Statistics] = []

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **arguments: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Prompts and what follows, [batch, tokens], padded on the right.

        input_ids  [batch, tokens], padded on the left
        Raises InputError for what it cannot do as transformers would.
        """
        if model is not self.decoder.target.model:
            raise InputError(
                "custom_generate belongs to a decoder of another model",
                hint="Make the decoder with TreeDecoder.from_pretrained(model).",
            )
        _check_config(generation_config)
        _check_arguments(arguments)
        prompts = unpadded(input_ids, arguments.get("attention_mask"))
        _check_positions(prompts, arguments.get("position_ids"))
        ending = _Ending.of(stopping_criteria, input_ids)
        sampling = sampling_of(logits_processor, bool(generation_config.do_sample))
        requests = [
            self._request(prompts, row, ending, sampling, input_ids) for row in range(len(prompts))
        ]
        sequences = [sequence for sequence, _ in run_together(self.decoder, requests)]
        self.stats = [sequence.stats for sequence in sequences]
        new = [sequence.token_ids for sequence in sequences]
        output = _append(input_ids, new, _pad_token(generation_config))
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=output)
        return output

    def _request(
        self,
        prompts: Sequence[list[int]],
        row: int,
        ending: _Ending,
        sampling: Sampling,
        input_ids: torch.Tensor,
    ) -> TextRequest:
        try:
            self.decoder.check(prompts[row], ending.new_tokens)
        except InputError as error:
            raise InputError(
                f"prompt {row + 1} of {len(prompts)}: {error.problem}", hint=error.hint
            ) from error
        seed = int(torch.randint(2**62, ())) if sampling.temperature else 0
        return TextRequest(
            prompt=prompts[row],
            max_new_tokens=ending.new_tokens,
            sampling=Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=seed,
            ),
            stream=None,
            stops=StopStrings(()),
            ends=ending.ends,
            until=ending.asked_of(input_ids[row]),
        )


@dataclass(frozen=True, slots=True)
class _Ending:
    """When texts end: after so many tokens, at an end token, or where `others` say so."""

    new_tokens: int
    ends: frozenset[int]
    others: StoppingCriteriaList

    @classmethod
    def of(cls, criteria: StoppingCriteriaList, input_ids: torch.Tensor) -> _Ending:
        """Raises InputError for criteria that cannot be asked one row at a time."""
        if criteria.max_length is None:
            raise InputError(
                "nothing says how long the text may become", hint="Give max_new_tokens."
            )
        rows, tokens = input_ids.shape
        ends: set[int] = set()
        others = StoppingCriteriaList()
        for one in criteria:
            if type(one) is EosTokenCriteria:
                ends.update(one.eos_token_id.tolist())
            elif type(one) is not MaxLengthCriteria:
                others.append(one)
        unknown = next((one for one in others if type(one) not in ROW_CRITERIA), None)
        if rows > 1 and unknown is not None:
            raise InputError(
                f"{type(unknown).__name__} may look at the whole batch, and is asked row by row",
                hint="Give one prompt at a time, or call generate without custom_generate.",
            )
        if rows > 1 and others and not ends:
            # transformers then goes on with texts that have ended until the last one has.
            raise InputError(
                "stopping criteria for several prompts need an end token",
                hint="Set eos_token_id, or give one prompt at a time.",
            )
        return cls(criteria.max_length - tokens, frozenset(ends), others)

    def asked_of(self, row: torch.Tensor) -> Callable[[Sequence[int]], bool] | None:
        """Whether a text has ended after some new tokens; None where only its length says so.

        row  [tokens] the prompt with its padding, as transformers shows it to criteria
        """
        if not self.others:
            return None

        def until(new: Sequence[int]) -> bool:
            text = torch.cat((row, torch.tensor(new, dtype=row.dtype, device=row.device)))
            return bool(self.others(text[None], None)[0])

        return until


def sampling_of(processors: LogitsProcessorList, do_sample: bool) -> Sampling:
    """The temperature, top-k and top-p of transformers' processors, in that order.

    Raises InputError for any other processor, order, or setting of them.
    """
    found: dict[type, Any] = {}
    for processor in processors:
        kind = type(processor)
        if kind is LogitNormalization:
            continue  # neither the argmax nor the distribution changes
        if kind not in WARPERS:
            raise InputError(
                f"the logits processor {kind.__name__} is not applied by the tree decoder",
                hint=PLAIN_HINT,
            )
        later = WARPERS[WARPERS.index(kind) :]
        default = getattr(processor, "filter_value", -torch.inf) == -torch.inf
        default &= getattr(processor, "min_tokens_to_keep", 1) == 1
        if not default or any(other in found for other in later):
            raise InputError(
                f"{kind.__name__} is applied once, with its defaults, and in the order of "
                "temperature, top-k and top-p",
                hint="Give generate the arguments temperature, top_k and top_p.",
            )
        found[kind] = processor
    if not do_sample:
        return Sampling()
    temperature, top_k, top_p = (found.get(kind) for kind in WARPERS)
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature.temperature),
        top_k=0 if top_k is None else int(top_k.top_k),
        top_p=1.0 if top_p is None else float(top_p.top_p),
    )


def unpadded(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """The rows without the padding on their left.

    mask  [batch, tokens], 1 at tokens and 0 at padding; None where there is no padding
    """
    if mask is None:
        return input_ids.tolist()
    tokens = input_ids.shape[1]
    lengths = mask.bool().sum(1)
    left = torch.arange(tokens, device=mask.device) >= tokens - lengths[:, None]
    if mask.shape != input_ids.shape or not torch.equal(mask.bool(), left):
        raise InputError(
            "the attention mask hides more than padding on the left",
            hint='Tokenize with padding_side="left".',
        )
    return [
        row[tokens - length :]
        for row, length in zip(input_ids.tolist(), lengths.tolist(), strict=True)
    ]


def _check_config(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InputError(
            f"{mode.value.replace('_', ' ')} is not what the tree decoder does: it decodes "
            "greedily or samples",
            hint="Leave num_beams, prompt_lookup_num_tokens and the like out.",
        )
    asked = [name for name in OUTPUTS if getattr(config, name, None)]
    if config.return_dict_in_generate and asked:
        raise InputError(f"the tree decoder does not return {asked[0][7:]}", hint=PLAIN_HINT)


def _check_arguments(arguments: dict[str, Any]) -> None:
    unknown = [
        name
        for name, value in arguments.items()
        if value is not None and name not in KNOWN_ARGUMENTS
    ]
    if unknown:
        raise InputError(f"the tree decoder does not take {unknown[0]}", hint=PLAIN_HINT)
    cache = arguments.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise InputError(
            "the tree decoder keeps a cache of its own and cannot go on from a filled one",
            hint="Leave past_key_values out.",
        )


def _check_positions(prompts: list[list[int]], positions: torch.Tensor | None) -> None:
    """Raise InputError unless every prompt's tokens are at 0, 1, 2, ..."""
    if positions is None:
        return
    rows = positions.expand(len(prompts), -1).tolist()
    for row, prompt in zip(rows, prompts, strict=True):
        if row[len(row) - len(prompt) :] != list(range(len(prompt))):
            raise InputError("position_ids do not count the tokens from 0", hint=PLAIN_HINT)


def _pad_token(config: GenerationConfig) -> int:
    """The padding token, for want of one the first end token, as in transformers."""
    ends = config.eos_token_id
    first = ends[0] if isinstance(ends, list) else ends
    return next((token for token in (config.pad_token_id, first) if token is not None), 0)


def _append(input_ids: torch.Tensor, new: list[list[int]], pad: int) -> torch.Tensor:
    """[batch, tokens + the most new ones], the shorter rows padded on the right."""
    longest = max(len(tokens) for tokens in new)
    rows = [tokens + [pad] * (longest - len(tokens)) for tokens in new]
    return torch.cat((input_ids, torch.tensor(rows).to(input_ids)), dim=1)
