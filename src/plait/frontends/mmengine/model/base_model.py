"""A model that knows how to train, validate and test itself on one batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from plait.errors import ConfigError, ModelError, Problem
from plait.frontends.mmengine.model.data_preprocessor import BaseDataPreprocessor
from plait.frontends.mmengine.registry import MODELS


class BaseModule(nn.Module):
    """A module whose weights are given by `init_weights`, once, before training starts."""

    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__()
        if init_cfg is not None:
            message = f"{init_cfg!r}: initializers by description are not part of this front end"
            raise ConfigError(Problem("model.init_cfg", message, "Override `init_weights`, or use `load_from`."))
        self.init_cfg = None
        self._is_init = False

    @property
    def is_init(self) -> bool:
        """Whether the weights were given."""
        return self._is_init

    def init_weights(self) -> None:
        """Give weights to the modules inside; override it to give them to this one."""
        if self._is_init:
            return
        self._is_init = True
        for child in self.children():
            if isinstance(child, BaseModule):
                child.init_weights()


class BaseModel(BaseModule):
    """The root of a model: `forward(..., mode)` answers with losses, predictions or tensors, as `mode` says."""

    def __init__(self, data_preprocessor: Any = None, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        if data_preprocessor is None:
            data_preprocessor = BaseDataPreprocessor()
        self.data_preprocessor = MODELS.build(data_preprocessor)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Forward, backward and, when its turn has come, the update; returns what is to be logged."""
        with optim_wrapper.optim_context(self):
            data = self.data_preprocessor(data, True)
            losses = self._run_forward(data, mode="loss")
        loss, log_vars = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars

    def val_step(self, data: Any) -> Any:
        """Predictions for the evaluator."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def test_step(self, data: Any) -> Any:
        """Predictions for the evaluator."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of everything with `loss` in its name, and the mean of each for the log."""
        means: dict[str, Tensor] = {}
        for name, value in losses.items():
            parts = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, list | tuple) else []
            if not parts or not all(isinstance(part, Tensor) for part in parts):
                raise ModelError(
                    f"{type(self).__name__} returned {name!r} as a {type(value).__name__} in mode 'loss': "
                    "return a tensor, or a list of them"
                )
            first, *others = (part.mean() for part in parts)
            means[name] = sum(others, first)
        summed = [value for name, value in means.items() if "loss" in name]
        if not summed:
            raise ModelError(
                f"{type(self).__name__} returned {', '.join(means) or 'nothing'} in mode 'loss', and no name has "
                "`loss` in it: there is nothing to minimise"
            )
        total = sum(summed[1:], summed[0])
        return total, {"loss": total, **{name: value for name, value in means.items() if name != "loss"}}

    def _run_forward(self, data: Any, mode: str) -> Any:
        """Call the model with a batch; the runner puts the engine's own call in place of this one."""
        return call_with(self, data, mode)

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Losses in mode `loss`, predictions in mode `predict`, anything in mode `tensor`."""


def call_with(call: Any, data: Any, mode: str) -> Any:
    """Call a model with a batch: a dict by name, a list or tuple in order."""
    if isinstance(data, Mapping):
        return call(**data, mode=mode)
    if isinstance(data, list | tuple):
        return call(*data, mode=mode)
    raise ModelError(f"the data preprocessor returned a {type(data).__name__}: return a list, a tuple or a dict")
