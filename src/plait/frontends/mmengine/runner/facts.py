"""What hooks and loops may ask a runner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.frontends.mmengine.runner.hook_table import HookTable
    from plait.frontends.mmengine.runner.phases import Phases
    from plait.world import World


class Facts:
    """Position, parts and ranks of a run, under MMEngine's names."""

    phases: Phases
    world: World
    _hooks: HookTable
    work_dir: str
    log_dir: Path

    @property
    def is_training(self) -> bool:
        """Whether there is a training under way, or was one."""
        return self.phases.made("train") is not None

    def _of_training(self, name: str, otherwise: int) -> int:
        loop = self.phases.made("train")
        return otherwise if loop is None else int(getattr(loop, name))

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._of_training("epoch", 0)

    @property
    def iter(self) -> int:
        """Iterations that are complete."""
        return self._of_training("iter", 0)

    @property
    def max_epochs(self) -> int:
        """Epochs in all."""
        return self._of_training("max_epochs", 1)

    @property
    def max_iters(self) -> int:
        """Iterations in all."""
        return self._of_training("max_iters", 1)

    @property
    def val_interval(self) -> int:
        """How often is validated."""
        return self._of_training("val_interval", 1)

    @property
    def val_begin(self) -> int:
        """From when on is validated."""
        return self._of_training("val_begin", 1)

    @property
    def train_loop(self) -> Any:
        """The loop of training."""
        return self.phases.loop("train")

    @property
    def val_loop(self) -> Any:
        """The loop of validation; None where there is nothing to validate."""
        return self.phases.loop("val") if self.phases.has("val") else None

    @property
    def test_loop(self) -> Any:
        """The loop of testing; None where there is nothing to test."""
        return self.phases.loop("test") if self.phases.has("test") else None

    def loader_of(self, mode: str) -> Any:
        """The loader of `train`, `val` or `test`."""
        return self.phases.loop(mode).dataloader

    @property
    def train_dataloader(self) -> Any:
        """The loader of training."""
        return self.loader_of("train")

    @property
    def val_dataloader(self) -> Any:
        """The loader of validation."""
        return self.loader_of("val")

    @property
    def test_dataloader(self) -> Any:
        """The loader of testing."""
        return self.loader_of("test")

    @property
    def val_evaluator(self) -> Any:
        """The evaluator of validation."""
        return self.phases.loop("val").evaluator

    @property
    def test_evaluator(self) -> Any:
        """The evaluator of testing."""
        return self.phases.loop("test").evaluator

    @property
    def batch_total(self) -> int:
        """Samples of one iteration, over all ranks."""
        loader = self.loader_of("train")
        size: Any = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", 1
        )
        return int(size) * self.world.layout.data_parallel

    @property
    def hooks(self) -> list[Any]:
        """The hooks, in their order."""
        return self._hooks.hooks

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world.size > 1
