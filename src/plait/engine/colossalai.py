"""The engine `colossalai`: ColossalAI's `Booster` trains the model of a run description."""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from plait.config import AdamConfig, AdamWConfig, RunConfig, check_library
from plait.distributed import World, all_gather_flat, export_ranks, open_group_of_one, seed_everything
from plait.engine.foreign import (
    BuiltModel,
    EvenNormalizer,
    ForeignEngine,
    ForeignStates,
    PlainStates,
    StepNormalizer,
    build_full_model,
)
from plait.engine.preparation import Preparation
from plait.errors import ConfigError, Problem
from plait.optim import grad_norm
from plait.torch_internals import flat_param_reshard, flat_param_shard_info, foreach_mul_


class ColossalEngine(ForeignEngine):
    """Trains with a `Booster`, which runs backward pass, gradient reduction and update."""

    def __init__(
        self,
        booster: Any,
        boosted: Any,
        wrapper: Any,
        states: ForeignStates,
        built: BuiltModel,
        given: Preparation,
    ) -> None:
        """`boosted` and `wrapper` are the model and the optimizer as `booster.boost` returned them."""
        config = given.config
        self._booster = booster
        self._boosted = boosted
        self._wrapper = wrapper
        self._plugin = config.strategy.plugin
        self._stage = config.strategy.stage
        self._clip_norm = config.train.clip_norm
        normalizer = StepNormalizer if self._plugin == "gemini" else EvenNormalizer
        super().__init__(boosted, states, built, given, normalizer=normalizer)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        # The booster averages gradients over ranks, while the global mean is the sum of the ranks' normalized losses.
        with self._without_reduction() if not last else nullcontext():
            self._booster.backward(loss * self.world.size, self._wrapper)

    def _without_reduction(self) -> AbstractContextManager[Any]:
        """Return a context in which a backward pass does not reduce gradients; at stages 2 and 3 it still does."""
        if self._stage >= 2:
            return nullcontext()
        context: AbstractContextManager[Any] = self._booster.no_sync(self._boosted, self._wrapper)
        return context

    def _update(self, correction: float) -> tuple[float, bool]:
        if self._plugin == "gemini":
            assert math.isclose(correction, 1.0, rel_tol=1e-6), "StepNormalizer leaves nothing to correct"
            return self._update_chunks()
        grads = self._gradients()
        if correction != 1.0:
            foreach_mul_(grads, correction)
        spread = self._plugin == "torch_fsdp" or hasattr(self._wrapper, "pg_to_grad_store")
        norm = grad_norm([grad.float() for grad in grads], self.world.everyone if spread else None)
        skipped = self._guard.enabled and not math.isfinite(norm)
        if not skipped:
            if self._plugin in ("torch_ddp", "torch_fsdp") and self._clip_norm is not None and norm > self._clip_norm:
                foreach_mul_(grads, self._clip_norm / (norm + 1e-6))
            self._wrapper.step()
        self._wrapper.zero_grad()
        return norm, skipped

    def _update_chunks(self) -> tuple[float, bool]:
        """Update with Gemini, whose `step` computes the norm and clips; return the norm, and False (never skipped)."""
        self._wrapper.step()
        norm = self._wrapper.get_grad_norm()
        self._wrapper.zero_grad()
        return math.nan if norm is None else float(norm), False

    def _gradients(self) -> list[Tensor]:
        """Return the gradients that this rank holds: full ones, or shards."""
        stores = getattr(self._wrapper, "pg_to_grad_store", None)
        if stores is None:
            params = (self._params[name] for name in self._built.trained)
            return [param.grad for param in params if param.grad is not None]
        groups = range(self._wrapper.num_param_groups)
        return [
            grad
            for store in stores.values()
            for group in groups
            for grad in store.get_working_grads_by_group_id(group)
            if grad is not None
        ]


# Importing the library: only when it is used, and with its loggers silenced.


