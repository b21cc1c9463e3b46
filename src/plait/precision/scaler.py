"""Loss scaling for fp16."""

from __future__ import annotations

from plait.config import ScalerConfig


class LossScaler:
    """Keeps small gradients representable: the loss is multiplied by `scale`, the gradients divided by it.

    Dynamic: an overflow uses up one unit of hysteresis, and once that is gone halves the scale; `window`
    clean steps double it. Static: the scale never moves.
    """

    def __init__(self, config: ScalerConfig) -> None:
        self.config = config
        self.scale = float(config.static if config.static is not None else 2.0**config.initial_power)
        self._clean_steps = 0
        self.tolerance = config.hysteresis
        """Overflows that are left before the scale is halved."""

    @property
    def at_minimum(self) -> bool:
        """Whether an overflow can no longer be answered with a smaller scale."""
        return self.config.static is not None or self.scale <= self.config.minimum

    def update(self, *, overflow: bool) -> None:
        """Learn whether the step just done overflowed."""
        config = self.config
        if config.static is not None:
            return
        if overflow:
            self._clean_steps = 0
            if self.tolerance > 1:
                self.tolerance -= 1
            else:
                self.scale = max(self.scale / 2.0, config.minimum)
            return
        self._clean_steps += 1
        if config.consecutive_hysteresis:
            self.tolerance = config.hysteresis
        if self._clean_steps % config.window == 0:
            self.tolerance = config.hysteresis
            self.scale *= 2.0

    def state(self) -> dict[str, float]:
        """What a checkpoint carries."""
        return {"scale": self.scale, "clean_steps": self._clean_steps, "tolerance": self.tolerance}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self.tolerance = int(state["tolerance"])
