"""What `prepare` returns: the user's model, optimizer and scheduler, on an engine."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.errors import TrainingError
from plait.strategy import LoopEngine, StepResult
from plait.torch_internals import count_schedule_step, schedule_steps

if TYPE_CHECKING:
    from plait.frontends.accelerate.gradients import GradientState


class PreparedModel(nn.Module):
    """A model on its engine. Called like the model; `module` is the model itself.

    Until an optimizer comes, there is no engine: it computes, and does not train.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.engine: LoopEngine | None = None
        self.syncs = True
        """Whether backward passes are complete, not in `no_sync`."""
        self.in_graph = False
        """Whether it was called for a loss since the last step."""
        self._device = device
        self._dtype = dtype
        self._index: int | None = None
        self._params = _identities(module)

    def place(self) -> None:
        """Have it on the device; an engine has seen to that, and something on the meta device waits for one."""
        if self.engine is None and not any(param.is_meta for param in self.module.parameters()):
            self.module.to(self._device)

    def bind(self, engine: LoopEngine, index: int | None) -> None:
        """Take an engine; `index`: which of its models this is, where it has several."""
        self.engine, self._index = engine, index
        self._params.update(_identities(self.module))
        with engine.parts_shown():  # as it is between the backward pass and the step
            self._params.update(_identities(self.module))

    def owns(self, params: Sequence[Tensor]) -> bool:
        """Whether one of the parameters is this model's, as it is or as it was before it was prepared."""
        return any(_same(self._params.get(id(param)), param) for param in params)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model says; in mixed precision, its floating-point answers in fp32."""
        if self.engine is None:
            args, kwargs = _to(args, self._device), _to(kwargs, self._device)
            mixed = self._dtype is not None
            with torch.autocast(self._device.type, self._dtype) if mixed else nullcontext():
                outputs = self.module(*args, **kwargs)
        else:
            self.in_graph = self.in_graph or torch.is_grad_enabled()
            if self._index is not None:
                args = (self._index, *args)
            outputs = self.engine.forward(*args, **kwargs)
        return outputs if self._dtype is None else in_fp32(outputs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # while it is being copied
                raise
            return getattr(self.module, name)  # `model.config`, `model.generate`: as without a wrapper


def _identities(module: nn.Module) -> dict[int, weakref.ref[Tensor]]:
    return {id(param): weakref.ref(param) for param in module.parameters()}


def _same(ref: weakref.ref[Tensor] | None, param: Tensor) -> bool:
    return ref is not None and ref() is param


def _to(value: Any, device: torch.device) -> Any:
    return apply(lambda tensor: tensor.to(device, non_blocking=True), value)


def in_fp32(value: Any) -> Any:
    """The floating-point tensors of an answer in fp32; everything else as it is."""
    return apply(lambda tensor: tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor, value)


def apply(function: Any, value: Any) -> Any:
    """Apply a function to the tensors in nested lists, tuples and mappings, which keep their types."""
    return apply_to_all(lambda part: function(part) if isinstance(part, Tensor) else part, value)


def apply_to_all(function: Any, value: Any) -> Any:
    """The same for whatever is in them."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(apply_to_all(function, each) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(apply_to_all(function, each) for each in value)
    if isinstance(value, Mapping):
        return type(value)({key: apply_to_all(function, each) for key, each in value.items()})  # type: ignore[call-arg]
    return function(value)


class PreparedOptimizer(Optimizer):
    """The user's optimizer. `step` and `zero_grad` do nothing while gradients accumulate."""

    def __init__(self, optimizer: Optimizer, models: Sequence[PreparedModel], gradients: GradientState) -> None:
        # As a scheduler sees it, it is the optimizer: its groups and states are the same objects.
        self.optimizer = optimizer
        self.models = list(models)
        self.last: StepResult | None = None
        """What the last step did."""
        self.stands_for: Any = optimizer
        """What the script gave for it."""
        self._gradients = gradients

    @property
    def engine(self) -> LoopEngine:
        """What it steps."""
        engine = self.models[0].engine
        assert engine is not None
        return engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's groups, over what is updated."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The user's optimizer's."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The user's optimizer's."""
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights, where the gradients are complete."""
        if closure is not None:
            raise TrainingError("a closure calls the model from inside a step; call it before, then step()")
        if not self._gradients.sync_gradients:
            return
        if self.engine.pending:  # without gradients torch's optimizers do nothing either
            self.last = self.engine.step()
            self._gradients.stepped = True
        for model in self.models:
            model.in_graph = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients. After a step there are none left; before one they are lost."""
        if self._gradients.sync_gradients and self.engine.pending:
            self.engine.discard()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because something was not finite."""
        return self.last is not None and self.last.skipped

    @property
    def overflowed(self) -> bool:
        """Whether that was fp16's search for a loss scale. In other formats a step counts whatever became of it, as it
        does with Accelerate and in the engine, and nobody waits for a device that has yet to tell."""
        return self.engine.scaler is not None and self.step_was_skipped

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, as torch gives it; `save_state` writes the whole."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave on the same rank."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """For optimizers that have a mode."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """For optimizers that have a mode."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()


class PreparedScheduler:
    """The user's scheduler: steps with the optimizer, once for each batch of the original loader."""

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        gradients: GradientState,
        *,
        with_optimizer: bool,
        times: int,
    ) -> None:
        """`times`: steps of the scheduler in one of the optimizer."""
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._gradients = gradients
        self._with_optimizer = with_optimizer
        self._times = times

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless the optimizer looks for a loss scale that it can step with."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._gradients.sync_gradients:
            if self._gradients.adjust_scheduler and schedule_steps(self.scheduler) is not None:
                count_schedule_step(self.scheduler)
            return
        if any(optimizer.overflowed for optimizer in self.optimizers):
            return
        for _ in range(self._times):
            # OneCycleLR refuses to go beyond its end, and a last batch that is not full would take it there.
            done = schedule_steps(self.scheduler) or 0
            if done <= getattr(self.scheduler, "total_steps", done):
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)
