"""The best value of a metric so far."""

from __future__ import annotations

import math
from collections.abc import Mapping

from plait.errors import ConfigError, Problem


class Best:
    """Remembers the best value; `improved` says whether new metrics beat it."""

    def __init__(self, metric: str, mode: str, min_delta: float = 0.0, *, path: str) -> None:
        """`path` is the key of the run description that names the metric."""
        self.metric = metric
        self._path = path
        self.value: float | None = None
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta

    def improved(self, metrics: Mapping[str, float]) -> bool:
        """Take note of one validation; whether it is the best so far."""
        if self.metric not in metrics:
            raise ConfigError(
                Problem(
                    self._path, f"{self.metric!r} is not measured", f"Validation gives: {', '.join(sorted(metrics))}."
                )
            )
        value = metrics[self.metric]
        if math.isnan(value):
            return False
        if self.value is not None:
            gain = self._sign * (value - self.value)
            if gain <= 0.0 or gain < self._min_delta:
                return False
        self.value = value
        return True
