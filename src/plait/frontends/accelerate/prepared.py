"""What `prepare` returns: the user's model, optimizer and scheduler, on an engine."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.distributed import World
from plait.engine import LoopEngine, StepResult
from plait.errors import ConfigError, Problem, TrainingError
from plait.frontends.deepspeed import Parameters, Recipe
from plait.torch_internals import count_schedule_step, schedule_steps

if TYPE_CHECKING:
    from plait.frontends.accelerate.loader import GradientState


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
        with engine.sharded_params_registered():  # as it is between the backward pass and the step
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
    return apply_to_all(lambda item: function(item) if isinstance(item, Tensor) else item, value)


def apply_to_all(function: Any, value: Any) -> Any:
    """The same for whatever is in them."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(apply_to_all(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(apply_to_all(function, item) for item in value)
    if isinstance(value, Mapping):
        return type(value)({key: apply_to_all(function, item) for key, item in value.items()})  # type: ignore[call-arg]
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


# Tensors and objects of all ranks, in the order of the data.


class Gatherer:
    """Collectives over the ranks that see different data, one of each where several see the same."""

    def __init__(self, world: World) -> None:
        self._world = world
        ranks: dict[int, int] = {}
        for rank, share in enumerate(world.gather(world.data_rank)):
            ranks.setdefault(share, rank)
        self._ranks = [ranks[share] for share in sorted(ranks)]

    def gather(self, value: Any) -> Any:
        """Each tensor of nested values, from every rank, one after another along the first dimension."""
        return apply(self._gather, value)

    def _gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor.contiguous()
        if self._world.size == 1:
            return tensor
        tensors = [torch.empty_like(tensor) for _ in range(self._world.size)]
        dist.all_gather(tensors, tensor)
        return torch.cat([tensors[rank] for rank in self._ranks])

    def gather_objects(self, value: Sequence[Any]) -> list[Any]:
        """Every rank's objects, as one list."""
        lists = self._world.gather(list(value) if isinstance(value, (list, tuple)) else [value])
        return [item for rank in self._ranks for item in lists[rank]]

    def gather_for_metrics(self, value: Any, gradients: Any, *, as_objects: bool) -> Any:
        """Everything of a round of batches, without the samples that were repeated to fill it up.

        `gradients` knows whether the round is the last one, and how many of its samples are no repetitions.
        """
        objects = as_objects or not has_only_tensors(value)
        data = self.gather_objects(value) if objects else self.gather(value)
        count = gradients.remainder
        if not gradients.end_of_dataloader or count <= 0:
            return data
        return data[:count] if objects else first_rows(data, count)

    def reduce(self, value: Any, reduction: str, scale: float) -> Any:
        """The sum or mean of each tensor over all ranks, times `scale`."""
        if reduction not in ("sum", "mean", "none"):
            raise TrainingError(f"reduction={reduction!r} is not known: write 'sum', 'mean' or 'none'")

        def one(tensor: Tensor) -> Tensor:
            total = tensor.detach().clone()
            if self._world.size > 1 and reduction != "none":
                dist.all_reduce(total)
            if reduction == "mean":
                total = total / self._world.size
            return total * scale if scale != 1.0 else total

        return apply(one, value)

    def pad(self, value: Any, *, dim: int, pad_index: int, pad_first: bool) -> Any:
        """Each tensor as long along `dim` as the longest of all ranks, filled up with `pad_index`."""

        def one(tensor: Tensor) -> Tensor:
            if self._world.size == 1 or not -tensor.ndim <= dim < tensor.ndim:
                return tensor
            longest = max(self._world.gather(tensor.shape[dim]))
            missing = longest - tensor.shape[dim]
            if missing == 0:
                return tensor
            shape = list(tensor.shape)
            shape[dim] = missing
            filling = tensor.new_full(shape, pad_index)
            return torch.cat((filling, tensor) if pad_first else (tensor, filling), dim=dim)

        return apply(one, value)


def has_only_tensors(value: Any) -> bool:
    """Whether nested values are tensors throughout."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return all(has_only_tensors(item) for item in value.values())
    return isinstance(value, (list, tuple)) and all(has_only_tensors(item) for item in value)


def first_rows(value: Any, count: int) -> Any:
    """The first rows of nested tensors."""
    return apply(lambda tensor: tensor[:count], value)


# Stand-ins for an optimizer and a scheduler that a DeepSpeed configuration describes.


class DummyOptim:
    """Says which parameters the optimizer of the DeepSpeed configuration gets; `prepare` makes it.

    `lr` and `weight_decay` fill what the configuration leaves open with `"auto"`.
    """

    def __init__(self, params: Parameters, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params: list[Any] = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    @property
    def parameters(self) -> list[Any]:
        """All of them, without their groups."""
        groups = (group["params"] if isinstance(group, Mapping) else [group] for group in self.params)
        return [param for group in groups for param in group]


class DummyScheduler:
    """Stands for the schedule of the DeepSpeed configuration, or for what `lr_scheduler_callable` makes."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


def make_optimizer(recipe: Recipe, dummy: DummyOptim, model: nn.Module) -> Optimizer:
    """The optimizer that a stand-in stands for, over parameters of `model`."""
    if not recipe.has_optimizer:
        raise _missing("DummyOptim", "optimizer", "Make a torch.optim optimizer.")
    auto = {"optimizer.params.lr": dummy.lr, "optimizer.params.weight_decay": dummy.weight_decay}
    return recipe.optimizer(model, dummy.params, auto)


def make_scheduler(recipe: Recipe, dummy: DummyScheduler, optimizer: Optimizer, *, ranks: int) -> Any:
    """The scheduler that a stand-in stands for; `total_num_steps` counts the batches of `ranks` ranks."""
    if dummy.lr_scheduler_callable is not None:
        return dummy.lr_scheduler_callable(optimizer)
    if not recipe.has_schedule:
        raise _missing("DummyScheduler", "scheduler", "Give it an lr_scheduler_callable, or make a torch scheduler.")
    auto: dict[str, Any] = {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": optimizer.defaults["lr"],
        "scheduler.params.warmup_num_steps": max(1, dummy.warmup_num_steps),
    }
    if dummy.total_num_steps is not None:
        auto["scheduler.params.total_num_steps"] = math.ceil(dummy.total_num_steps / ranks)
    return recipe.schedule(optimizer, auto)


def refuse_two(recipe: Recipe, section: str) -> None:
    """A script that makes its own beside a configuration that describes one."""
    if section in recipe.sections:
        stand_in = {"optimizer": "DummyOptim", "scheduler": "DummyScheduler"}[section]
        message = "the configuration describes one, and the script has made its own"
        remedy = f"Leave it out, or make a {stand_in} of plait.frontends.accelerate.utils instead."
        raise ConfigError(Problem(f"deepspeed_config: {section}", message, remedy))


def _missing(name: str, section: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(f"deepspeed_config: {section}", f"a {name} stands for it, and there is none", remedy))
