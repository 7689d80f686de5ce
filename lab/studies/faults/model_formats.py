"""File formats that are read with a model: targets, tokenizers, drafters, training folders."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import DFlashModel, save_dflash
from decoder.drafters.eagle3.model import Eagle3Config, Eagle3Model, save_eagle3
from decoder.engine import TreeDecoder
from decoder.model import selfcheck
from decoder.model.loading import LoadedModel, load_model
from decoder.model.target import Target
from lab.papers.blockpilot.drafter import BlockPredictor, PilotConfig, save_predictor
from lab.papers.blockpilot.sweeps import read_sweeps
from lab.papers.specblock.model import save_specblock
from lab.papers.specblock.training.objective import SpecBlockSettings
from lab.papers.specblock.training.recipe import first_model
from lab.studies.faults.formats import Format
from lab.studies.faults.judge import Wrong
from lab.studies.faults.mutations import Kind
from lab.training.corpus import Collecting, TrainingText, collect, read_corpus
from lab.training.dflash import DFlashObjective, DFlashTraining, fresh_config, fresh_model
from lab.training.features import Examples
from lab.training.loop import TrainingSettings, train
from tests.tiny_folder import CONFIG, write_all, write_tokenizer, write_weights

CPU = torch.device("cpu")
PROMPT, TEXT, TOKENS = [9, 40, 3, 9, 40, 3, 77], "hello, hello", 10
TEMPLATE = (
    "{% for message in messages %}<|mark|>{{ message['role'] }}: {{ message['content'] | trim }}"
    "{% if not loop.last %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|mark|>{% endif %}"
)
WANTED = DFlashTraining(layers=2, block_size=4, anchors=4, vocabulary=64)
COLLECTING = Collecting(batches=1, batch=4, prompt_tokens=4, answer_tokens=12)
SETTINGS = TrainingSettings(steps=2, batch=1, warmup=1, autocast=False, save_every=1)


@cache
def tiny_folder() -> Path:
    """A whole target of four layers, made once for a process."""
    folder = Path(tempfile.mkdtemp(prefix="faults-target-"))
    return write_tokenizer(write_weights(folder, num_hidden_layers=4))


@cache
def tiny() -> LoadedModel:
    return load_model(str(tiny_folder()), weights="pretrained", dtype=torch.float32, device=CPU)


@cache
def trainable() -> LoadedModel:
    """The same for training, never given to a `Target`, which may pack the weights elsewhere."""
    return load_model(str(tiny_folder()), weights="pretrained", dtype=torch.float32, device=CPU)


@cache
def plain_tokens() -> list[int]:
    """The target's own text after `PROMPT`."""
    decoder = TreeDecoder(Target(tiny()), policy="plain")
    return decoder.generate(PROMPT, max_new_tokens=TOKENS).token_ids


def make_target(folder: Path) -> None:
    write_all(folder)


def use_target(folder: Path) -> None:
    """Draft trees give the text of plain decoding, whatever model the files now describe."""
    loaded = load_model(str(folder), weights="pretrained", dtype=torch.float32, device=CPU)
    texts = []
    for policy in ("plain", "fixed:5"):
        decoder = TreeDecoder(Target(loaded), policy=policy)
        texts.append(decoder.generate(PROMPT, max_new_tokens=TOKENS).token_ids)
    if texts[0] != texts[1]:
        raise Wrong("trees give another text than plain decoding")


def make_tokenizer(folder: Path) -> None:
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def use_tokenizer(folder: Path) -> None:
    loaded = replace(tiny(), source=str(folder))
    decoder = TreeDecoder(Target(loaded), policy="fixed:5")
    for chat in (False, True):
        result = decoder.generate(TEXT, max_new_tokens=TOKENS, chat=chat, stop=["qq"])
        str(result.text).encode()


def use_drafter(kind: str, folder: Path) -> None:
    """Whatever the drafter says, the text is the target's."""
    decoder = TreeDecoder(Target(tiny()), drafter=str(folder / kind), policy="fixed:5")
    if decoder.generate(PROMPT, max_new_tokens=TOKENS).token_ids != plain_tokens():
        raise Wrong(f"a drafter of kind {kind} changed the text")


def dflash_model() -> DFlashModel:
    model = fresh_model(trainable(), fresh_config(trainable(), WANTED, mask_token=259), seed=0)
    model.head_tokens = np.arange(0, 260, 4)
    return model


def make_dflash(folder: Path) -> None:
    save_dflash(folder / "dflash", dflash_model())


@cache
def target_with_drafter() -> Path:
    """The folder of the tiny target, with a drafter in its folder `dflash`."""
    make_dflash(tiny_folder())
    return tiny_folder()


