"""`accelerate.optimizer`: the optimizer that `prepare` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from plait.engine import LoopEngine, StepResult
from plait.errors import TrainingError

if TYPE_CHECKING:
    from plait.frontends.accelerate.data_loader import GradientState
    from plait.frontends.accelerate.prepared import PreparedModel


class PreparedOptimizer(Optimizer):
    """The user's optimizer, stepped by an engine. `step` and `zero_grad` do nothing while gradients accumulate."""

    def __init__(self, optimizer: Optimizer, models: Sequence[PreparedModel], gradients: GradientState) -> None:
        # Without super().__init__: schedulers must change the groups of the user's optimizer, so they are not copied.
        self.optimizer = optimizer
        self.models = list(models)
        self.last: StepResult | None = None
        """The result of the last step."""
        self.given: Any = optimizer
        """The optimizer, or the `DummyOptim`, that `prepare` was given."""
        self._gradients = gradients

    @property
    def engine(self) -> LoopEngine:
        """The engine that updates the weights."""
        engine = self.models[0].engine
        assert engine is not None
        return engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the user's optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the user's optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the user's optimizer."""
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights if the gradients are complete."""
        if closure is not None:
            raise TrainingError("optimizer.step(closure) is not supported; call the model before, then step()")
        if not self._gradients.sync_gradients:
            return
        if self.engine.pending:  # without gradients, torch's optimizers do nothing either
            self.last = self.engine.step()
            self._gradients.stepped = True
        for model in self.models:
            model.in_graph = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that have accumulated since the last step, which itself has cleared the earlier ones."""
        if self._gradients.sync_gradients and self.engine.pending:
            self.engine.discard()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self.last is not None and self.last.skipped

    @property
    def overflowed(self) -> bool:
        """Whether the last step was skipped in fp16, because the loss scale was too high.

        False in other dtypes, without reading the result from the device: there, schedulers also count skipped steps,
        as with Accelerate.
        """
        return self.engine.scaler is not None and self.step_was_skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the `state_dict` of the user's optimizer: this rank's shard. `save_state` writes the full state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on the same rank."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Set an optimizer that has training and evaluation modes (such as a schedule-free one) to training."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Set an optimizer that has training and evaluation modes (such as a schedule-free one) to evaluation."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()


AcceleratedOptimizer = PreparedOptimizer
