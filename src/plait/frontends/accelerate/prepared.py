"""The model that `prepare` returns, the engine behind it, and collectives on nested tensors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.config import RunConfig, TensorConfig
from plait.distributed import (
    World,
    is_transformers_model,
    peft_styles,
    restore_rng_state,
    rng_state,
    transformers_styles,
)
from plait.engine import LogFunction, LoopEngine, Preparation, prepare_native
from plait.errors import TrainingError


class PreparedModel(nn.Module):
    """The wrapper of a model that `prepare` returns. It is called like the model; `module` is the model itself.

    Its engine is created when its optimizer is prepared; until then it can be called, but not trained.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.engine: LoopEngine | None = None
        self.syncs = True
        """Whether backward passes reduce gradients: false inside `no_sync`."""
        self.in_graph = False
        """Whether it was called with gradients enabled since the last step."""
        self._device = device
        self._dtype = dtype
        self._index: int | None = None
        self._params = _identities(module)

    def to_device(self) -> None:
        """Move the model to the device, unless it has an engine or is on the meta device, waiting for one."""
        if self.engine is None and not any(param.is_meta for param in self.module.parameters()):
            self.module.to(self._device)

    def bind(self, engine: LoopEngine, index: int | None) -> None:
        """Attach the engine; `index`: which of the engine's models this is, if it has several."""
        self.engine, self._index = engine, index
        self._params.update(_identities(self.module))
        with engine.sharded_params_registered():  # which the module has between the backward pass and the step
            self._params.update(_identities(self.module))

    def owns(self, params: Sequence[Tensor]) -> bool:
        """Whether one of the parameters belongs to this model, or did before an engine replaced its parameters."""
        references = ((self._params.get(id(param)), param) for param in params)
        return any(reference is not None and reference() is param for reference, param in references)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs; in mixed precision, floating-point outputs in fp32."""
        if self.engine is None:
            args, kwargs = apply(lambda tensor: tensor.to(self._device, non_blocking=True), (args, kwargs))
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
            if name == "module":  # `__getattr__` during a copy, before `module` is set
                raise
            return getattr(self.module, name)  # `model.config`, `model.generate`: as without a wrapper


def _identities(module: nn.Module) -> dict[int, weakref.ref[Tensor]]:
    return {id(param): weakref.ref(param) for param in module.parameters()}


def in_fp32(value: Any) -> Any:
    """Return nested values with 16-bit tensors in fp32; everything else unchanged."""
    return apply(lambda tensor: tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor, value)


def apply(function: Any, value: Any) -> Any:
    """Return nested lists, tuples and mappings, of the same types, with a function applied to their tensors."""
    return apply_to_all(lambda item: function(item) if isinstance(item, Tensor) else item, value)


def apply_to_all(function: Any, value: Any) -> Any:
    """Return nested lists, tuples and mappings, of the same types, with a function applied to every leaf."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(apply_to_all(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(apply_to_all(function, item) for item in value)
    if isinstance(value, Mapping):
        return type(value)({key: apply_to_all(function, item) for key, item in value.items()})  # type: ignore[call-arg]
    return function(value)


# Tensors and objects of all ranks, in the order of the data.


class Gatherer:
    """Collectives over the data-parallel ranks; of ranks that read the same data, only one contributes."""

    def __init__(self, world: World) -> None:
        self._world = world
        ranks: dict[int, int] = {}
        for rank, share in enumerate(world.gather(world.data_rank)):
            ranks.setdefault(share, rank)
        self._ranks = [ranks[share] for share in sorted(ranks)]

    def gather(self, value: Any) -> Any:
        """Return nested values with each tensor concatenated over all ranks, along the first dimension."""
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
        """Return every rank's objects as one list."""
        lists = self._world.gather(list(value) if isinstance(value, (list, tuple)) else [value])
        return [item for rank in self._ranks for item in lists[rank]]

    def gather_for_metrics(self, value: Any, gradients: Any, *, as_objects: bool) -> Any:
        """Return the values of all ranks, without the samples that were repeated to fill the last batches.

        `gradients` (a `GradientState`) says whether these batches are the last, and how many samples are not repeated.
        """
        objects = as_objects or not has_only_tensors(value)
        data = self.gather_objects(value) if objects else self.gather(value)
        count = gradients.remainder
        if not gradients.end_of_dataloader or count <= 0:
            return data
        return data[:count] if objects else apply(lambda tensor: tensor[:count], data)

    def reduce(self, value: Any, reduction: str, scale: float) -> Any:
        """Return the sum or mean of each tensor over all ranks, times `scale`."""
        if reduction not in ("sum", "mean", "none"):
            raise TrainingError(f"reduction={reduction!r} is not supported: write 'sum', 'mean' or 'none'")

        def one(tensor: Tensor) -> Tensor:
            total = tensor.detach().clone()
            if self._world.size > 1 and reduction != "none":
                dist.all_reduce(total)
            if reduction == "mean":
                total = total / self._world.size
            return total * scale if scale != 1.0 else total

        return apply(one, value)

    def pad(self, value: Any, *, dim: int, pad_index: int, pad_first: bool) -> Any:
        """Return each tensor padded along `dim` with `pad_index` to the longest of all ranks."""

        def one(tensor: Tensor) -> Tensor:
            if self._world.size == 1 or not -tensor.ndim <= dim < tensor.ndim:
                return tensor
            longest = max(self._world.gather(tensor.shape[dim]))
            missing = longest - tensor.shape[dim]
            if missing == 0:
                return tensor
            shape = list(tensor.shape)
            shape[dim] = missing
            padding = tensor.new_full(shape, pad_index)
            return torch.cat((padding, tensor) if pad_first else (tensor, padding), dim=dim)

        return apply(one, value)