def load_colossalai(world: World) -> Any:
    """Import `colossalai`, set it up for `world`, and return the module.

    Raises `ConfigError` without a GPU: its CPU code paths fail inside the library.
    """
    check_library("colossalai")
    export_ranks(world.ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing optional kernels of Apex and others
        colossalai = importlib.import_module("colossalai")
        importlib.import_module("colossalai.booster")
    importlib.import_module("colossalai.logging").disable_existing_loggers()
    logging.getLogger("colossalai").setLevel(logging.WARNING)
    accelerator = importlib.import_module("colossalai.accelerator").get_accelerator().name
    if accelerator not in ("cuda", "npu"):
        message = f"colossalai {colossalai.__version__} trains on cuda or npu, and this is {accelerator}"
        raise ConfigError(Problem("strategy.engine", message, "Use `engine: native`, or a machine with a GPU."))
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    open_group_of_one(world.device)
    return colossalai


_CLASSES = {
    "low_level_zero": "LowLevelZeroPlugin",
    "gemini": "GeminiPlugin",
    "hybrid": "HybridParallelPlugin",
    "torch_ddp": "TorchDDPPlugin",
    "torch_fsdp": "TorchFSDPPlugin",
}
_NO_LIMIT = 1e30
"""The clipping limit without `train.clip_norm`: Gemini computes the norm of gradients only if it clips."""


def make_plugin(config: RunConfig) -> Any:
    """Return the plugin of `strategy.plugin`, with options from the run description and `strategy.config`."""
    plugin = config.strategy.plugin
    assert plugin is not None
    options = {**_options_from_run(config), **(config.strategy.config or {})}
    plugin_class = getattr(importlib.import_module("colossalai.booster.plugin"), _CLASSES[plugin])
    try:
        built_plugin = plugin_class(**options)
    except (TypeError, AssertionError) as error:
        message = f"{_CLASSES[plugin]} says: {error}"
        raise ConfigError(Problem("strategy.config", message, "See the options of the plugin.")) from None
    if plugin == "torch_fsdp":
        built_plugin.fsdp_kwargs["use_orig_params"] = (
            True  # or all parameters would be one group, with one weight decay
        )
    return built_plugin


def _options_from_run(config: RunConfig) -> dict[str, Any]:
    precision = "fp32" if config.precision.compute == "tf32" else config.precision.compute
    clip, stage = config.train.clip_norm, config.strategy.stage
    match config.strategy.plugin:
        case "low_level_zero":
            return {"stage": stage, "precision": precision, "max_norm": clip or 0.0, "cast_inputs": False}
        case "gemini":
            return {"precision": precision, "max_norm": clip or _NO_LIMIT, "strict_ddp_mode": False}
        case "hybrid":
            return {
                "tp_size": 1,
                "pp_size": 1,
                "zero_stage": stage,
                "precision": precision,
                "max_norm": clip or 0.0,
                "custom_policy": _no_policy(),
            }
        case "torch_fsdp":
            return {"mixed_precision": _fsdp_formats(config)}
        case _:
            return {"broadcast_buffers": False}


def _fsdp_formats(config: RunConfig) -> Any:
    from torch.distributed.fsdp import MixedPrecision

    from plait.precision import make_policy

    policy = make_policy(config.precision)
    return MixedPrecision(param_dtype=policy.compute, reduce_dtype=policy.reduce) if policy.mixed else None


def _no_policy() -> Any:
    """Return a policy that does not change the model: the plugin requires a policy, though it shards no layers here."""
    base: Any = importlib.import_module("colossalai.shardformer.policies.base_policy").Policy

    class UnchangedModelPolicy(base):  # type: ignore[misc]
        """A policy that changes nothing in a model."""

        def config_sanity_check(self) -> None:
            """Nothing to check."""

        def preprocess(self) -> Any:
            """Nothing to prepare."""
            return self.model

        def module_policy(self) -> dict[Any, Any]:
            """Nothing to replace."""
            return {}

        def postprocess(self) -> Any:
            """Nothing to undo."""
            return self.model

        def get_held_layers(self) -> list[Any]:
            """All layers."""
            return [self.model]

    return UnchangedModelPolicy()


# Where ColossalAI keeps weights and optimizer states: one class per plugin.
# All read and write full tensors; see [Note: states by way of full tensors], `engine/foreign.py`.


def states_of(model: Any, optimizer: Any) -> ForeignStates:
    """Return the object that reads and writes the states of a boosted model and its optimizer."""
    if hasattr(optimizer, "working_to_master_param"):
        return SplitStates(optimizer)
    if hasattr(optimizer, "chunk_manager"):
        return ChunkStates(model, optimizer)
    if type(model).__name__ == "TorchFSDPModel":
        return FlatParamStates(model.module, optimizer)
    masters = getattr(optimizer, "working_to_master_map", None) or {}
    return PlainStates(optimizer.optim, {id(param): master for param, master in masters.items()})


class SplitStates(ForeignStates):
    """ZeRO stages 1 and 2: each parameter is flattened, padded, and split into equal shards."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper.optim)
        self._wrapper = wrapper

    def optimizer_tensor(self, param: Any) -> Tensor:
        """Return this rank's shard of the fp32 weights."""
        optimizer_tensor: Tensor = self._wrapper.working_to_master_param[id(param)]
        return optimizer_tensor

    def read(self, param: Any, key: str | None) -> Tensor:
        """Return the full tensor: gather the shards of all ranks, and cut off the padding."""
        mine: Tensor = self.optimizer_tensor(param) if key is None else self.state(param)[key]
        if mine.ndim == 0:
            return mine
        mine = mine.detach().to(param.device).contiguous()
        every = mine.new_empty(mine.numel() * dist.get_world_size())
        all_gather_flat(every, mine)
        return every[: param.numel()].view(param.shape)

    def write(self, param: Any, key: str | None, full: Tensor) -> None:
        """Write this rank's shard; for a weight, also the weight that the model computes with."""
        mine: Tensor = self.optimizer_tensor(param) if key is None else self.state(param)[key]
        if mine.ndim == 0:
            mine.copy_(full)
            return
        size = mine.numel()
        filled = F.pad(full.flatten(), (0, size * dist.get_world_size() - full.numel()))
        mine.data.copy_(filled.narrow(0, size * dist.get_rank(), size))
        if key is None:
            self.write_model_weight(param, full)


class ScatteredStates(ForeignStates):
    """For plugins where a rank may hold no shard of a parameter, and so does not know the names of its states."""

    def _state_ndims(self, param: Any) -> dict[str, int]:
        """Return the number of dimensions of each state by name, from the first rank that holds a shard."""
        mine = {key: getattr(value, "ndim", 0) for key, value in self.state(param).items()}
        ndims: dict[str, int] = first_of(mine or None) or {}
        return ndims

    def keys(self, param: Any) -> list[str]:
        """Return the names of the states that are tensors, on every rank."""
        return list(self._state_ndims(param))


def first_of(value: Any) -> Any:
    """Return the first value over all ranks that is not None, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return next((other for other in values if other is not None), None)


class FlatParamStates(ScatteredStates):
    """`torch_fsdp`: all parameters are in one `FlatParameter`."""

    def __init__(self, model: Any, wrapper: Any) -> None:
        super().__init__(wrapper.optim)
        self._model = model

    def optimizer_tensor(self, param: Any) -> Tensor:
        """Return the parameter itself, a view of the flat parameter's shard."""
        optimizer_tensor: Tensor = param
        return optimizer_tensor

    def _shard_info(self, param: Any) -> tuple[Any, torch.Size]:
        return flat_param_shard_info(self._model, param)  # the plugin wraps the model as one FSDP unit

    def read(self, param: Any, key: str | None) -> Tensor:
        """Return the full tensor: an all-reduce of zeros with each rank's shard, if it has one, filled in."""
        mine: Tensor | None = param if key is None else self.state(param).get(key)
        if key is not None and self._state_ndims(param)[key] == 0:
            return torch.tensor(first_of(None if mine is None else float(mine)))
        info, shape = self._shard_info(param)
        full = torch.zeros(shape.numel(), device=param.device)
        if info.in_shard and mine is not None:
            full.narrow(0, info.intra_param_start_idx, info.numel_in_shard).copy_(mine.detach().flatten())
        dist.all_reduce(full)
        return full.view(shape)

    def write(self, param: Any, key: str | None, full: Tensor) -> None:
        """Write this rank's shard."""
        mine: Tensor | None = param if key is None else self.state(param).get(key)
        if mine is None:
            return
        if key is not None and mine.ndim == 0:
            mine.copy_(full)
            return
        info, _ = self._shard_info(param)
        if info.in_shard:
            local = full.flatten().narrow(0, info.intra_param_start_idx, info.numel_in_shard)
            mine.data.copy_(local.view(mine.shape))

    def write_model_weight(self, param: Any, full: Tensor) -> None:
        """Write the parameter: the fp32 weights are the ones that the model computes with."""
        self.write(param, None, full)

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, full: bool) -> None:
        """Allocate on ranks with a shard only; elsewhere the optimizer never steps, and its step count would stay 0."""
        if self._shard_info(param)[0].in_shard:
            super().allocate(param, key, shape, dtype, full=full)

    def publish(self) -> None:
        """Reshard: a forward pass without a backward pass leaves stale unsharded weights that would be used again."""
        flat_param_reshard(self._model)


