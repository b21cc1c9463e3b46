"""From a run description to an engine that ColossalAI trains."""

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
    Built,
    EvenNormalizer,
    ForeignEngine,
    ForeignStates,
    PlainStates,
    StepNormalizer,
    build_whole,
)
from plait.engine.preparation import Preparation
from plait.errors import ConfigError, Problem
from plait.optim import grad_norm
from plait.torch_internals import flat_param_reshard, flat_param_shard_info, foreach_mul_

# The engine of a run that ColossalAI trains.


class ColossalEngine(ForeignEngine):
    """Steps through a `Booster`: its backward, its reduction, its update."""

    def __init__(
        self,
        booster: Any,
        boosted: Any,
        wrapper: Any,
        states: ForeignStates,
        built: Built,
        given: Preparation,
    ) -> None:
        """`boosted` and `wrapper` are what `booster` made of the model and its optimizer."""
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
        # It takes the mean over ranks, and the loss is this rank's part of a mean over all of them already.
        with self._without_reduction() if not last else nullcontext():
            self._booster.backward(loss * self.world.size, self._wrapper)

    def _without_reduction(self) -> AbstractContextManager[Any]:
        """Where gradients are reduced with the last micro-batch only; stages 2 and 3 reduce each."""
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
        """Gemini reduces, measures and clips in one."""
        self._wrapper.step()
        norm = self._wrapper.get_grad_norm()
        self._wrapper.zero_grad()
        return math.nan if norm is None else float(norm), False

    def _gradients(self) -> list[Tensor]:
        """This rank's part of each gradient, where it has one."""
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


# The library itself: imported late, and kept from talking over the run's own log.


