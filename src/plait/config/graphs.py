"""Whether forward and backward pass can be recorded (`strategy.graphs`), once the ranks and the batch are known."""

from __future__ import annotations

from plait.config.strategy import StrategyConfig
from plait.errors import ConfigError, Problem


def check_graphs(strategy: StrategyConfig, *, ranks: int, accumulation: int, whole_steps: bool = True) -> None:
    """Refuse to record what is no step of one process and one micro-batch; `whole_steps`: who trains asks for such."""
    if not strategy.graphs:
        return
    if ranks > 1:
        _refuse(f"records the passes of one process, and there are {ranks}", "Start one process")
    if accumulation > 1:
        message = f"records steps of one micro-batch, and a step has {accumulation}: a pass would have to add to others"
        _refuse(message, "Write `batch.accumulation: 1`")
    if not whole_steps:
        _refuse("records both passes of a step as one, and this loop asks for them one by one", "Train with a Runner")


def _refuse(message: str, remedy: str) -> None:
    raise ConfigError(Problem("strategy.graphs", f"true {message}", f"{remedy}, or leave it out."))