class ChunkStates(ScatteredStates):
    """Gemini: parameters are in chunks that are sharded over ranks; Gemini's own functions gather them."""

    def __init__(self, model: Any, wrapper: Any) -> None:
        super().__init__(wrapper.optim)
        self._model = model
        self._wrapper = wrapper
        self._names = {id(param): name for name, param in model.module.named_parameters()}
        self._ids = {id(param): number for number, param in wrapper.id_to_real_params.items()}
        self._written: dict[str, Tensor] = {}

    def optimizer_tensor(self, param: Any) -> Tensor:
        """Return the tensor that represents the parameter in the optimizer; the parameter itself on other ranks."""
        optimizer_tensor: Tensor = self._wrapper.id_to_fake_params.get(self._ids[id(param)], param)
        return optimizer_tensor

    def read(self, param: Any, key: str | None) -> Tensor:
        """Return the full tensor, which Gemini gathers from its chunks."""
        if key is None:
            weight: Tensor = self._model.state_dict(only_rank_0=False)[self._names[id(param)]]
            return weight.to(param.device).float()
        number = self._ids[id(param)]
        state = self._wrapper.collect_states(number, only_rank_0=False)[key]
        shape = () if key == "step" else self._wrapper.params_info["id2shape"][number]
        return torch.as_tensor(state, dtype=torch.float32).to(param.device).view(shape)

    def write(self, param: Any, key: str | None, full: Tensor) -> None:
        """Write a state now; keep a weight until `publish`, which loads all weights at once."""
        if key is None:
            self._written[self._names[id(param)]] = full
        elif self._ids[id(param)] in self._wrapper.id_to_fake_params:
            self._wrapper.load_single_param_states(self._ids[id(param)], {key: full})

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, full: bool) -> None:
        """Load zeros into the state: Gemini allocates a state when one is loaded."""
        self.write(param, key, torch.zeros(shape, dtype=dtype, device=param.device))

    def write_model_weight(self, param: Any, full: Tensor) -> None:
        """Keep the weight until `publish`, as `write` does."""
        self.write(param, None, full)

    def publish(self) -> None:
        """Load all weights written since the last call into Gemini."""
        self._model.load_state_dict(self._written, strict=False)
        self._written = {}


