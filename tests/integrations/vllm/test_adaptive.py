"""The plug-in for adaptive verification: its registration, and vLLM's own decision by its tables.

vLLM's manager runs on a GPU only; here its decision alone runs, on states made by hand.
"""

from importlib.metadata import entry_points
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from integrations.draft_lengths.costs import StepCosts
from integrations.vllm import adaptive
from tests.integrations.draft_lengths.test_costs import curves
from tests.integrations.made_engine_profile import DRAFTER, make_engine_profile

STEPS = 7


def manager(contexts: dict[str, int], tables) -> SimpleNamespace:
    count = len(contexts)
    states = SimpleNamespace(
        req_id_to_index={name: index for index, name in enumerate(contexts)},
        num_computed_tokens_np=np.array(list(contexts.values())),
        prefill_len=SimpleNamespace(np=np.ones(count, np.int64)),
    )
    return SimpleNamespace(
        req_states=states, num_speculative_steps=STEPS, num_bonus_tokens=1, cost_tables=tables,
        _max_total_logits=1000, _stale_idx=0,
        _stale_confidences=[SimpleNamespace(np=np.full((count, STEPS), 0.8, np.float32))],
    )  # fmt: skip


def test_a_step_with_a_prompt_keeps_vllms_own_tables():
    tables = (np.ones(9), np.ones(100))
    own = manager({"a": 0, "b": 500}, tables)
    assert adaptive.tables_of(own, curves(), {"a": 40, "b": 3}, {"b": [1, 2]}) is tables


def test_the_mean_context_of_the_batch_decides():
    own = manager({"a": 100, "b": 300}, (np.ones(9), np.ones(100)))
    _, verify_ms = adaptive.tables_of(own, curves(), {"a": 8, "b": 8}, {"a": [1] * 7, "b": [1] * 7})
    expected = curves().verify_ms(np.ones(100), 2, 200.0)
    assert verify_ms == pytest.approx(expected)


def test_nothing_is_imported_without_a_profile(monkeypatch):
    monkeypatch.delenv("ROOFTREE_PROFILE", raising=False)
    adaptive.register()  # vLLM is not installed where most tests run


def test_vllm_finds_the_plugin():
    (found,) = entry_points(group="vllm.general_plugins", name="rooftree")
    assert found.load() is adaptive.register


with_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed (docs/engines.md)"
)


@pytest.mark.slow
@with_vllm
def test_every_manager_that_vllm_creates_is_attached(monkeypatch):
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    made, attached = object(), []
    monkeypatch.setenv("ROOFTREE_PROFILE", "profile.yaml")
    monkeypatch.setattr(adaptive_verification, adaptive.CREATE, lambda **options: made)
    monkeypatch.setattr(adaptive, "attach", lambda *arguments: attached.append(arguments[:2]))
    adaptive.register()
    adaptive.register()
    create = getattr(adaptive_verification, adaptive.CREATE)
    assert create(vllm_config="config", enable_adaptive_verification=True) is made
    assert attached == [(made, "config")]


@pytest.mark.slow
@with_vllm
@pytest.mark.parametrize(
    ("table_context", "context", "compare"), [(2000, 100, np.greater), (100, 2000, np.less)]
)
def test_vllm_decides_by_the_batchs_context(monkeypatch, table_context, context, compare):
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    profile = make_engine_profile()
    monkeypatch.setenv("VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN", str(table_context))
    monkeypatch.setattr(adaptive, "find_profile", lambda config: (profile, None))
    monkeypatch.setattr(adaptive, "drafter_key", lambda config: DRAFTER)
    decide = adaptive_verification.AdaptiveVerificationManager.get_num_tokens
    table_s = StepCosts(profile, DRAFTER).verify_s(1, table_context, STEPS)
    verify_ms = np.array([1.0, *(1e3 * seconds for seconds in table_s)])
    own = manager({"a": context}, (np.full(9, 0.1), verify_ms))
    own.get_num_tokens = lambda tokens, drafts: decide(own, tokens, drafts)
    step = {"a": STEPS + 1}, {"a": [1] * STEPS}
    by_vllm = own.get_num_tokens(*step)
    said: list[tuple] = []
    adaptive.attach(own, None, lambda *message: said.append(message))
    by_profile = own.get_num_tokens(*step)
    assert compare(by_profile, by_vllm)
    assert own.cost_tables[1] is verify_ms
    assert said == []


@pytest.mark.slow
@with_vllm
def test_after_a_fault_vllm_decides_as_before(monkeypatch):
    monkeypatch.setattr(adaptive, "find_profile", lambda config: (make_engine_profile(), None))
    monkeypatch.setattr(adaptive, "drafter_key", lambda config: DRAFTER)
    own = manager({"a": 100}, (np.ones(9), np.ones(100)))
    own.get_num_tokens = lambda tokens, drafts: 5
    said: list[tuple] = []
    adaptive.attach(own, None, lambda *message: said.append(message))
    own.req_states = None
    assert [own.get_num_tokens({"a": 8}, {"a": [1] * 7}) for _ in range(2)] == [5, 5]
    assert len(said) == 1