def load_colossalai(world: World) -> Any:
    """The package `colossalai`, ready for `world`. It wants a GPU: its CPU paths end in errors of their own."""
    check_library("colossalai")
    export_ranks(world.ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels of Apex and others that it would rather have
        colossalai = importlib.import_module("colossalai")
        importlib.import_module("colossalai.booster")
    importlib.import_module("colossalai.logging").disable_existing_loggers()
    logging.getLogger("colossalai").setLevel(logging.WARNING)
    kind = importlib.import_module("colossalai.accelerator").get_accelerator().name
    if kind not in ("cuda", "npu"):
        message = f"colossalai {colossalai.__version__} trains on cuda or npu, and this is {kind}"
        raise ConfigError(Problem("strategy.engine", message, "Use `engine: native`, or a machine with a GPU."))
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    open_group_of_one(world.device)
    return colossalai


# ColossalAI's ways to spread, each told what the run description says.


_CLASSES = {
    "low_level_zero": "LowLevelZeroPlugin",
    "gemini": "GeminiPlugin",
    "hybrid": "HybridParallelPlugin",
    "torch_ddp": "TorchDDPPlugin",
    "torch_fsdp": "TorchFSDPPlugin",
}
_NO_LIMIT = 1e30
"""Gemini measures the norm of gradients only where it clips."""


def make_plugin(config: RunConfig) -> Any:
    """The plugin of `strategy.plugin`, with the options of `strategy.config`."""
    plugin = config.strategy.plugin
    assert plugin is not None
    options = {**_said_by_the_run(config), **(config.strategy.config or {})}
    kind = getattr(importlib.import_module("colossalai.booster.plugin"), _CLASSES[plugin])
    try:
        made = kind(**options)
    except (TypeError, AssertionError) as error:
        message = f"{_CLASSES[plugin]} says: {error}"
        raise ConfigError(Problem("strategy.config", message, "See the options of the plugin.")) from None
    if plugin == "torch_fsdp":
        made.fsdp_kwargs["use_orig_params"] = True  # or all parameters would be one group, with one weight decay
    return made


def _said_by_the_run(config: RunConfig) -> dict[str, Any]:
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
    """What the plugin wants to know of a model that it does not cut: nothing."""
    base: Any = importlib.import_module("colossalai.shardformer.policies.base_policy").Policy

    class Whole(base):  # type: ignore[misc]
        """Leaves a model as it is."""

        def config_sanity_check(self) -> None:
            """Nothing to check."""

        def preprocess(self) -> Any:
            """Nothing to prepare."""
            return self.model

        def module_policy(self) -> dict[Any, Any]:
            """Nothing to replace."""
            return {}

        def postprocess(self) -> Any:
            """Nothing to put right."""
            return self.model

        def get_held_layers(self) -> list[Any]:
            """All of it."""
            return [self.model]

    return Whole()


# Where ColossalAI keeps weights and optimizer states: one class for each of its ways.
#
# All give and take wholes; see [Note: states by way of wholes], `engine/foreign.py`.


def states_of(model: Any, optimizer: Any) -> ForeignStates:
    """The states behind a boosted model and its optimizer."""
    if hasattr(optimizer, "working_to_master_param"):
        return SplitStates(optimizer)
    if hasattr(optimizer, "chunk_manager"):
        return ChunkStates(model, optimizer)
    if type(model).__name__ == "TorchFSDPModel":
        return FlatParamStates(model.module, optimizer)
    masters = getattr(optimizer, "working_to_master_map", None) or {}
    return PlainStates(optimizer.optim, {id(param): master for param, master in masters.items()})


class SplitStates(ForeignStates):
    """ZeRO 1 and 2: each parameter is cut flat into equal stretches, the last one filled up."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper.optim)
        self._wrapper = wrapper

    def home(self, param: Any) -> Tensor:
        """This rank's stretch of the fp32 weights."""
        home: Tensor = self._wrapper.working_to_master_param[id(param)]
        return home

    def read(self, param: Any, key: str | None) -> Tensor:
        """The stretches of all ranks, without what fills up the last."""
        mine: Tensor = self.home(param) if key is None else self.state(param)[key]
        if mine.ndim == 0:
            return mine
        mine = mine.detach().to(param.device).contiguous()
        every = mine.new_empty(mine.numel() * dist.get_world_size())
        all_gather_flat(every, mine)
        return every[: param.numel()].view(param.shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """This rank's stretch of it, and what computes."""
        mine: Tensor = self.home(param) if key is None else self.state(param)[key]
        if mine.ndim == 0:
            mine.copy_(whole)
            return
        size = mine.numel()
        filled = F.pad(whole.flatten(), (0, size * dist.get_world_size() - whole.numel()))
        mine.data.copy_(filled.narrow(0, size * dist.get_rank(), size))
        if key is None:
            self.write_computing(param, whole)


class ScatteredStates(ForeignStates):
    """Of a parameter some ranks have a part, and others nothing at all, not even the names of its states."""

    def _ranks_of(self, param: Any) -> dict[str, int]:
        """Each state's name and number of dimensions, as ranks know it that have a part."""
        mine = {key: getattr(value, "ndim", 0) for key, value in self.state(param).items()}
        found: dict[str, int] = first_of(mine or None) or {}
        return found

    def keys(self, param: Any) -> list[str]:
        """The same on every rank."""
        return list(self._ranks_of(param))


def first_of(value: Any) -> Any:
    """The first rank's value that is not None, on every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return next((each for each in found if each is not None), None)


class FlatParamStates(ScatteredStates):
    """`torch_fsdp`: parameters are stretches of one flat vector."""

    def __init__(self, model: Any, wrapper: Any) -> None:
        super().__init__(wrapper.optim)
        self._model = model

    def home(self, param: Any) -> Tensor:
        """The stretch itself."""
        home: Tensor = param
        return home

    def _place(self, param: Any) -> tuple[Any, torch.Size]:
        return flat_param_shard_info(self._model, param)  # the plugin makes one unit of the whole model

    def read(self, param: Any, key: str | None) -> Tensor:
        """The stretches of all ranks; each has its own, or none."""
        mine: Tensor | None = param if key is None else self.state(param).get(key)
        if key is not None and self._ranks_of(param)[key] == 0:
            return torch.tensor(first_of(None if mine is None else float(mine)))
        info, shape = self._place(param)
        whole = torch.zeros(shape.numel(), device=param.device)
        if info.in_shard and mine is not None:
            whole.narrow(0, info.intra_param_start_idx, info.numel_in_shard).copy_(mine.detach().flatten())
        dist.all_reduce(whole)
        return whole.view(shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """This rank's stretch of it."""
        mine: Tensor | None = param if key is None else self.state(param).get(key)
        if mine is None:
            return
        if key is not None and mine.ndim == 0:
            mine.copy_(whole)
            return
        info, _ = self._place(param)
        if info.in_shard:
            part = whole.flatten().narrow(0, info.intra_param_start_idx, info.numel_in_shard)
            mine.data.copy_(part.view(mine.shape))

    def write_computing(self, param: Any, whole: Tensor) -> None:
        """The parameter has one place, for the fp32 weights and for computing."""
        self.write(param, None, whole)

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, whole: bool) -> None:
        """Make room where there is a part; elsewhere the optimizer never steps, and its count would stand still."""
        if self._place(param)[0].in_shard:
            super().allocate(param, key, shape, dtype, whole=whole)

    def publish(self) -> None:
        """Let go of the whole that a forward pass without a backward pass leaves behind; it would be used again."""
        flat_param_reshard(self._model)


class ChunkStates(ScatteredStates):
    """Gemini: parameters lie in chunks, of which ranks have parts; it gathers them itself."""

    def __init__(self, model: Any, wrapper: Any) -> None:
        super().__init__(wrapper.optim)
        self._model = model
        self._wrapper = wrapper
        self._names = {id(param): name for name, param in model.module.named_parameters()}
        self._ids = {id(param): number for number, param in wrapper.id_to_real_params.items()}
        self._written: dict[str, Tensor] = {}

    def home(self, param: Any) -> Tensor:
        """What stands for the parameter in the optimizer; nothing on ranks without a part of it."""
        home: Tensor = self._wrapper.id_to_fake_params.get(self._ids[id(param)], param)
        return home

    def read(self, param: Any, key: str | None) -> Tensor:
        """The whole, which Gemini gathers from its chunks."""
        if key is None:
            found: Tensor = self._model.state_dict(only_rank_0=False)[self._names[id(param)]]
            return found.to(param.device).float()
        number = self._ids[id(param)]
        state = self._wrapper.collect_states(number, only_rank_0=False)[key]
        shape = () if key == "step" else self._wrapper.params_info["id2shape"][number]
        return torch.as_tensor(state, dtype=torch.float32).to(param.device).view(shape)

    def write(self, param: Any, key: str | None, whole: Tensor) -> None:
        """Kept until `publish`, which loads all weights at once; states at once."""
        if key is None:
            self._written[self._names[id(param)]] = whole
        elif self._ids[id(param)] in self._wrapper.id_to_fake_params:
            self._wrapper.load_single_param_states(self._ids[id(param)], {key: whole})

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, whole: bool) -> None:
        """Gemini makes room as it loads."""
        self.write(param, key, torch.zeros(shape, dtype=dtype, device=param.device))

    def write_computing(self, param: Any, whole: Tensor) -> None:
        """Kept until `publish`, like the trained ones."""
        self.write(param, None, whole)

    def publish(self) -> None:
        """Hand all weights written since the last time to Gemini, which loads them at once."""
        self._model.load_state_dict(self._written, strict=False)
        self._written = {}


