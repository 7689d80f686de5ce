"""Drafters and policies of other packages: how they are named, built and refused."""

import sys
from pathlib import Path

import pytest
import torch

from costmodel.errors import InputError
from costmodel.profile.profile import Profile
from decoder.drafters.base import Drafter
from decoder.drafters.ensemble import EnsembleDrafter
from decoder.drafters.factory import load_drafter
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.extensions import DRAFTERS, is_installed
from decoder.policies.base import Policy
from decoder.policies.bastion import parse_policy
from decoder.profiling.startup import is_storable
from tests.decoder.models import PROMPT, decoder_of, greedy, random_model, target_of
from tests.tiny_folder import isolate

SOURCE = """
import numpy as np

from rooftree import Drafter, DraftSession, Lattice, Policy, best_first

class Repeat(Drafter, DraftSession):
    name = "repeat"

    def start(self, prompt, features, logits=None):
        return self

    def draft(self, context, request):
        return Lattice(context[-1:, None], np.full((1, 1), 0.5))

class Sized(Repeat):
    def __init__(self, target):
        self.vocab = target.architecture.vocab

class Small(Policy):
    name = "small"

    def __init__(self, max_nodes=3):
        self.max_nodes = max_nodes

    def choose(self, candidates, context, limits):
        return best_first(candidates, min(self.max_nodes, limits.nodes))

class Priced(Small):
    def __init__(self, cost, max_nodes):
        super().__init__(max_nodes)
        self.cost = cost(len)

def small(max_nodes, arguments=""):
    return Small(int(arguments or min(max_nodes, 2)))

class Stored(Repeat):
    def recognises(config):
        return config.get("mine") is True

    def from_pretrained(name, target):
        return Stored()

class Broken(Drafter):
    def __init__(self):
        raise ValueError("it is broken")

class Greedy(Drafter):
    def __init__(self, checkpoint):
        pass

number = 7
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no waiting for a hub
    return isolate(monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, with a user's module and one that cannot be imported."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "mine_here.py").write_text(SOURCE)
    (work / "half_here.py").write_text("import no_such_package_at_all\n")
    (work / "wrong_here.py").write_text("def f(:\n")
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mine_here", "half_here", "wrong_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return work


@pytest.fixture
def installed(folder):
    """The metadata of a package with entry points, as pip writes it."""
    info = folder / "mine_here-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-here\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rooftree.drafters]\nrepeat = mine_here:Repeat\nstored = mine_here:Stored\n"
        "[rooftree.policies]\nsmall = mine_here:small\nsmall:one = mine_here:Small\n"
    )
    sys.path.append(str(folder))


@pytest.fixture(scope="module")
def target():
    return target_of(random_model("llama-gqa", dtype=torch.float32))


def policy(name: str) -> Policy:
    return parse_policy(name, lambda fit=None: fit, 9)


class TestNames:
    def test_drafter(self, target):
        drafter = load_drafter("mine_here:Repeat", target)
        assert isinstance(drafter, Drafter)
        assert drafter.name == "repeat"
        assert load_drafter("mine_here:Sized", target).vocab == target.architecture.vocab

    def test_policy(self):
        assert (policy("mine_here:Small").name, policy("mine_here:Small").max_nodes) == ("small", 9)
        assert policy("mine_here:small").max_nodes == 2
        assert policy("mine_here:Priced").cost is len

    def test_entry_points(self, installed, target):
        assert load_drafter("repeat", target).name == "repeat"
        assert policy("small").max_nodes == 2
        assert policy("small:5").max_nodes == 5
        assert policy("small:one").max_nodes == 9  # the whole name comes first
        with pytest.raises(InputError, match=r"'small:x' cannot be made"):
            policy("small:x")
        with pytest.raises(InputError, match=r"plain, .*small, small:one, .*or package:Class"):
            policy("nonesuch")

    def test_checkpoints(self, installed, folder, target):
        """A class that recognises a config.json reads its folder, and has no name."""
        (folder / "config.json").write_text('{"mine": true, "draft_vocab_size": 9}')
        drafter = load_drafter(str(folder), target)
        assert type(drafter).__name__ == "Stored"
        assert is_storable(drafter)
        with pytest.raises(InputError, match="stored"):
            load_drafter("stored", target)

    def test_an_entry_point_that_cannot_be_loaded(self, installed, folder, target):
        points = folder / "mine_here-1.0.dist-info" / "entry_points.txt"
        points.write_text("[rooftree.drafters]\ngone = mine_here:Gone\n")
        (folder / "config.json").write_text("{}")
        for name in ("gone", str(folder)):
            with pytest.raises(InputError, match=r"'gone' \(mine_here:Gone\) cannot be loaded"):
                load_drafter(name, target)

    def test_our_names_come_first(self, installed, folder, target):
        points = folder / "mine_here-1.0.dist-info" / "entry_points.txt"
        points.write_text("[rooftree.drafters]\nngram = mine_here:Repeat\n")
        assert isinstance(load_drafter("ngram", target), NgramDrafter)
        assert policy("bastion:paper").name == "bastion:paper"


class TestErrors:
    @pytest.mark.parametrize(("name", "message"), [
        ("nothing_here:Repeat", r"there is no module 'nothing_here'\. Install it"),
        ("mine_here.sub:Repeat", r"there is no module 'mine_here\.sub'|not a package"),
        ("half_here:Repeat", r"importing it fails: .*no_such_package_at_all"),
        ("wrong_here:Repeat", r"importing it fails: SyntaxError"),
        ("mine_here:Gone", r"has no 'Gone'\. Its classes are Repeat, Sized, Small"),
        ("mine_here:number", r"is no class or function\. Name a subclass of rooftree\.Drafter"),
        ("mine_here:Small", r"makes a Small\. Name a subclass of rooftree\.Drafter"),
        ("mine_here:Broken", r"cannot be made: TypeError|ValueError: it is broken"),
        ("mine_here:Greedy", r"cannot be made: TypeError.*those of target that it names"),
    ])  # fmt: skip
    def test_drafter(self, target, name, message):
        with pytest.raises(InputError, match=message) as caught:
            load_drafter(name, target)
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)

    def test_policy(self):
        message = r"makes a Repeat\. Name a subclass of rooftree\.Policy"
        with pytest.raises(InputError, match=message):
            policy("mine_here:Repeat")
        with pytest.raises(InputError, match=r"'fixed:x' is not a policy\. Write fixed:N"):
            policy("fixed:x")


class TestCosts:
    """Costs of a class that no installed package names stay out of profiles."""

    def stored(self, home: Path) -> Profile:
        (path,) = home.rglob("*.yaml")
        return Profile.from_yaml(path)

    def test_which_are_stored(self, installed, target, folder):
        repeat = load_drafter("mine_here:Repeat", target)
        assert is_installed(NgramDrafter(), DRAFTERS)
        assert is_storable(EnsembleDrafter(NgramDrafter(), repeat))
        (folder / "mine_here-1.0.dist-info" / "entry_points.txt").unlink()
        assert not is_storable(repeat)
        assert not is_storable(EnsembleDrafter(NgramDrafter(), repeat))

    def test_probed_profile(self, home):
        model = random_model("llama-gqa", dtype=torch.float32)
        decoder = decoder_of(model, "bastion", "mine_here:Repeat", max_nodes=7)
        assert decoder.cost_source is not None
        assert decoder.cost_source.cost.cost.drafter is not None  # timed for this run
        assert self.stored(home).drafters == {}
        assert decoder.generate(PROMPT, max_new_tokens=12).token_ids == greedy(model, PROMPT, 12)

    def test_profile_that_was_there(self, home, target):
        TreeDecoder(target, drafter="ngram", max_nodes=7)
        assert list(self.stored(home).drafters) == ["ngram"]
        decoder = TreeDecoder(target, drafter="mine_here:Repeat", max_nodes=7)
        assert "draft cost of repeat timed now, not kept" in decoder.profile_line
        assert list(self.stored(home).drafters) == ["ngram"]
