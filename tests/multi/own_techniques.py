"""Techniques as somebody outside would write them: what recomputes, in which order stages work, how layers are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from plait.distributed.pipeline_schedule import Action, ActionType

ASKED: list[str] = []
"""The operations that `saves_products` was asked about."""


def every_other(name: str, module: nn.Module, *, first: int = 0) -> bool:
    """Recompute every second block whole."""
    return int(name.rpartition(".")[2]) % 2 == first


def keeps_products(name: str, module: nn.Module) -> list[str]:
    """Recompute all but products."""
    return ["mm", "addmm"]


def saves_products(name: str, module: nn.Module) -> Callable[..., CheckpointPolicy]:
    """The same as a policy of torch's."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ASKED.append(str(op))
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def answers_a_number(name: str, module: nn.Module) -> int:
    """Say what means nothing."""
    return 3


def one_by_one(ranks: int, micro_batches: int) -> list[list[str]]:
    """One micro-batch after the other, there and back."""
    return [[f"{rank}{kind}{index}" for index in range(micro_batches) for kind in "FB"] for rank in range(ranks)]


def two_in_a_loop(ranks: int, micro_batches: int) -> list[list[Action]]:
    """All forward passes of each of two stages of a rank, then all backward passes."""
    return [
        [Action(ActionType.FORWARD, stage, index) for stage in (rank, rank + ranks) for index in range(micro_batches)]
        + [
            Action(ActionType.BACKWARD, stage, index)
            for stage in (rank + ranks, rank)
            for index in range(micro_batches)
        ]
        for rank in range(ranks)
    ]


two_in_a_loop.stages_per_rank = 2  # type: ignore[attr-defined]


def waits_for_ever(ranks: int, micro_batches: int) -> list[list[str]]:
    """Begin with the end."""
    return [[f"{rank}{kind}{index}" for kind in "BF" for index in range(micro_batches)] for rank in range(ranks)]


def forgets_one(ranks: int, micro_batches: int) -> list[list[str]]:
    """Leave out a backward pass."""
    return [work[:-1] for work in one_by_one(ranks, micro_batches)]


def llama_plan(model: nn.Module) -> dict[str, str]:
    """What the model says itself."""
    return model.tensor_plan()  # type: ignore[operator, no-any-return]


def no_plan(model: nn.Module) -> int:
    """Return what is no plan."""
    return 1


class RoundedLinear(nn.Linear):
    """A product whose inputs are rounded to so many steps of a power of two."""

    steps: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x + ((x * self.steps).round() / self.steps - x).detach(), self.weight, self.bias)


def rounded(blocks: Sequence[tuple[str, nn.Module]], *, device: torch.device, steps: int) -> list[str]:
    """Let linear layers round their inputs."""
    names = []
    for prefix, block in blocks:
        for name, module in block.named_modules():
            if type(module) is nn.Linear:
                module.__class__ = RoundedLinear
                module.steps = steps  # type: ignore[assignment]
                names.append(f"{prefix}.{name}")
    return names


def renames(blocks: Sequence[tuple[str, nn.Module]], *, device: torch.device) -> list[str]:
    """Wrap a layer, so that its parameters have other names."""
    for _, block in blocks:
        for name, child in list(block.named_children()):
            setattr(block, name, nn.Sequential(child))
    return ["all"]
