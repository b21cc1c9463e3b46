"""Curves for TensorBoard, written with its own package: no torch, no tensorflow."""

from __future__ import annotations

from pathlib import Path

from plait.errors import MissingExtraError
from plait.monitor.scalars import scalars
from plait.spec import Event, EventKind

GROUPS = {EventKind.TRAIN: "train", EventKind.VALIDATE: "val", EventKind.TEST: "test"}


class TensorBoardSink:
    """Scalars `train/…`, `val/…`, `test/…` over steps, in `work_dir/tensorboard`.

    Every run of one work_dir adds an event file; TensorBoard joins them into one curve.
    """

    def __init__(self, work_dir: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as missing:
            raise MissingExtraError("tensorboard", "the log sink 'tensorboard'", "tensorboard") from missing
        self.writer = Writer(str(work_dir / "tensorboard"))

    def write(self, event: Event) -> None:
        """Add the event's numbers, readable by a TensorBoard that is open now."""
        if group := GROUPS.get(event.kind):
            for name, value in scalars(event).items():
                self.writer.add_scalar(f"{group}/{name}", value, event.step, wall_time=event.time)
            self.writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self.writer.close()
