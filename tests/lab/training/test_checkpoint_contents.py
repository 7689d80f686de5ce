"""Crafted checkpoints: tensors that the fused optimiser would read or write beyond their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from costmodel.errors import InputError
from lab.training.loop import CHECKPOINT, TrainingSettings, train


class Fit:
    """The least objective there is: a linear map to 0."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(64, 48)

    def loss(self, example: Any, generator: torch.Generator, step: int) -> Any:
        return self.model(example).square().mean(), {}

    def validate(self, examples: Any) -> dict[str, float]:
        return {}


def run(folder: Path, steps: int) -> Fit:
    objective = Fit()
    settings = TrainingSettings(
        steps=steps, batch=1, warmup=1, autocast=False, save_every=2, seed=1
    )
    train(objective, [torch.ones(64)], [], settings, folder)  # type: ignore[list-item]
    return objective


def state_of(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / CHECKPOINT, weights_only=True)
    return state


def one(tensor: torch.Tensor) -> Any:
    return torch.ones(1)


def repeated(tensor: torch.Tensor) -> Any:
    """The right shape over a single number."""
    return torch.ones(1).expand(tensor.shape)


CRAFTED = {
    "shape 1": one,
    "of no entries": lambda tensor: torch.ones(0),
    "transposed": lambda tensor: tensor.T.contiguous() if tensor.ndim == 2 else one(tensor),
    "float16": lambda tensor: tensor.half(),
    "int64": lambda tensor: tensor.long(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "sparse": lambda tensor: tensor.to_sparse(),
    "no tensor": lambda tensor: 3,
    "none": lambda tensor: None,
}


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("how", CRAFTED)
def test_moments_that_are_not_like_their_weights_are_refused(
    tmp_path: Path, name: str, how: str
) -> None:
    run(tmp_path, 2)
    state = state_of(tmp_path)
    for moments in state["optimiser"]["state"].values():
        moments[name] = CRAFTED[how](moments[name])
    torch.save(state, tmp_path / CHECKPOINT)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(InputError, match="belongs to another drafter"):
        run(tmp_path, 4)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize(
    "state",
    [{}, [], None, {"state": 3}, {"state": {5: {}}}, {"state": {0: {}}}, {"state": {"a": 1}}],
)
def test_an_optimiser_s_state_of_another_form_is_refused(tmp_path: Path, state: Any) -> None:
    run(tmp_path, 2)
    torch.save(state_of(tmp_path) | {"optimiser": state}, tmp_path / CHECKPOINT)
    with pytest.raises(InputError, match="belongs to another drafter"):
        run(tmp_path, 4)


def test_moments_over_shared_numbers_are_copied(tmp_path: Path) -> None:
    """Of the right shape, but written in place they would overwrite each other."""
    run(tmp_path, 2)
    state = state_of(tmp_path)
    for moments in state["optimiser"]["state"].values():
        moments["exp_avg"] = repeated(moments["exp_avg"])
        moments["exp_avg_sq"] = repeated(moments["exp_avg_sq"])
    torch.save(state, tmp_path / CHECKPOINT)
    resumed = run(tmp_path, 4).model.state_dict()
    for moments in state["optimiser"]["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name] = moments[name].contiguous()
    torch.save(state, tmp_path / CHECKPOINT)
    whole = run(tmp_path, 4).model.state_dict()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_settings_of_the_optimiser_are_those_of_the_run(tmp_path: Path) -> None:
    """A stored group of parameters is not looked at."""
    run(tmp_path, 2)
    state = state_of(tmp_path)
    plain = run_from(tmp_path, state)
    state["optimiser"]["param_groups"] = [{"params": [7], "lr": "x", "betas": None}]
    assert all(map(torch.equal, plain, run_from(tmp_path, state)))


def run_from(folder: Path, state: dict[str, Any]) -> list[torch.Tensor]:
    torch.save(state, folder / CHECKPOINT)
    return list(run(folder, 4).model.state_dict().values())