def prepare_colossalai(given: Preparation) -> ColossalEngine:
    """Make a model ready to train with ColossalAI, as its configuration says."""
    config, world = given.config, given.world
    colossalai = load_colossalai(world)
    built = build_whole(given)
    booster = colossalai.booster.Booster(plugin=make_plugin(config))
    boosted, wrapper = _boost(booster, built, config, world)
    seed_everything(config.seed, world.rank)
    engine = ColossalEngine(
        booster,
        boosted,
        wrapper,
        states_of(boosted, wrapper),
        built,
        given,
    )
    engine.restore_originals()
    return engine


def _boost(booster: Any, built: Built, config: RunConfig, world: World) -> tuple[Any, Any]:
    built.module.to(world.device)
    if config.strategy.plugin != "torch_fsdp":
        optimizer = _own_adam(built, config) if config.strategy.plugin == "gemini" else built.optimizer(config)
        boosted, wrapper, *_ = booster.boost(built.module, optimizer)
        return boosted, wrapper
    # The plugin would make the optimizer anew without its groups; made after the model is cut, it need not be.
    boosted, *_ = booster.boost(built.module)
    plugins = importlib.import_module("colossalai.booster.plugin.torch_fsdp_plugin")
    return boosted, plugins.FSDPOptimizerWrapper(built.optimizer(config), boosted)


def _own_adam(built: Built, config: RunConfig) -> Any:
    """ColossalAI's Adam, which is all that Gemini takes; with the groups that the run's own would have."""
    assert isinstance(config.optim, AdamWConfig | AdamConfig)
    kind = importlib.import_module("colossalai.nn.optimizer").HybridAdam
    groups = [
        {key: value for key, value in group.items() if key in ("params", "lr", "weight_decay")}
        for group in built.optimizer(config).param_groups
    ]
    optim = config.optim
    decoupled = isinstance(optim, AdamWConfig)
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, adamw_mode=decoupled)
