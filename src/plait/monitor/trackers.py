"""Sinks for experiment trackers: TensorBoard, written with its own package without torch, and Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import MissingExtraError
from plait.monitor.events import Event, EventKind
from plait.monitor.format import scalars, tables

GROUPS = {EventKind.TRAIN: "train", EventKind.VALIDATE: "val", EventKind.TEST: "test"}


class TensorBoardSink:
    """Writes scalars `train/…`, `val/…`, `test/…` over steps, in `work_dir/tensorboard`.

    Every run of one work_dir adds an event file; TensorBoard joins them into one curve.
    """

    def __init__(self, work_dir: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as missing:
            raise MissingExtraError("tensorboard", "the log sink 'tensorboard'", "tensorboard") from missing
        self.writer = Writer(str(work_dir / "tensorboard"))

    def write(self, event: Event) -> None:
        """Add the event's numbers and flush, for a TensorBoard that is open."""
        if group := GROUPS.get(event.kind):
            for name, value in scalars(event).items():
                self.writer.add_scalar(f"{group}/{name}", value, event.step, wall_time=event.time)
            self.writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self.writer.close()


# Weights & Biases: online where there is an account and a network, on disk otherwise.


class WandbSink:
    """Logs one W&B run per work_dir: a resumed run continues its curves.

    Without a connection the run is stored under `work_dir/wandb` for a later `wandb sync`. wandb's own settings
    apply, such as `WANDB_MODE`. `options` are arguments of `wandb.init`.
    """

    def __init__(self, work_dir: Path, project: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        try:
            import wandb
        except ImportError as missing:
            raise MissingExtraError("wandb", "the log sink 'wandb'", "wandb") from missing
        about: dict[str, Any] = {
            "project": project or "plait",
            "name": work_dir.name,
            "dir": str(work_dir),
            "id": _run_id(work_dir),
            "resume": "allow",
            **(options or {}),
        }
        try:
            self.run = wandb.init(**about)
        except wandb.Error:
            self.run = wandb.init(**{**about, "mode": "offline"})
        # Steps are a separate metric: wandb's own counter drops steps that a resumed run repeats.
        self.run.define_metric("*", step_metric="step")

    def write(self, event: Event) -> None:
        """Log the event's numbers; RUN_START becomes the run's config."""
        if group := GROUPS.get(event.kind):
            values = {f"{group}/{name}": value for name, value in scalars(event).items()}
            self.run.log({"step": event.step, "epoch": event.epoch, **values})
        elif event.kind is EventKind.RUN_START:
            rows = {label: value for table in tables(event.data) for label, value in table.rows}
            self.run.config.update(rows, allow_val_change=True)

    def close(self) -> None:
        """Finish the run and wait until it is uploaded."""
        self.run.finish()


def _run_id(work_dir: Path) -> str:
    path = work_dir / "wandb-id.txt"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
