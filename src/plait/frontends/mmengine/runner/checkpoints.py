"""Where a runner's checkpoints come from, and go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plait.errors import TrainingError
from plait.frontends.mmengine.runner.facts import Facts
from plait.frontends.mmengine.runner.folders import last_checkpoint
from plait.frontends.mmengine.runner.saving import Saver
from plait.strategy import ManualEngine
from plait.world import on_main


class Checkpoints(Facts):
    """`load_from`, `resume` and saving, under MMEngine's names."""

    saver: Saver
    logger: logging.Logger
    _resume: str | Path | bool
    _load_from: str | Path | None
    _loaded: bool

    @property
    def engine(self) -> ManualEngine:
        """The model, made ready."""
        raise NotImplementedError

    def setup(self) -> None:
        """Make the model and its optimizer ready, unless that was done."""
        raise NotImplementedError

    def load_or_resume(self) -> None:
        """What `load_from` and `resume` ask for, once."""
        if self._loaded:
            return
        self._loaded = True
        if isinstance(self._resume, str | Path):
            self.resume(self._resume)
        elif self._resume and self._load_from is not None:
            self.resume(self._load_from)
        elif self._resume:
            found = on_main(self.world, lambda: last_checkpoint(Path(self.work_dir)))
            self.logger.info(f"Auto resumed from the latest checkpoint {found}.")
            if found is not None:
                self.resume(found)
        elif self._load_from is not None:
            self.load_checkpoint(self._load_from)

    def resume(self, filename: str | Path) -> None:
        """Go on from a checkpoint."""
        if not self.phases.has("train"):
            self.load_checkpoint(filename)
            return
        self.phases.loop("train")
        self.setup()
        self.saver.resume(filename)
        self.logger.info(f"resumed epoch: {self.epoch}, iter: {self.iter}")

    def load_checkpoint(self, filename: str | Path) -> None:
        """Take a checkpoint's weights."""
        self.setup()
        self.saver.load_weights(filename)
        self.logger.info(f"Load checkpoint from {filename}")

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        by_epoch: bool | None = True,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint. `by_epoch`: at the end of an epoch, or of an iteration, that is about to be counted."""
        loop = self.phases.loop("train")
        self.setup()
        epoch = loop.epoch + (by_epoch is True and loop.by_epoch)
        iteration = loop.iter + (by_epoch is False)
        step = 0 if by_epoch is True and loop.by_epoch else iteration
        if loop.by_epoch and step:
            step = iteration - loop.epoch * len(loop.dataloader)
        position = {"epoch": epoch, "iter": iteration, "step_in_epoch": step, "batch_total": self.batch_total}
        self.saver.save(
            Path(out_dir) / filename.removesuffix(".pth"),
            position,
            optimizer=save_optimizer,
            schedulers=save_param_scheduler,
            meta=meta,
            tidy=tidy,
        )

    def set_position(self, epoch: int, step: int, state: Mapping[str, Any], path: Path) -> None:
        """Go on at a position of the data that a checkpoint names."""
        loop = self.phases.loop("train")
        saved = state.get("batch_total", self.batch_total)
        if step and saved != self.batch_total:
            raise TrainingError(
                f"{path} was saved in the middle of a pass, with batches of {saved} samples over all ranks, and here "
                f"they have {self.batch_total}: keep batch_size × ranks, or go on from the end of an epoch"
            )
        iteration = epoch * len(loop.dataloader) + step if loop.by_epoch else step
        loop.go_to(epoch, iteration, step if loop.by_epoch else 0)

    def restore_generators(self) -> None:
        """Random numbers as the checkpoint found them, once a pass that was interrupted is under way again."""
        self.saver.restore_generators()