def make_eagle3(folder: Path, pickled: bool = False) -> None:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = {name: CONFIG[name] for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 260,
        "max_position_embeddings": 256, "draft_vocab_size": 260,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Eagle3Model(Eagle3Config.parse(config))
    save_eagle3(folder / "eagle3", model)
    if pickled:
        (folder / "eagle3" / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "eagle3" / "pytorch_model.bin")


def make_specblock(folder: Path) -> None:
    settings = SpecBlockSettings(layers=1, block_length=3, tokens=tuple(range(0, 260, 5)))
    model = first_model(trainable(), settings, torch.Generator().manual_seed(0))
    save_specblock(folder / "specblock", model)


def make_blockpilot(folder: Path) -> None:
    make_dflash(folder)
    drafter = DFlashDrafter(Target(tiny()), str(folder / "dflash"))
    config = PilotConfig(
        drafter="../dflash",
        drafter_hash=drafter.model.config.hash(260),
        block_size=4,
        candidates=(2, 3, 4, 5),
        vocab=260,
        hidden=8,
        layers=1,
    )
    save_predictor(folder / "blockpilot", BlockPredictor(config))


def make_causal(folder: Path) -> None:
    write_tokenizer(write_weights(folder / "causal", num_hidden_layers=1))


def make_training(folder: Path) -> None:
    """Collected texts and a checkpoint of two steps."""
    run_training(folder)


def run_training(folder: Path) -> list[TrainingText]:
    """Go on with the training in a folder as `rooftree train-drafter` does; returns its texts."""
    collect(trainable(), folder / "texts", COLLECTING)
    texts = read_corpus(folder / "texts", trainable().architecture.vocab)
    model = fresh_model(trainable(), fresh_config(trainable(), WANTED, mask_token=259), seed=0)
    objective = DFlashObjective(trainable(), model, WANTED, torch.arange(0, 260, 4))
    examples = Examples(trainable(), texts, objective.layers, folder)
    train(objective, examples, [], SETTINGS, folder)
    return texts


def use_training(folder: Path) -> None:
    """A damaged part is named, or done again; a sound one is never done again."""
    run_training(folder)


def make_sweeps(folder: Path) -> None:
    from safetensors.torch import save_file

    settings = {"block_size": 4, "candidates": [2, 3, 4], "vocab": 12, "drafter_hash": "abc"}
    (folder / "collection.json").write_text(json.dumps(settings))
    for number in range(2):
        sample = {
            "prompt": torch.arange(5),
            "logits": torch.zeros(12),
            "decoded": torch.tensor([8, 9, 9]),
            "rounds": torch.tensor([4, 4, 3]),
            "decode_s": torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64),
        }
        save_file(sample, folder / f"{number:06}.safetensors")


def use_sweeps(folder: Path) -> None:
    read_sweeps(folder)


def make_structure(folder: Path) -> None:
    with home(folder):
        Target(tiny())


def use_structure(folder: Path) -> None:
    """A note that is damaged is not believed."""
    sound = Target(tiny()).structure
    with home(folder):
        if Target(tiny()).structure != sound:
            raise Wrong("another structure")


@contextmanager
def home(folder: Path) -> Iterator[None]:
    """A data directory for the body, in which nothing is known from before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROOFTREE_HOME", str(folder))
        patch.setattr(selfcheck, "_checked", {})
        yield


def make_features(folder: Path) -> None:
    [*examples(folder)]


def use_features(folder: Path) -> None:
    """Features that cannot be the text's are computed again."""
    for example in examples(folder):
        sizes = (example.features.shape[-1], example.final.shape[-1])
        if sizes != (2 * CONFIG["hidden_size"], CONFIG["hidden_size"]):
            raise Wrong(f"features of {sizes}")


def examples(folder: Path) -> Examples:
    texts = [TrainingText(tokens=tuple(range(n, n + 9)), prompt_tokens=3) for n in range(2)]
    return Examples(trainable(), texts, (1, 3), folder)


JSON: dict[str, Kind] = {"*.json": "json"}
FOLDER: dict[str, Kind] = {"*/*.json": "json", "*/*.safetensors": "binary", "*/*.bin": "binary"}
TRAINING: dict[str, Kind] = {
    "texts/corpus.json": "json", "texts/*.jsonl": "jsonl", "checkpoint.pt": "binary",
}  # fmt: skip
DRAFTERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "drafter-dflash": ("dflash", make_dflash),
    "drafter-eagle3": ("eagle3", make_eagle3),
    "drafter-pickled": ("eagle3", partial(make_eagle3, pickled=True)),
    "drafter-specblock": ("specblock", make_specblock),
    "drafter-blockpilot": ("blockpilot", make_blockpilot),
    "drafter-causal": ("causal", make_causal),
}

MODEL_FORMATS = (
    Format(
        name="target",
        make=make_target,
        kinds=JSON | {"*.safetensors": "binary"},
        use=use_target,
    ),
    Format(
        name="tokenizer",
        make=make_tokenizer,
        kinds=JSON | {"*.jinja": "text"},
        use=use_tokenizer,
    ),
    Format(name="training", make=make_training, kinds=TRAINING, use=use_training),
    Format(
        name="sweeps", make=make_sweeps, kinds=JSON | {"*.safetensors": "binary"}, use=use_sweeps
    ),
    Format(name="structure", make=make_structure, kinds={"*/*.json": "json"}, use=use_structure),
    Format(
        name="features",
        make=make_features,
        kinds={"*/*.safetensors": "binary"},
        use=use_features,
    ),
    *(
        Format(name=name, make=make, kinds=FOLDER, use=partial(use_drafter, kind))
        for name, (kind, make) in DRAFTERS.items()
    ),
)
