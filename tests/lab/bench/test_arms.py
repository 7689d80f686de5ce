"""Our decoder and transformers' generate as arms, on a tiny random model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from costmodel.errors import InputError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import DrafterSection
from decoder.engine import TreeDecoder
from decoder.model.loading import load_model
from decoder.model.making import make_target
from decoder.model.target import Step, Target
from decoder.profiling.probe import quick_profile
from decoder.profiling.startup import ProfileChoice
from lab.bench.arms.builder import ArmBuilder, DecodingOptions
from lab.bench.arms.choice import ArmNames, plan_arms
from lab.bench.arms.peers import PeerArm, share_weights
from lab.bench.arms.tree_decoder import TreeArm
from lab.bench.environment import bandwidth_limit
from lab.bench.record import Arm
from tests.decoder.models import greedy
from tests.tiny_folder import isolate

IDS = [5, 7, 5, 7, 5, 7, 9]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tiny_target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, tmp_path_factory.mktemp("runners"))
        yield tiny_target


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return greedy(model, IDS, NEW_TOKENS)


def loaded(folder: Path):
    return load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))


def builder_of(folder, drafters: dict[str, str], calibrate: bool = False, **choice) -> ArmBuilder:
    profile = ProfileChoice(calibrate=calibrate)
    return ArmBuilder(loaded(folder), drafters, DecodingOptions(profile=profile, **choice))


def tokens_of(runner, ids=IDS, new_tokens=NEW_TOKENS, seed=0) -> list[int]:
    """What it hands over, and that it hands it over piece by piece."""
    pieces: list[list[int]] = []

    def put(tokens) -> bool:
        pieces.append(list(tokens))
        return True

    for _ in runner.start(ids, new_tokens, seed).steps(put):
        pass
    assert len(pieces) > 1
    return [token for piece in pieces for token in piece]


def test_peers_are_untouched_by_what_ours_does(folder: Path, expected) -> None:
    def peer(**options) -> PeerArm:
        return PeerArm(Arm(name="x", kind="peer", policy="x"), model, 0.0, options)

    own = loaded(folder)
    before = own.model.config._attn_implementation
    model = share_weights(own.model, frozenset())
    target = make_target(own, fused=False, runtime="eager")
    assert own.model.config._attn_implementation != before
    assert model.config._attn_implementation == before
    theirs = dict(model.named_parameters())
    for name, weight in own.model.named_parameters():
        assert theirs[name].data_ptr() == weight.data_ptr()
    assert tokens_of(peer()) == tokens_of(peer(prompt_lookup_num_tokens=10)) == expected
    plain = TreeDecoder(target, policy="plain")
    assert plain.generate(IDS, max_new_tokens=NEW_TOKENS).token_ids == expected


class TestTreeArm:
    def test_predictions_are_those_before_each_round(self, folder: Path) -> None:
        """`ema` by hand: the roofline times a bias that each round moves by a tenth."""
        choice = ProfileChoice(calibrate=False, estimator="ema")
        decoder = TreeDecoder(make_target(loaded(folder)), policy="bastion", profile=choice)
        runner = TreeArm(Arm(name="bastion", kind="policy", policy="bastion"), decoder, 0.0)
        decoding = runner.start(IDS, NEW_TOKENS, 0)
        for _ in decoding.steps(lambda tokens: True):
            pass
        found = decoding.details().rounds
        roofline = decoder.cost_source.cost.cost.roofline
        bias, context, first = 1.0, len(IDS), True
        for index in range(found.count):
            middle = 32 * (context // 32) + 16  # costs are read once for 32 tokens of context
            bare_s = float(roofline.seconds(found.nodes[index] + 1, middle))
            assert found.predicted_verify_s[index] == pytest.approx(bias * bare_s, abs=2e-7)
            ratio = found.verify_s[index] / bare_s
            # The record rounds to 0.1 us, so its ratio is only nearly the decoder's.
            bias = ratio if first else 0.9 * bias + 0.1 * ratio
            context, first = context + found.accepted[index] + 1, False
        assert found.count > 3

    def test_the_limit_is_the_sum_of_plain_steps(self, folder: Path) -> None:
        decoder = TreeDecoder(make_target(loaded(folder)), policy="bastion")
        profile = decoder.cost_source.profile
        physical = profile.roofline("physical")
        by_hand = sum(float(physical.seconds(1, context)) for context in (7, 8, 9))
        assert bandwidth_limit(profile)(7, 4) == pytest.approx(by_hand, abs=1e-7)
        assert bandwidth_limit(None)(7, 4) is None


class TestBuilder:
    def test_every_kind_of_arm_gives_the_plain_text(self, folder: Path, expected) -> None:
        drafters = {"ngram": "ngram", str(folder): "tiny"}
        builder = builder_of(folder, drafters)
        assert builder.causal_drafters == ("tiny",)
        policies = ("chain", "bastion", "static-tree:5x2", "dynatree")
        asked = ArmNames(policies=policies, drafters=tuple(drafters), studies=("estimator",))
        arms = plan_arms(asked, causal_drafters=builder.causal_drafters)
        runners = builder.runners(arms)
        assert [one.arm.name for one in runners] == [arm.name for arm in arms]
        own = [one for one in runners if one.arm.drafter == "tiny" or one.arm.kind == "peer"]
        short = {one.arm.name: tokens_of(one, new_tokens=8)[:8] for one in own}
        assert "transformers:assisted+tiny" in short
        assert len(short) == 10
        assert {name for name, tokens in short.items() if tokens != expected[:8]} == set()
        modes = {one.arm.variant: one.arm.estimator for one in runners if one.arm.variant}
        assert all(modes[mode] == mode for mode in ("static", "ema", "ema+calib"))

    @pytest.mark.parametrize("same_text", [True, False])
    def test_arms_that_round_differently(self, folder, expected, monkeypatch, same_text) -> None:
        """Forwards of several rows prefer another token; asked for, all write one text."""
        verify = Target.verify

        @torch.inference_mode()
        def rounded(target: Target, steps: Sequence[Step]) -> list[torch.Tensor]:
            found = verify(target, steps)
            for logits in found:
                if len(logits) > 1:
                    logits[:, 3] = logits.max() + 1
            return found

        monkeypatch.setattr(Target, "verify", rounded)
        both = f"ngram+{folder}"
        drafters = {"ngram": "ngram", both: "ngram+tiny"}
        builder = builder_of(folder, drafters, same_text=same_text)
        asked = ArmNames(drafters=("ngram", both), peers=())
        runners = builder.runners(plan_arms(asked))
        written = {one.arm.name: tokens_of(one)[:NEW_TOKENS] for one in runners}
        assert written.pop("plain") == expected
        assert len(written) == 4
        assert all((tokens == expected) is same_text for tokens in written.values())

    def test_arms_that_decode_together_share_weights_and_nothing_else(self, folder: Path) -> None:
        both = f"ngram+{folder}"
        builder = builder_of(folder, {both: "ngram+tiny"}, by_round=True)
        asked = ArmNames(policies=("chain", "fixed:3"), drafters=(both,), peers=())
        own = [one._decoder for one in builder.runners(plan_arms(asked))]
        for part in ("target", "drafter"):
            assert len({id(getattr(decoder, part)) for decoder in own}) == 3
        assert len({id(decoder.target.model) for decoder in own}) == 1
        assert own[1].drafter.second is own[2].drafter.second

    @pytest.mark.parametrize("home", ["kept", "not written", "bare"])
    def test_device_and_drafters_are_timed_at_most_once(self, folder, tmp_path, monkeypatch, home):
        """Whether or not costs can be kept in a profile of the user's."""
        timed: list[str] = []

        def time_drafter(drafter, *more) -> DrafterSection:
            timed.append(drafter.name)
            times = {"context": [64], "median_s": [1e-3], "mad_s": [0.0], "n": [5]}
            return DrafterSection(name=drafter.name, **times)

        monkeypatch.setattr("decoder.profiling.startup.time_drafter", time_drafter)
        monkeypatch.setattr("decoder.profiling.probe.time_drafter", time_drafter)
        probed: list[Profile] = []

        def probe(*arguments) -> Profile:
            probed.append(quick_profile(*arguments))
            return probed[-1]

        monkeypatch.setattr("decoder.profiling.startup.quick_profile", probe)
        monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))
        if home == "not written":
            (tmp_path / "home").write_text("a file is in the way")
        drafters = {"ngram": "ngram", str(folder): "tiny", f"ngram+{folder}": "ngram+tiny"}
        builder = builder_of(folder, drafters, calibrate=home != "bare")
        policies = ("bastion", "bastion:printed")
        asked = ArmNames(policies=policies, drafters=tuple(drafters), peers=())
        runners = builder.runners(plan_arms(asked))
        assert sum(bool(one.arm.cost) for one in runners) == 2 * len(drafters)
        assert len(timed) == len(set(timed)) == len(drafters)
        assert len(probed) == (home != "bare"), "arms went by probes of their own"
        kept = [Profile.from_yaml(path) for path in (tmp_path / "home").rglob("*.yaml")]
        assert [len(profile.drafters) for profile in kept] == ([3] if home == "kept" else [])


