"""A log sink of one's own: metrics to MLflow. With a `file:` URI, MLflow 3 wants MLFLOW_ALLOW_FILE_STORE=true."""

from __future__ import annotations

import math
from pathlib import Path

from mlflow.tracking import MlflowClient

from plait import Event, EventKind


class MlflowSink:
    """Writes every number of training and validation to one MLflow run."""

    def __init__(self, work_dir: Path, *, uri: str, experiment: str = "plait") -> None:
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(experiment)
        self._experiment = known.experiment_id if known else self._client.create_experiment(experiment)
        self._run: str | None = None

    def write(self, event: Event) -> None:
        """Log the numbers of one event."""
        if self._run is None:
            self._run = self._client.create_run(self._experiment).info.run_id
        if event.kind in (EventKind.TRAIN, EventKind.VALIDATE):
            for name, value in event.data.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self._client.log_metric(self._run, f"{event.kind.value}/{name}", float(value), step=event.step)

    def close(self) -> None:
        """End the MLflow run."""
        if self._run is not None:
            self._client.set_terminated(self._run)
