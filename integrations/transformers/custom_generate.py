"""Tree decoding inside transformers' `model.generate`, by its argument `custom_generate`.

    decoder = TreeDecoder.from_pretrained(model, policy="fixed:16")
    inputs = tokenizer(["One prompt", "Another, longer one"], padding=True, return_tensors="pt")
    model.generate(**inputs, max_new_tokens=64, custom_generate=CustomGenerate(decoder))

Greedy output is that of `model.generate`, up to rounding, and sampled output has its
distribution. Sampling options, transformers' processors, stopping criteria, stop strings, padding
on the left and a streamer are respected; everything else raises an InputError. The drafter is the
decoder's, since transformers does not pass `assistant_model` on.

transformers drops `streamer` and `tokenizer` (which stop strings need) where `custom_generate` is
no method of its own. So a `CustomGenerate` replaces its model's `_extract_generation_mode_kwargs`
by one that keeps them for such calls and changes nothing for others.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from decoder.acceptance.sampling import Sampling
from decoder.engine import TreeDecoder
from decoder.generation import DecodeRun, run_together
from decoder.statistics import Statistics
from decoder.text import TextRequest, process_of

# Arguments of the model's forward that change nothing here or are checked below.
CACHES = ("past_key_values", "cache")  # its name in transformers up to 5.17, and in later ones
KNOWN_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    *CACHES,
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "tokenizer",  # transformers has made the stop strings' criterion with it
}
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # in their order
ROW_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)
EXTRACT = "_extract_generation_mode_kwargs"  # the method of a model that drops arguments
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
PLAIN_HINT = "Leave it out, or call generate without custom_generate."


class CustomGenerate:
    """A value for the argument `custom_generate` of the decoder's model.

    stats  of the last call, one for each row
    """

    def __init__(self, decoder: TreeDecoder) -> None:
        self.decoder = decoder
        self.stats: list[Statistics] = []
        model = decoder.target.model
        if EXTRACT not in vars(model):
            setattr(model, EXTRACT, partial(_extract_all, model))

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        **arguments: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Prompts and their continuations [batch, tokens], padded on the right.

        input_ids  [batch, tokens], padded on the left
        streamer   of transformers: `put` is called with the tokens of each round, `end` at the
                   end, also after an error
        Raises InputError for options that cannot be respected exactly.
        """
        try:
            if model is not self.decoder.target.model:
                raise InputError(
                    "custom_generate belongs to a decoder of another model",
                    hint="Make the decoder with TreeDecoder.from_pretrained(model).",
                )
            _check_options(generation_config, arguments)
            prompts = unpadded(input_ids, arguments.get("attention_mask"))
            if (positions := arguments.get("position_ids")) is not None:
                ids = positions.expand(len(prompts), -1).tolist()
                for row, prompt in zip(ids, prompts, strict=True):
                    if row[len(row) - len(prompt) :] != list(range(len(prompt))):
                        problem = "position_ids do not count the tokens from 0"
                        raise InputError(problem, hint=PLAIN_HINT)
            ending = _Ending(stopping_criteria, input_ids)
            # The processors before the first that `sampling_of` reads, and the others.
            kinds = [type(one) in (*WARPERS, LogitNormalization) for one in logits_processor]
            cut = kinds.index(True) if True in kinds else len(kinds)
            sampling = sampling_of(logits_processor[cut:], bool(generation_config.do_sample))
            requests = []
            for number, (prompt, row) in enumerate(zip(prompts, input_ids, strict=True)):
                try:
                    self.decoder.check(prompt, ending.new_tokens)
                except InputError as error:
                    problem = f"prompt {number + 1} of {len(prompts)}: {error.problem}"
                    raise InputError(problem, hint=error.hint) from error
                seed = int(torch.randint(2**62, ())) if sampling.temperature else 0
                padding = row[: len(row) - len(prompt)].tolist()
                request = TextRequest(
                    prompt=prompt,
                    max_new_tokens=ending.new_tokens,
                    sampling=replace(sampling, seed=seed),
                    ends=ending.ends,
                    until=ending.criterion_of(row),
                    process=process_of(_of_row(logits_processor[:cut], number), padding),
                )
                requests.append(request)
            new = self._decode(requests, streamer)
        finally:
            if streamer is not None:
                streamer.end()
        # The padding token, or the first end token if there is none, as in transformers.
        ends = generation_config.eos_token_id
        first = ends[0] if isinstance(ends, list) else ends
        pads = (token for token in (generation_config.pad_token_id, first) if token is not None)
        longest, pad = max(len(tokens) for tokens in new), next(pads, 0)
        padded = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in new])
        output = torch.cat((input_ids, padded.to(input_ids)), dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=output)
        return output

    def _decode(self, requests: list[TextRequest], streamer: Any) -> list[list[int]]:
        """The new tokens of each text; a streamer gets those of each round."""
        if streamer is None:
            sequences = [sequence for sequence, _ in run_together(self.decoder.parts, requests)]
            self.stats = [sequence.stats for sequence in sequences]
            return [sequence.token_ids for sequence in sequences]
        if len(requests) > 1:
            raise InputError(
                f"a streamer takes one text, and there are {len(requests)} prompts",
                hint="Leave the streamer out, or give one prompt at a time.",
            )
        with self.decoder.target.lock:
            run = DecodeRun(self.decoder.parts, requests[0])
            self.stats = [run.stats]
            sent = 0
            for _ in run.rounds():
                streamer.put(torch.tensor(run.token_ids[sent:]))
                sent = len(run.token_ids)
        return [run.token_ids]


