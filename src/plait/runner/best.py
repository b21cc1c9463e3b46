"""The best value of a metric so far."""

from __future__ import annotations

import math
from collections.abc import Mapping

from plait.errors import ConfigError, Problem


class Best:
    """Remembers the best value; `improved` says whether new metrics beat it."""

    def __init__(self, metric: str, mode: str, min_delta: float = 0.0) -> None:
        self.metric = metric
        self.value: float | None = None
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta

    def improved(self, metrics: Mapping[str, float]) -> bool:
        """Take note of one validation."""
        if self.metric not in metrics:
            raise ConfigError(
                Problem("metric", f"{self.metric!r} is not measured", f"validation gives: {', '.join(sorted(metrics))}")
            )
        value = metrics[self.metric]
        if math.isnan(value):
            return False
        if self.value is None or self._sign * (value - self.value) > self._min_delta:
            self.value = value
            return True
        return False