def has_only_tensors(value: Any) -> bool:
    """Whether all leaves of nested values are tensors."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return all(has_only_tensors(item) for item in value.values())
    return isinstance(value, (list, tuple)) and all(has_only_tensors(item) for item in value)


# Tensor parallelism of a `transformers` model, with or without `peft` adapters.


_VOCABULARY = frozenset({"vocab_embedding", "vocab_head"})


def with_plan(config: RunConfig, model: nn.Module, *, replicate_vocabulary: bool) -> RunConfig:
    """Return the configuration with a tensor-parallel plan for a `transformers` or `peft` model, if it needs one.

    `replicate_vocabulary`: embedding and head are not sharded, because the model may compute its loss from its logits.
    """
    strategy = config.strategy
    adapted = hasattr(model, "peft_config")
    if strategy.layout.tp == 1 or strategy.tensor.plan or not (adapted or replicate_vocabulary):
        return config
    if not adapted and not is_transformers_model(model):
        return config
    plan = (peft_styles if adapted else transformers_styles)(model, strategy.layout.tp)
    if replicate_vocabulary:
        plan = {name: style for name, style in plan.items() if style not in _VOCABULARY}
    if not plan:
        return config
    tensor = TensorConfig(**{**strategy.tensor.model_dump(), "plan": plan})
    return config.model_copy(update={"strategy": strategy.model_copy(update={"tensor": tensor})})


def backward(engines: Sequence[LoopEngine], loss: Tensor, *, last: Sequence[bool], **kwargs: Any) -> None:
    """Run one backward pass through a loss to which several models may have contributed.

    The loss is this rank's mean over a micro-batch; `last` says for each engine whether this backward pass
    completes the gradients of a step.
    """
    if loss.ndim != 0:
        raise TrainingError(f"backward needs a scalar loss, not a tensor of shape {tuple(loss.shape)}: take its mean")
    scales = {1.0 if engine.scaler is None else engine.scaler.scale for engine in engines}
    if len(scales) > 1:
        raise TrainingError(
            "the loss comes from several models whose fp16 loss scales differ: give them one optimizer, or use "
            "mixed_precision='bf16'"
        )
    for engine, is_last in zip(engines, last, strict=True):
        engine.begin_backward(last=is_last)
    first = engines[0]
    factor = scales.pop() / (first.accumulation * first.world.layout.replicas)
    # In fp32: a scaled fp16 loss would overflow before any gradient does.
    torch.autograd.backward(loss.float() * factor if factor != 1.0 else loss, **kwargs)
    for engine in engines:
        engine.end_backward(loss.detach())


def build_engine(
    config: RunConfig,
    world: World,
    model: nn.Module,
    optimizer: Optimizer,
    log: LogFunction,
    *,
    replicate_vocabulary: bool = True,
) -> LoopEngine:
    """Return an engine that trains a model with its optimizer. The random state is the same afterwards.

    `replicate_vocabulary`: see `with_plan`.
    """
    state = rng_state(world.device)
    config = with_plan(config, model, replicate_vocabulary=replicate_vocabulary)
    engine = prepare_native(Preparation(config, world, model=model, optimizer=optimizer, log=log), LoopEngine)
    if config.strategy.stage < 3:
        engine.keep_unsharded()  # so that one rank alone may save or call the model, as with replicas
    restore_rng_state(state, world.device)
    return engine


class JointModels(nn.Module):
    """One module of several models that share an optimizer; the first argument of a call is the model's index."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of one of the models."""
        return self.models[index](*args, **kwargs)
