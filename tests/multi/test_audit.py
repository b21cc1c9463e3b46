"""The audit of the first step: planted faults are found by name, and what is meant is not taken for a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.errors import ModelError
from plait.models import LossTerm
from tests.multi.ranks import RankFailedError, RankPool
from tests.refusals import missing, refused

DIM = 6
OPTIM = {"type": "SGD", "lr": 0.1}


class Net(nn.Module):
    """Layers, a running statistic and a table; the models below get a fault each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.norm = nn.BatchNorm1d(DIM)
        self.head = nn.Linear(DIM, 1)
        self.register_buffer("table", torch.arange(DIM).float(), persistent=False)
        self.register_buffer("bias", torch.zeros(DIM))

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x + self.table + self.bias))
        return x

    def forward(self, x: Tensor) -> LossTerm:
        return LossTerm(self.head(self.norm(self.hidden(x))).square().sum(), torch.tensor(float(len(x))))


class Detached(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x).detach()


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())


class Experts(Net):
    """One of three experts gets the tokens; a second factor and a gate begin at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.adapter = nn.ModuleDict({"lora_A": nn.Linear(DIM, 2, bias=False), "lora_B": nn.Linear(2, DIM, bias=False)})
        nn.init.zeros_(self.adapter["lora_B"].weight)
        self.gated = Gated()

    def hidden(self, x: Tensor) -> Tensor:
        x = super().hidden(x)
        return self.experts[1](x) + self.adapter["lora_B"](self.adapter["lora_A"](x)) + self.gated(x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * self.layer(x)


def batch(rank: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, DIM, generator=torch.Generator().manual_seed(rank))}


def first_step(
    rank: int, size: int, sections: dict[str, Any], build: Callable[[], nn.Module], spoil: Any = None
) -> list[str]:
    """What the audit said of a step; `spoil(engine, rank)` plants a fault before it."""
    config = parse_sections(**{"optim": OPTIM, "seed": 3, **sections}).config
    said: list[str] = []
    engine = prepare_native(Preparation(config, open_world(config), model=build, log=said.append))
    if spoil is not None:
        spoil(engine, rank)
    for step in range(2):
        engine.train_step([batch(rank + size * step)])
    return [text for text in said if "audit" in text]


def change_weight(engine: Any, rank: int) -> None:
    if rank == 1:
        with torch.no_grad():
            engine.master_weights.local(engine.master_weights.names.index("body.1.bias"))[0] += 1.0


def swap_weight(engine: Any, rank: int) -> None:
    if rank == 0:
        with torch.no_grad():
            weight = engine.master_weights.local(engine.master_weights.names.index("body.1.weight")).view(-1)
            weight[:2] = weight[:2].flip(0)


def round_weight(engine: Any, rank: int) -> None:
    if rank == 1:
        with torch.no_grad():
            engine.master_weights.local(engine.master_weights.names.index("body.1.weight")).mul_(1 + 1e-6)


def break_weight(engine: Any, rank: int) -> None:
    if rank == 0:
        with torch.no_grad():
            engine.master_weights.local(engine.master_weights.names.index("body.0.weight")).view(-1)[0] = torch.nan


def change_bias(engine: Any, rank: int) -> None:
    if rank == 0:
        engine.model.bias.fill_(1.0)
    engine.state_loaded()


def change_table(engine: Any, rank: int) -> None:
    if rank == 0:
        engine.model.table.fill_(1.0)
    engine.state_loaded()


def add_layer(engine: Any, rank: int) -> None:
    engine.model.extra = nn.Linear(DIM, DIM)


def forget_group(engine: Any, rank: int) -> None:
    engine.updater.optimizer.param_groups[-1]["params"].pop()


def skip_reduction(engine: Any, rank: int) -> None:
    """The last bucket is not reduced, so each rank has the gradients of its own data."""
    engine.gradients._buckets[-1].group = None


DDP, ZERO3 = {"zero": 0}, {"zero": 3}


@pytest.mark.parametrize(("strategy", "precision"), [(DDP, "fp32"), ({"zero": 1}, "fp32"), (ZERO3, "bf16")], ids=str)
@pytest.mark.parametrize("build", [Net, Experts])
def test_a_sound_model_is_passed_over_in_silence(
    two_ranks: RankPool, strategy: Any, precision: str, build: type[Net]
) -> None:
    sections = {"precision": precision, "train": {"audit": "strict"}}
    assert two_ranks.run(first_step, {**sections, "strategy": strategy}, build) == [[], []]
    assert first_step(0, 1, sections, build) == []


@pytest.mark.parametrize(
    ("strategy", "spoil", "names"),
    [
        (DDP, change_weight, ["weight 'body.1.bias'", "rank 1"]),
        (DDP, swap_weight, ["weight 'body.1.weight'"]),
        (DDP, change_bias, ["buffer 'bias'"]),
        (DDP, skip_reduction, ["gradient 'body.0."]),
        (DDP, break_weight, ["body.0.weight", "NaN"]),
        (ZERO3, break_weight, ["body.0.weight", "NaN"]),
        (DDP, add_layer, ["extra.weight", "extra.bias", "optimizer"]),
        (DDP, forget_group, ["optimizer"]),
        (ZERO3, forget_group, ["optimizer"]),
    ],
)
def test_a_planted_fault_stops_every_rank_by_name(two_ranks: RankPool, strategy: Any, spoil: Any, names: Any) -> None:
    with refused(RankFailedError, "ModelError", "train.audit", *names):
        two_ranks.run(first_step, {"strategy": strategy}, Net, spoil)
    for texts in two_ranks.run(first_step, {"strategy": strategy, "train": {"audit": "warn"}}, Net, spoil):
        assert not missing(" ".join(texts), *names)


def test_an_audit_can_be_left_out(two_ranks: RankPool) -> None:
    sections = {"strategy": DDP, "train": {"audit": "off"}}
    assert two_ranks.run(first_step, sections, Net, change_weight) == [[], []]


@pytest.mark.parametrize(("spoil", "name"), [(round_weight, "body.1.weight"), (change_table, "table")])
def test_what_may_be_meant_or_rounding_is_a_warning(two_ranks: RankPool, spoil: Any, name: str) -> None:
    for texts in two_ranks.run(first_step, {"strategy": DDP}, Net, spoil):
        assert not missing(texts[0], name)


@pytest.mark.parametrize(("build", "name"), [(Detached, "body (4"), (Unused, "pooler (2")])
def test_parameters_without_a_gradient_are_named(two_ranks: RankPool, build: type[Net], name: str) -> None:
    for (text,) in two_ranks.run(first_step, {"strategy": ZERO3}, build):
        assert not missing(text, name)
    with refused(ModelError, name):
        first_step(0, 1, {"train": {"audit": "strict"}}, build)
