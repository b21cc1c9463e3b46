"""DeepSpeed's dynamic loss scale, step by step."""

from __future__ import annotations

from plait.config import ScalerConfig
from plait.precision import LossScaler


class DeepSpeedScaler(LossScaler):
    """Grows one step later than Plait's own.

    DeepSpeed counts the clean steps before the one under way: the scale doubles in the step after `window` of them.
    So the first clean step after an overflow, and the first of all, is not counted.
    """

    def __init__(self, config: ScalerConfig) -> None:
        super().__init__(config)
        self._uncounted = True

    def update(self, *, overflow: bool) -> None:
        """Learn whether the step just done overflowed."""
        if overflow or not self._uncounted:
            self._uncounted = overflow
            super().update(overflow=overflow)
            return
        self._uncounted = False
        if self.config.consecutive_hysteresis:
            self.tolerance = self.config.hysteresis

    def state(self) -> dict[str, float]:
        """What a checkpoint carries."""
        return {**super().state(), "uncounted": self._uncounted}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint; one of Plait's own counts every step."""
        super().restore(state)
        self._uncounted = bool(state.get("uncounted", False))
