"""What an online phase does around each step: the critic learns too, figures are told, all of it is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.posttrain.online.actor import Tally, Told
from plait.runner import Hook
from plait.spec import EventKind, MicroBatch
from plait.strategy import NativeEngine, StepResult

if TYPE_CHECKING:
    from plait.posttrain.online.runner import OnlineRunner
    from plait.runner import Runner


class Rollouts(Hook):
    """Tells what rollouts and steps were like, and keeps the answers in use and the controller in checkpoints."""

    name = "rollout"
    priority = 30

    def __init__(self, run: OnlineRunner) -> None:
        self._run = run
        self._begun = 0.0

    def before_run(self, runner: Runner) -> None:
        """Measure the model as it begins, so that there is something to compare with."""
        if runner.step == 0 and runner.has("val_data"):
            runner.validate()

    def before_step(self, runner: Runner) -> None:
        """From here on it learns; the critic does so in its own hook, which comes later."""
        self._begun = time.perf_counter()

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Add what this step did to what is known of the rollout."""
        self._run.roller.clock.seconds["learning"] += time.perf_counter() - self._begun
        runner.figures.update(self._run.roller.figures)
        if runner.step % runner.config.log.every and runner.step != runner.total_steps:
            return  # nobody will see it, and looking waits for the device
        if (told := _told(runner.engine.model)) is not None:
            runner.figures.update(policy_loss=told.loss, clip_fraction=told.clipped)
        critic = self._run.cast.critic
        if critic is not None and (told := _told(critic.model)) is not None:
            runner.figures["value_loss"] = told.loss

    def after_run(self, runner: Runner) -> None:
        """Tell where the time went."""
        runner.emit(EventKind.MESSAGE, level="info", text=str(self._run.roller.clock))

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """The answers in use."""
        return self._run.roller.experience.tensors()

    def state(self) -> dict[str, Any]:
        """Which rollout it is, and what was found out in it."""
        roller = self._run.roller
        return {"number": roller.experience.number, "beta": roller.controller.beta, "figures": roller.figures}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on within the rollout."""
        roller = self._run.roller
        roller.experience.number = int(state["number"])
        roller.controller = replace(roller.controller, beta=float(state["beta"]))
        roller.figures = dict(state["figures"])


class Critic(Hook):
    """Trains the critic on the answers of each step, and keeps it in the run's checkpoints."""

    name = "critic"
    priority = 40

    def __init__(self, run: OnlineRunner) -> None:
        self._run = run
        self._restored = False

    @property
    def _engine(self) -> NativeEngine:
        critic = self._run.cast.critic
        assert critic is not None, "the hook is there only with a critic"
        return critic

    def before_run(self, runner: Runner) -> None:
        """Bring it up to date with what a checkpoint brought."""
        if self._restored:
            self._engine.state_loaded()
            self._restored = False

    def before_step(self, runner: Runner) -> None:
        """One step over the same answers as the policy's."""
        experience, parts = self._run.roller.experience, []
        for rows in runner.loader.current:
            inputs = experience.inputs(rows, "values", "returns")
            old = inputs.pop("values")
            parts.append(MicroBatch({**inputs, "old": old}, len(rows)))
        self._engine.train_step(parts)

    def after_run(self, runner: Runner) -> None:
        """Wait for its last step, and hear what there is to report of it."""
        self._engine.settle()

    def make_room(self, runner: Runner, entries: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """For the optimizer's state."""
        found = {name.removeprefix("optim."): entry for name, entry in entries.items() if name.startswith("optim.")}
        self._engine.allocate_optimizer_state(found)

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """Weights and optimizer state."""
        return self._engine.state_tensors()

    def state(self) -> dict[str, Any]:
        """Its steps."""
        return self._engine.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._engine.restore(state)
        self._restored = True


def _told(model: Any) -> Told | None:
    tally = model.tally
    assert isinstance(tally, Tally)
    return tally.latest
