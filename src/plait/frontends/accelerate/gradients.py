"""Whether gradients are complete: counted over micro-batches, and over the ends of loaders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plait.errors import ConfigError, Problem

if TYPE_CHECKING:
    from plait.frontends.accelerate.loader import PreparedLoader


def step_count(steps: Any) -> int:
    """How many micro-batches a step has; anything but a whole number from 1 on would never step, or always."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        message = f"{steps!r} is not a number of micro-batches"
        raise ConfigError(Problem("gradient_accumulation_steps", message, "Write a whole number, 1 or more."))
    return steps


@dataclass
class GradientState:
    """One of an `Accelerator`; everything that it prepared looks at it."""

    num_steps: int = 1
    """Micro-batches a step."""
    adjust_scheduler: bool = True
    """Count scheduler steps on micro-batches that do not step, so that torch does not warn."""
    sync_with_dataloader: bool = True
    """A loader's last batch completes a step, however many there were."""
    sync_each_batch: bool = False
    sync_gradients: bool = True
    """Whether the gradients of the micro-batch at hand complete a step."""
    loaders: list[PreparedLoader] = field(default_factory=list)
    """Those in use, the innermost last."""
    step: int = 0
    stepped: bool = True
    """Whether an optimizer has stepped since the last backward pass. Gradients that other optimizers have then are left
    over from a loss that was not theirs, as a discriminator's are after its generator's step."""

    def advance(self) -> None:
        """One more micro-batch begins."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The loader in use."""
        return self.loaders[-1] if self.loaders else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return bool(self.loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch at hand is the last one of its loader."""
        return self.loaders[-1].end_of_dataloader if self.loaders else False

    @property
    def remainder(self) -> int:
        """Samples in the last round of batches that are no repetitions; -1 where that is not known."""
        return self.loaders[-1].remainder if self.loaders else -1

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """What the plugin said."""
        names = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
        return {name: getattr(self, name) for name in names}
