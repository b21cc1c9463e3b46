"""What a run expects of itself.

Nothing else of the plan is loaded here: that takes longer than loading torch, and happens in a child.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait.config import RunConfig
from plait.errors import ConfigError
from plait.plan.aside import in_a_child
from plait.world import restore_rng_state, rng_state

_PATIENCE_S = 180.0
"""How long a run waits for its plan."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run expects of itself. Plain values: it travels between ranks."""

    peak_gib: float
    """What the device's own account will say: tensors on a GPU, the whole process on a CPU."""
    needed_gib: float
    memory_gib: float
    seconds: float | None
    """Of a step; None where the machine's speed is not known."""
    took: float
    refusal: ConfigError | None = None
    """Why the run should not start."""


def forecast(
    config: RunConfig,
    *,
    ranks: int,
    local_ranks: int,
    model: Any = None,
    loss_function: Any = None,
    example: Any = None,
) -> Forecast | str:
    """Plan this run on the machine at hand; a reason where that cannot be.

    `example` is one micro-batch, where the data are no section that tells its shapes. This process stays as it was.
    """

    def look() -> Forecast | str:
        from plait.plan.gate import look_ahead

        return look_ahead(config, ranks, local_ranks, model, loss_function, example)

    found = in_a_child(look, seconds=_PATIENCE_S)
    if isinstance(found, str) and "fork-based multiprocessing" in found:
        # A process that has gone backward before cannot do so in a copy; then it is done here, and put right after.
        here = torch.device("cpu")
        state = rng_state(here)
        found = look()
        restore_rng_state(state, here)
    return found
