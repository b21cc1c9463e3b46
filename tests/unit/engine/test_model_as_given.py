"""Models that nothing can train, or that start from numbers which are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused
from torch import nn

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.errors import ModelError


def emptied() -> nn.Module:
    """As `deepspeed.zero.Init` leaves a module."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].weight.data = torch.empty(0)
    return model


def with_nan() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with torch.no_grad():
        model[1].bias.fill_(float("nan"))
    return model


def frozen() -> nn.Module:
    return nn.Linear(3, 1).requires_grad_(False)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, device="meta"))


def prepared(model: Any) -> list[str]:
    config = parse_sections(optim={"type": "SGD", "lr": 0.1}).config
    said: list[str] = []
    prepare_native(Preparation(config, open_world(config), model=model, log=said.append))
    return said


REFUSED: list[tuple[Callable[[], nn.Module], list[str]]] = [
    (emptied, ["'1.weight'", "(0,)"]),
    (frozen, ["requires_grad=False"]),
    (lazy, ["'0.weight'", "lazy"]),
]


@pytest.mark.parametrize(("make", "named"), [*REFUSED, (half_on_meta, ["'1.weight'", "meta"])])
def test_a_module_that_cannot_be_trained_is_refused(make: Callable[[], nn.Module], named: list[str]) -> None:
    with refused(ModelError, *named):
        prepared(make())


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_so_is_what_a_function_makes(make: Callable[[], nn.Module], named: list[str]) -> None:
    with refused(ModelError, *named):
        prepared(make)


def test_the_front_ends_refuse_them_too() -> None:
    import plait.frontends.deepspeed as deepspeed
    from plait.frontends.accelerate import Accelerator

    model = emptied()
    settings = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with refused(ModelError, "'1.weight'", "(0,)"):
        deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())
    with refused(ModelError, "'1.weight'", "(0,)"):
        Accelerator().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    deepspeed.comm.destroy_process_group()


def test_initial_values_that_are_not_finite_are_said() -> None:
    assert [text for text in prepared(with_nan()) if not missing(text, "'1.bias'", "finite")]
    assert prepared(nn.Linear(3, 1)) == []


def test_that_a_module_on_meta_is_initialized_anew_is_said() -> None:
    assert [text for text in prepared(nn.Linear(3, 1, device="meta")) if not missing(text, "meta", "Linear")]