class TestArms:
    def test_names_groups_and_order(self) -> None:
        arms = plan_arms(ArmNames(policies=("fixed:7", "plain"), studies=("sweep", "shape")))
        assert [(arm.name, arm.studies) for arm in arms] == [
            ("plain", ("policies",)), ("fixed:7+ngram", ("policies", "sweep")),
            *((f"fixed:{nodes}+ngram", ("sweep",)) for nodes in (1, 3, 15, 31)),
            ("beam:4x15+ngram", ("shape",)), ("fixed:60+ngram", ("shape",)),
            ("transformers:plain", ("policies",)), ("transformers:prompt-lookup", ("policies",)),
        ]  # fmt: skip
        assert [arm.nodes for arm in arms] == [None, 7, 1, 3, 15, 31, 60, 60, None, None]

    def test_a_policy_of_one_drafter_alone(self) -> None:
        drafters = ("a/x", "a/x@block=4", "ngram")
        policies = ("chain", "fixed:59@ngram", "fixed:7@x@block=4", "fixed:3@a/x")
        arms = plan_arms(ArmNames(policies=policies, drafters=drafters, peers=()))
        assert [(arm.policy, arm.drafter) for arm in arms[1:]] == [
            ("chain", "x"), ("fixed:3", "x"), ("chain", "x@block=4"), ("fixed:7", "x@block=4"),
            ("chain", "ngram"), ("fixed:59", "ngram"),
        ]  # fmt: skip

    @pytest.mark.parametrize(("changed", "message"), [
        ({"policies": ("fixed:0",)}, "'fixed:0' is not a policy"),
        ({"policies": ("chain@x",)}, "for the drafter 'x', which is not there"),
        ({"peers": ("assisted",)}, "assisted generation needs a drafter that is a causal"),
        ({"drafters": ("a/x", "a/x")}, "two drafters are called 'x'"),
        ({"drafters": ("/c/a/x", "/d/a/x")}, "two drafters are called 'a/x'"),
        ({"drafters": ("x@adapt=often",)}, "'often' does not say how a drafter is updated"),
        ({"drafters": (" ",)}, "the drafter's name is empty"),
    ])  # fmt: skip
    def test_what_is_wrong_is_said(self, changed: dict, message: str) -> None:
        with pytest.raises(InputError) as error:
            plan_arms(ArmNames(**changed))
        assert message in str(error.value)