def prepare_colossalai(given: Preparation) -> ColossalEngine:
    """Prepare a model for training with ColossalAI; return its engine."""
    config, world = given.config, given.world
    colossalai = load_colossalai(world)
    built = build_full_model(given)
    booster = colossalai.booster.Booster(plugin=make_plugin(config))
    boosted, wrapper = _boost(booster, built, config, world)
    seed_everything(config.seed, world.rank)
    engine = ColossalEngine(booster, boosted, wrapper, states_of(boosted, wrapper), built, given)
    engine.restore_originals()
    return engine


def _boost(booster: Any, built: BuiltModel, config: RunConfig, world: World) -> tuple[Any, Any]:
    built.module.to(world.device)
    if config.strategy.plugin != "torch_fsdp":
        optimizer = _colossal_adam(built, config) if config.strategy.plugin == "gemini" else built.optimizer(config)
        boosted, wrapper, *_ = booster.boost(built.module, optimizer)
        return boosted, wrapper
    # Given an optimizer, the plugin would build another one without its groups. So it is built after sharding.
    boosted, *_ = booster.boost(built.module)
    plugins = importlib.import_module("colossalai.booster.plugin.torch_fsdp_plugin")
    return boosted, plugins.FSDPOptimizerWrapper(built.optimizer(config), boosted)


def _colossal_adam(built: BuiltModel, config: RunConfig) -> Any:
    """Return ColossalAI's Adam, the only optimizer of Gemini, with the parameter groups of the run's optimizer."""
    assert isinstance(config.optim, AdamWConfig | AdamConfig)
    hybrid_adam = importlib.import_module("colossalai.nn.optimizer").HybridAdam
    groups = [
        {key: value for key, value in group.items() if key in ("params", "lr", "weight_decay")}
        for group in built.optimizer(config).param_groups
    ]
    optim = config.optim
    decoupled = isinstance(optim, AdamWConfig)
    return hybrid_adam(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, adamw_mode=decoupled)
