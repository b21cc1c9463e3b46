"""Hooks: code that runs at named points of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.strategy import StepResult

if TYPE_CHECKING:
    from plait.runner.runner import Runner

POINTS = (
    "before_run",
    "after_run",
    "before_epoch",
    "after_epoch",
    "before_step",
    "after_step",
    "before_validate",
    "after_validate",
    "before_test",
    "after_test",
    "before_save",
    "after_save",
)


class Hook:
    """Override the points you need. Hooks with a lower `priority` go first; every rank runs every hook."""

    priority: int = 50
    name: str = ""
    """Under which name its state is saved; absent: the class name."""

    def before_run(self, runner: Runner) -> None:
        """Training is about to start."""

    def after_run(self, runner: Runner) -> None:
        """Training has ended, for whatever reason short of an error."""

    def before_epoch(self, runner: Runner) -> None:
        """An epoch is about to start."""

    def after_epoch(self, runner: Runner) -> None:
        """An epoch has ended."""

    def before_step(self, runner: Runner) -> None:
        """A step is about to start."""

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """A step has ended; on a GPU it is under way, and who looks at a number in `result` waits for it."""

    def before_validate(self, runner: Runner) -> None:
        """A validation is about to start."""

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """A validation has ended."""

    def before_test(self, runner: Runner) -> None:
        """A test is about to start."""

    def after_test(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """A test has ended."""

    def before_save(self, runner: Runner) -> None:
        """A checkpoint is about to be written."""

    def after_save(self, runner: Runner) -> None:
        """A checkpoint was written; with `checkpoint.async_save`, it was copied and is being written."""

    def make_room(self, runner: Runner, entries: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """A checkpoint with these tensors of this hook is about to be read: have as many in `tensors`."""

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """Tensors that belong in a checkpoint, by any names; on resuming they are filled in place."""
        return {}

    def state(self) -> dict[str, Any]:
        """Numbers and texts that belong in a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""


class HookTable:
    """The hooks of a run by point, so that a point nobody uses costs nothing."""

    def __init__(self, hooks: list[Hook]) -> None:
        self.hooks = sorted(hooks, key=lambda hook: hook.priority)
        for point in POINTS:
            mine = [getattr(h, point) for h in self.hooks if getattr(type(h), point) is not getattr(Hook, point)]
            setattr(self, point, mine)

    before_run: list[Any]
    after_run: list[Any]
    before_epoch: list[Any]
    after_epoch: list[Any]
    before_step: list[Any]
    after_step: list[Any]
    before_validate: list[Any]
    after_validate: list[Any]
    before_test: list[Any]
    after_test: list[Any]
    before_save: list[Any]
    after_save: list[Any]

    def named(self) -> dict[str, Hook]:
        """Each hook under the name its state is saved by."""
        result: dict[str, Hook] = {}
        for hook in self.hooks:
            name = hook.name or type(hook).__name__
            while name in result:
                name += "+"
            result[name] = hook
        return result