def _extract_all(model: Any, *given: Any, **named: Any) -> dict[str, Any]:
    """A model's own extraction, and what it drops if `custom_generate` is a `CustomGenerate`."""
    original = getattr(type(model), EXTRACT)
    arguments = inspect.signature(original).bind(model, *given, **named).arguments
    dropped = {
        "streamer": arguments.get("streamer"),
        "tokenizer": arguments["kwargs"].get("tokenizer"),
    }
    extracted: dict[str, Any] = original(model, *given, **named)
    if isinstance(arguments["custom_generate"], CustomGenerate):
        extracted |= {name: value for name, value in dropped.items() if value is not None}
    return extracted


def _of_row(processors: Sequence[Any], row: int) -> list[Any]:
    """The processors for one row: those of transformers 5.24 may hold a length for each row."""
    alone = []
    for processor in processors:
        lengths = getattr(processor, "prompt_ignore_length", None)
        if isinstance(lengths, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = lengths[row : row + 1]
        alone.append(processor)
    return alone


class _Ending:
    """The ends of texts: a number of tokens, end tokens, and other stopping criteria.

    Raises InputError for criteria that cannot be applied row by row.
    """

    def __init__(self, criteria: StoppingCriteriaList, input_ids: torch.Tensor) -> None:
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
            # transformers then continues ended texts until the last one ends.
            raise InputError(
                "stopping criteria for several prompts need an end token",
                hint="Set eos_token_id, or give one prompt at a time.",
            )
        self.new_tokens, self.ends = criteria.max_length - tokens, frozenset(ends)
        self.others = others

    def criterion_of(self, row: torch.Tensor) -> Callable[[Sequence[int]], bool] | None:
        """A function that tells from the new tokens whether a text has ended.

        None if only its length and end tokens end it.
        row  [tokens] the prompt with its padding, as transformers passes it to criteria
        """
        if not self.others:
            return None

        def until(new: Sequence[int]) -> bool:
            text = torch.cat((row, torch.tensor(new, dtype=row.dtype, device=row.device)))
            return bool(self.others(text[None], None)[0])

        return until


def sampling_of(processors: Sequence[Any], do_sample: bool) -> Sampling:
    """The temperature, top-k and top-p of transformers' last processors, in that order.

    Raises InputError for any other processor, order, or setting of them.
    """
    warpers: dict[type, Any] = {}
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
        if not default or any(other in warpers for other in later):
            raise InputError(
                f"{kind.__name__} is applied once, with its defaults, and in the order of "
                "temperature, top-k and top-p",
                hint="Give generate the arguments temperature, top_k and top_p.",
            )
        warpers[kind] = processor
    if not do_sample:
        return Sampling()
    temperature, top_k, top_p = (warpers.get(kind) for kind in WARPERS)
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature.temperature),
        top_k=0 if top_k is None else int(top_k.top_k),
        top_p=1.0 if top_p is None else float(top_p.top_p),
    )


def unpadded(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """The token ids of each row without the padding on the left.

    mask  [batch, tokens], 1 at tokens and 0 at padding; None: no padding
    Raises InputError for another mask.
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


def _check_options(config: GenerationConfig, arguments: dict[str, Any]) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InputError(
            f"{mode.value.replace('_', ' ')} is not what the tree decoder does: it decodes "
            "greedily or samples",
            hint="Leave num_beams, prompt_lookup_num_tokens and the like out.",
        )
    outputs = [name for name in OUTPUTS if getattr(config, name, None)]
    if config.return_dict_in_generate and outputs:
        raise InputError(f"the tree decoder does not return {outputs[0][7:]}", hint=PLAIN_HINT)
    given = (name for name, value in arguments.items() if value is not None)
    if unknown := [name for name in given if name not in KNOWN_ARGUMENTS]:
        raise InputError(f"the tree decoder does not take {unknown[0]}", hint=PLAIN_HINT)
    for name in CACHES:
        cache = arguments.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise InputError(
                "the tree decoder keeps a cache of its own and cannot go on from a filled one",
                hint=f"Leave {name} out.",
            )
